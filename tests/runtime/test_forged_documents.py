"""Forged plan documents on the command line: each is answered, and none passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import represented_by

from .commands import edited, isthmus, write_job
from .test_plan_commands import clinics

Document = dict[str, Any]


def far_apart(folder: Path) -> Path:
    return write_job(folder, fleet="three-sites", planner="chain")


def cheap(folder: Path) -> Path:
    return clinics(folder, 'objective = "cost"', speed="30 GFLOPS")


def labels_stay(folder: Path) -> Path:
    return clinics(folder, 'data_holder = "clinic"', "labels_stay = true", speed="20 MFLOPS", planner="auto")


def several_counts(folder: Path) -> Path:
    job = write_job(folder, fleet="dtfm-case4", planner="auto")
    return edited(job, ("[training]", "[plan]\nmicro_batches = [2, 4]\n\n[training]"))


JOBS = (far_apart, cheap, labels_stay, several_counts)


def claiming(document: Document, **fields: object) -> Document:
    return {**document, "certificate": {**document["certificate"], **fields}}


def raised(document: Document, times: float) -> Document:
    """With the gap that belongs to this bound."""
    stated = document["certificate"]
    reached, bound = stated["lower_bound"] * (1 + stated["gap"]), stated["lower_bound"] * times
    return claiming(document, lower_bound=bound, gap=reached / bound - 1, exact=abs(reached / bound - 1) < 1e-7)


def with_replica(document: Document, **fields: object) -> Document:
    first, *others = document["replicas"]
    return {**document, "replicas": [{**first, **fields}, *others]}


def with_stage(document: Document, **fields: object) -> Document:
    first, *others = document["replicas"][0]["stages"]
    return with_replica(document, stages=[{**first, **fields}, *others])


def predicting(document: Document, **fields: object) -> Document:
    return {**document, "predicted": {**document["predicted"], **fields}}


def forged(made: Document) -> Iterator[tuple[str, Document]]:
    """Ten kinds, and messages where there are any."""
    replica, stated = made["replicas"][0], made["certificate"]
    stage, used = replica["stages"][0], {s["device"] for r in made["replicas"] for s in r["stages"]}
    yield "a higher bound", raised(made, 1.5 * (1 + stated["gap"]))
    yield "a smaller gap", claiming(made, gap=stated["gap"] / 2 - 0.001)
    yield "an exact bound", claiming(made, exact=not stated["exact"])
    yield "another question", claiming(made, question=stated["question"].replace("any devices", "some devices"))
    yield "another step", predicting(made, steady_s=0.9 * made["predicted"]["steady_s"])
    memory = {**stage["memory"], "weights": stage["memory"]["weights"] // 2}
    yield "less memory", with_stage(made, memory=memory)
    yield (
        "a device that is none or another",
        with_stage(made, device="d9" if len(used) < 2 else max(used - {stage["device"]})),
    )
    yield "another share", with_replica(made, micro_batches=replica["micro_batches"] + 1)
    yield "a stage less", with_replica(made, stages=replica["stages"][:-1])
    if replica["edges"]:
        first, *edges = replica["edges"]
        yield (
            "smaller messages",
            with_replica(made, edges=[{**first, "forward_bytes": first["forward_bytes"] // 2}, *edges]),
        )
    yield "a period of sums", {**made, "sync": {**made["sync"], "period": 10**15}}


@pytest.mark.parametrize("job", represented_by(JOBS, far_apart))
def test_no_forged_document_passes(tmp_path: Path, job: Callable[[Path], Path]) -> None:
    path, document = job(tmp_path), tmp_path / "plan.json"
    document.write_text(isthmus("plan", path, "--json").out)
    made = json.loads(document.read_text())
    assert isthmus("plan", path, "--verify", document).code == 0
    for kind, other in forged(made):
        document.write_text(json.dumps(other))
        done = isthmus("plan", path, "--verify", document)
        assert done.code in (1, 2), (kind, done)
        assert (done.out + done.err).strip(), kind
