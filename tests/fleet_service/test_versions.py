"""Devices with other versions: what differs and is used is named, everything else works."""

from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from isthmus.api.observer import Observer
from isthmus.api.run_job import run_job
from isthmus.api.run_session import Choices
from isthmus.errors import UserError
from isthmus.fleet import dump_fleet
from isthmus.graph.operators import schema_of
from isthmus.job import Job, prepare
from isthmus.plans import Plan
from isthmus.runtime.device.stage_preparation import check_operators
from isthmus.runtime.identity.files import write_private
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service import agent
from isthmus.training.engine_operators import EngineOperators, engine_operators
from tests.runtime.jobs import DIGITS, TEXT, fleet_of, job_of, plain_run
from tests.runtime.wire import assignment

from .holders import Joined
from .parties import Fleet, soon

RELU = "aten.relu.default"
OTHER_PYTHON = os.environ.get("ISTHMUS_OTHER_PYTHON", "")


class _Notes(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.plan: Plan | None = None

    def note(self, text: str) -> None:
        self.lines.append(text)

    def planned(self, plan: Plan, fleet: object, graph: object) -> None:
        self.plan = plan


def on_two(folder: Path, job: Job) -> Job:
    path = folder / "fleet.toml"
    path.write_text(dump_fleet(fleet_of(2, 2e6)))
    runtime = msgspec.structs.replace(job.runtime, emulate=False)
    return msgspec.structs.replace(job, fleet=str(path), planner="chain", runtime=runtime, run_dir=str(folder / "run"))


def job_on_two(folder: Path) -> Job:
    return on_two(folder, job_of("mlp", {"layers": 2}, DIGITS, steps=4))


def other(without: str, changed: str = "") -> EngineOperators:
    """Of a version that has no such operator, and another schema of a second one."""
    operators = {target: schema for target, schema in engine_operators("torch").operators.items() if target != without}
    return EngineOperators(torch="9.9.0", operators=operators | ({changed: "00000000"} if changed else {}))


def test_an_operator_that_a_version_does_not_have(
    joined: Joined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device computes the rest of the model, and the numbers are the same."""
    job = job_on_two(tmp_path)
    joined.add("d0", tmp_path)
    monkeypatch.setattr(agent, "engine_operators", lambda _: other(RELU, "aten.any.default"))
    joined.add("d1", tmp_path)
    notes = _Notes()
    run = run_job(job, Choices(backend=joined.fleet.service), notes, Stop())
    assert run.outcome == "done"
    (line,) = [line for line in notes.lines if "torch 9.9.0" in line]
    assert line.startswith("d1: engine torch") and f"lacks {RELU}, which" in line and "aten.any" not in line
    assert notes.plan is not None and "d1" in notes.plan.used
    operators = prepare(job).flow.operators
    held = {s.device: {op.target for op in operators[s.first : s.last + 1]} for s in notes.plan.stages}
    assert RELU in held["d0"] and RELU not in held["d1"]
    assert [point.loss for point in run.losses] == plain_run(job, prepare(job))[1]


@pytest.mark.long
def test_one_that_differs_and_is_not_used(joined: Joined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "engine_operators", lambda _: other("aten.any.default"))
    for name in ("d0", "d1"):
        joined.add(name, tmp_path)
    notes = _Notes()
    assert run_job(job_on_two(tmp_path), Choices(backend=joined.fleet.service), notes, Stop()).outcome == "done"
    assert sum("has all operators of the model" in line for line in notes.lines) == 2


def test_a_device_looks_itself() -> None:
    """A stage of a plan from elsewhere."""
    given = assignment("d0")
    for schema, alike in ((schema_of(RELU), True), ("aten::relu(Tensor self, int more) -> Tensor", False)):
        stage = msgspec.structs.replace(given.train, schemas={RELU: schema})
        with nullcontext() if alike else pytest.raises(UserError, match=rf"device 'd0' .* lacks {RELU} at the schema"):
            check_operators(msgspec.structs.replace(given, train=stage), "torch")


@pytest.mark.skipif(not OTHER_PYTHON, reason="ISTHMUS_OTHER_PYTHON names a Python with another version of torch")
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_two_versions_of_torch_in_one_run(joined: Joined, fleet: Fleet, tmp_path: Path, model: str) -> None:
    """Losses are those of one version."""
    gpt = job_of("gpt", {"layers": 2, "width": 32, "heads": 2, "sequence_length": 16}, TEXT, steps=20)
    job = on_two(tmp_path, gpt) if model == "gpt" else job_on_two(tmp_path)
    joined.add("d0", tmp_path)
    write_private(tmp_path / "ticket", fleet.state.ticket().encode())
    options = ["--ticket-file", str(tmp_path / "ticket"), "--state", str(tmp_path / "d1"), "--name", "d1"]
    source = str(Path(__file__).parents[2] / "src")
    with subprocess.Popen(
        [OTHER_PYTHON, "-P", "-m", "isthmus", "join", *options, "--device", "cpu", "--data", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": source},
    ) as process:
        try:
            soon(lambda: "d1" in fleet.service.present or process.poll() is not None, 300)
            assert process.poll() is None
            notes = _Notes()
            run = run_job(job, Choices(backend=fleet.service), notes, Stop())
        finally:
            process.terminate()
    (line,) = [line for line in notes.lines if line.startswith("d1: engine torch, torch ")]
    assert "has all operators of the model" in line or "lacks" in line
    expected = plain_run(job, prepare(job))[1]
    assert [point.loss for point in run.losses] == pytest.approx(expected, rel=1e-6)
