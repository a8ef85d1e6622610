"""Machines of a fleet that feed one chain with data of their own, under a coordinator in an empty folder."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.cost import build_plan
from isthmus.data.description import describe, joined_descriptions
from isthmus.errors import PeerError
from isthmus.graph import Flow, cuts
from isthmus.job import Job, PlanConfig, Prepared, prepare
from isthmus.plans import load_plan, save_plan
from isthmus.training.checkpoint import latest_checkpoint, newest_checkpoint, read_manifest
from tests.runtime.jobs import final_weights, fleet_of
from tests.runtime.joined_loop import Plain

from .holders import Joined, write_samples
from .parties import soon
from .test_private_data import coordinator, go, make_job, opened

__all__ = ["coordinator", "opened"]  # fixtures

HOLDERS = ("d0", "d1")


def fed_job(folder: Path, steps: int, *, labels_stay: bool = False) -> Job:
    job = make_job(folder, steps=steps, holders=HOLDERS)
    constraints = PlanConfig(data_holder=HOLDERS, holders_data="own", labels_stay=labels_stay)
    return msgspec.structs.replace(job, plan=constraints)


def both_ends(prepared: Prepared, folder: Path) -> Path:
    """A plan in which each holder has the first and the last stage, and d2 what is between."""
    problem = prepared.problem(fleet_of(3))
    legal = [cut.position for cut in cuts(Flow(prepared.captured.train, columns_first=True))]
    assert problem.last_start is not None
    plan = build_plan(problem, ["d0", "d2", "d0"], [legal[len(legal) // 3], problem.last_start], planner="test")
    save_plan(plan, folder / "plan.json")
    return folder / "plan.json"


def read_here(job: Job, folder: Path) -> Prepared:
    """For the plain loop, which reads all holders' files."""
    of: dict[str, dict[str, object]] = {name: {"path": str(folder / name / "samples.npz")} for name in HOLDERS}
    job = msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, of=of))
    return prepare(job, joined_descriptions({name: describe(job.data.at(name), heldout=True) for name in HOLDERS}))


def equals_plain(run: Path, prepared: Prepared, *, bits: bool = False) -> None:
    plain = Plain(prepared)
    for step in range(prepared.job.training.steps):
        plain.step(step)
    saved, (rtol, atol) = final_weights(run), (0.0, 0.0) if bits else (1e-5, 1e-6)
    for name, value in plain.module.named_parameters():
        torch.testing.assert_close(saved[name], value.detach(), rtol=rtol, atol=atol)


def lose_a_holder(job: Job, joined: Joined, run: Path, plan: Path | None = None) -> None:
    """A run that ends because d1 is lost after the first checkpoint."""
    ends: list[Exception] = []

    def running() -> None:
        try:
            go(job, joined, run, plan)
        except PeerError as error:
            ends.append(error)

    thread = threading.Thread(target=running, daemon=True)
    thread.start()
    soon(lambda: newest_checkpoint(run / "checkpoints") is not None, 60)
    joined.remove("d1")
    thread.join(120)
    assert not thread.is_alive()
    (error,) = ends
    assert "'d1'" in str(error) and "has data of its own" in str(error)


def resumed(job: Job, joined: Joined, run: Path) -> Job:
    """Goes on for four steps; returns the job of so many."""
    steps = read_manifest(latest_checkpoint(run / "checkpoints")).step + 4
    shorter = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=steps))
    go(shorter, joined, run, resume=True)
    return shorter


@pytest.mark.long
def test_holders_of_different_files_feed_a_device_without_any(
    joined: Joined, tmp_path: Path, coordinator: Path, opened: list[str]
) -> None:
    """The same file names in both folders, and one where the coordinator runs, which is none of its business."""
    data = tmp_path / "data"
    joined.add("d0", write_samples(data / "d0", seed=1, count=60))
    joined.add("d1", write_samples(data / "d1", seed=2, count=24))
    joined.add("d2", None)
    write_samples(coordinator, seed=9, width=5)
    job = fed_job(tmp_path, steps=4)
    opened.clear()
    go(job, joined, tmp_path / "run")
    longer = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=8))
    go(longer, joined, tmp_path / "run", resume=True)
    assert opened and not [path for path in opened if path.endswith(".npz")]
    plan = load_plan(tmp_path / "run" / "plan.json")
    assert plan.used[0] == "d0" and plan.devices[-1] == "d1"
    assert [own.train for own in plan.constraints.own_samples] == [45, 18]
    equals_plain(tmp_path / "run", read_here(longer, data))


@pytest.mark.long
def test_labels_and_samples_stay_with_holders_that_run_both_ends_of_the_chain(
    joined: Joined, tmp_path: Path, coordinator: Path
) -> None:
    """A holder that is lost is lost with both of its stages; when it is back the run is resumed."""
    data = tmp_path / "data"
    joined.add("d0", write_samples(data / "d0", seed=1, count=60))
    joined.add("d1", write_samples(data / "d1", seed=2, count=24))
    joined.add("d2", None)
    job = fed_job(tmp_path, steps=300, labels_stay=True)
    job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, save_every=4))
    prepared, run = read_here(job, data), tmp_path / "run"
    plan = both_ends(prepared, tmp_path)
    lose_a_holder(job, joined, run, plan)
    joined.add("d1", data / "d1")
    shorter = resumed(job, joined, run)
    assert load_plan(run / "plan.json").devices == ("d0", "d2", "d0", "d1", "d1")
    equals_plain(run, read_here(shorter, data))


@pytest.mark.long
def test_a_run_does_not_go_on_without_a_holders_samples_and_resumes_with_them(
    joined: Joined, tmp_path: Path, coordinator: Path
) -> None:
    data = tmp_path / "data"
    for seed, name in enumerate(HOLDERS):
        joined.add(name, write_samples(data / name, seed=seed))
    joined.add("d2", None)
    job, run = fed_job(tmp_path, steps=300), tmp_path / "run"
    one_each = msgspec.structs.replace(job.training, micro_batches=2, save_every=4)
    job = msgspec.structs.replace(job, training=one_each)
    lose_a_holder(job, joined, run)
    joined.add("d1", data / "d1")
    shorter = resumed(job, joined, run)
    equals_plain(run, read_here(shorter, data), bits=True)
