"""U-shaped plans: the holder of samples and labels has the first and the last stage, other devices those between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.graph import cuts
from isthmus.job import Job, PlanConfig, Prepared, prepare
from isthmus.plans import Plan
from isthmus.plans.plan import worker_id

from .jobs import TEXT, final_weights, fleet_of, job_of, plain_run
from .test_run_parity import BERT, GPT
from .test_what_leaves import ThreadCrew, micro_batches_of_labels, recorded

FIRST_CLASS, CLASSES = 100, 200


def pairs(folder: Path) -> DataSpec:
    """Classes whose bytes are not found by chance."""
    path = folder / "pairs.jsonl"
    rows = [
        {"premise": f"the {i} dogs run", "hypothesis": f"{i} animals move", "label": FIRST_CLASS + i % 61}
        for i in range(120)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    names = [f"class {k}" for k in range(CLASSES)]
    return DataSpec(kind="pairs", options={"path": str(path), "sequence_length": 24, "label_names": names})


CASES: dict[str, tuple[str, dict[str, object], Callable[[Path], DataSpec]]] = {
    "gpt": ("gpt", {**GPT, "layers": 4}, lambda _: TEXT),
    "bert": ("hf-bert-classifier", {**BERT, "num_hidden_layers": 4, "num_labels": CLASSES}, pairs),
}


def u_shaped(job: Job, devices: int) -> tuple[Prepared, Plan]:
    """Stages end where one activation passes, so that sums have eager autograd's order."""
    prepared, fleet = prepare(job), fleet_of(devices)
    problem = prepared.problem(fleet)
    assert problem.last_start is not None
    legal = cuts(problem.flow)
    fewest = min(len(cut.values) for cut in legal)
    narrow = [cut.position for cut in legal if len(cut.values) == fewest and cut.position < problem.last_start]
    inner = [narrow[len(narrow) * k // devices] for k in range(1, devices)]
    names = [*fleet.names, fleet.names[0]]
    return prepared, build_plan(problem, names, [*inner, problem.last_start], planner="test")


@pytest.mark.parametrize("devices", [3, 4, 5])
@pytest.mark.parametrize("name", CASES)
def test_a_u_shaped_run_equals_the_plain_module(
    name: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options, data = CASES[name]
    job = msgspec.structs.replace(
        job_of(model, options, data(tmp_path), eval_every=2, eval_samples=4),
        plan=PlanConfig(data_holder="d0", labels_stay=True),
    )
    prepared, plan = u_shaped(job, devices)
    assert [stage.device for stage in plan.stages] == [*(f"d{k}" for k in range(devices)), "d0"]
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    frames = recorded(monkeypatch)
    options_ = RunOptions(emulate=False, backend=ThreadCrew())
    outcome = run_plan(prepared, plan, fleet_of(devices), tmp_path / "run", options_, watcher)
    assert outcome.outcome == "done"
    module, expected = plain_run(job, prepared)
    assert losses == expected
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    for weight, value in final_weights(tmp_path / "run").items():
        if not weight.startswith("optimizer."):
            assert torch.equal(value, own[weight]), weight
    for edge in plan.replica.edges:
        labels = [value for value in edge.values if "label" in value]
        assert bool(labels) is ((edge.source, edge.target) == (0, devices)), "from the holder to itself alone"
    inside = [f"device {worker_id('d0', 1)!r}", "device 'd0'"]
    away, kept = (b"".join(frame for to, frame in frames if (to in inside) is here) for here in (False, True))
    assert len(away) > 10_000, "the recorder sees something"
    columns = micro_batches_of_labels(job)
    assert len(columns) == 2 * 4 + 2 and all(labels in kept for labels in columns)
    assert not [labels for labels in columns if labels in away]
