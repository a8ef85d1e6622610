"""A coordinator in an empty folder: holders read their own files, other devices have none, and nobody is told them."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from isthmus.api.folder import RunFolder
from isthmus.api.run_job import run_job
from isthmus.api.run_session import Choices
from isthmus.api.terminal import Terminal
from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.data.description import describe
from isthmus.errors import UserError
from isthmus.fleet import dump_fleet
from isthmus.graph import Flow, cuts
from isthmus.job import Job, PlanConfig, Prepared, prepare
from isthmus.runtime.coordinator.data_holders import DataHolders
from isthmus.runtime.processes.signals import Stop
from tests.runtime.jobs import final_weights, fleet_of, job_of, plain_run

from .holders import SPEC, Joined, write_samples
from .parties import soon

MLP = {"features": 4, "width": 8, "layers": 3, "classes": 3}
_opened: list[str] = []
_watches = threading.Event()


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _watches.is_set():
        _opened.append(str(arguments[0]))


@pytest.fixture
def opened() -> object:
    """Every file that this process opens, in whatever thread: coordinator and agents."""
    if _note not in _hooked:
        sys.addaudithook(_note)
        _hooked.append(_note)
    _opened.clear()
    _watches.set()
    yield _opened
    _watches.clear()


_hooked: list[object] = []


def make_job(folder: Path, *, steps: int, holders: tuple[str, ...]) -> Job:
    fleet = folder / "fleet.toml"
    fleet.write_text(dump_fleet(fleet_of(3)))
    job = job_of("mlp", dict(MLP), SPEC, steps=steps, eval_every=2, eval_samples=4, save_every=2)
    constraints = PlanConfig(data_holder=holders)
    return msgspec.structs.replace(job, plan=constraints, fleet=str(fleet), name="private", planner="chain")


def plan_file(job: Job, prepared: Prepared, devices: tuple[str, ...], folder: Path) -> Path:
    problem = prepared.problem(fleet_of(3))
    legal = [cut.position for cut in cuts(Flow(prepared.captured.train, columns_first=True))]
    plan = build_plan(problem, list(devices), [legal[len(legal) // 2]], planner="test")
    path = folder / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    return path


def at(job: Job, folder: Path) -> Job:
    """The job on files in a folder, for the plain loop."""
    spec = DataSpec(kind="npz", options={**SPEC.options, "path": str(folder / "samples.npz")})
    return msgspec.structs.replace(job, data=spec)


def equals_plain(run: Path, job: Job, folder: Path, prepared: Prepared) -> None:
    module, _ = plain_run(at(job, folder), prepared)
    saved = final_weights(run)
    for name, value in module.named_parameters():
        assert torch.equal(saved[name], value), name


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder in which it runs."""
    folder = tmp_path / "coordinator"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def go(job: Job, joined: Joined, run: Path, plan: Path | None = None, *, resume: bool = False) -> str:
    said = io.StringIO()
    choices = Choices(run=run, backend=joined.fleet.service, plan=plan, resume=resume)
    console = Console(file=said, width=200)
    assert run_job(job, choices, Terminal(console, console), Stop()).outcome == "done", said.getvalue()
    return said.getvalue()


def reached(run: Path, step: int) -> None:
    soon(lambda: run.is_dir() and any(p.step >= step for p in RunFolder(run).losses()), 60)


@pytest.mark.long
def test_a_coordinator_without_data_trains_resumes_and_recovers(
    joined: Joined, tmp_path: Path, coordinator: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder, and a device without data; a second holder comes while the run is under way, is compared with the
    first, and takes over from it. A file of the same name where the coordinator runs is none of its business."""
    for name, data in (("d0", "one"), ("d1", None)):
        joined.add(name, write_samples(tmp_path / data) if data is not None else None)
    theirs = write_samples(tmp_path / "two")
    write_samples(coordinator, seed=9, width=5)
    job = make_job(tmp_path, steps=4, holders=("d0", "d2"))
    prepared = prepare(job, describe(at(job, tmp_path / "one").data, heldout=True))
    run, plan = tmp_path / "run", plan_file(job, prepared, ("d0", "d1"), tmp_path)
    opened.clear()
    go(job, joined, run, plan)
    longer = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=250))
    said: list[str] = []
    running = threading.Thread(target=lambda: said.append(go(longer, joined, run, resume=True)), daemon=True)
    running.start()
    reached(run, 7)
    taken: list[str] = []
    take = DataHolders._take
    monkeypatch.setattr(DataHolders, "_take", lambda own, name, found: (take(own, name, found), taken.append(name)))
    joined.add("d2", theirs)
    soon(lambda: "d2" in taken, 60)
    joined.remove("d0")
    running.join(120)
    assert not running.is_alive() and said, "it went on with the other holder"
    assert opened, "the spy sees something"
    assert not [path for path in opened if path.endswith(".npz")]
    equals_plain(run, longer, tmp_path / "one", prepared)
    kept = RunFolder(run).described()
    assert kept.keys() == {"d0"} and kept["d0"].digests.keys() == {"train", "heldout"}


def test_without_a_device_that_can_read_the_data_there_is_no_run(
    joined: Joined, tmp_path: Path, coordinator: Path
) -> None:
    joined.add("d0", tmp_path)
    job = make_job(tmp_path, steps=4, holders=("d0",))
    with pytest.raises(UserError, match=r"device 'd0': npz option 'path': no file samples.npz"):
        go(job, joined, tmp_path / "run")
    assert not (tmp_path / "run").exists()
