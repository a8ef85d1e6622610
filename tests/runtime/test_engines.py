"""Devices whose stages JAX computes, in a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from isthmus.api.observer import Observer
from isthmus.api.run_job import run_job
from isthmus.api.run_session import Choices
from isthmus.errors import UserError
from isthmus.fleet import Fleet, dump_fleet, parse_fleet
from isthmus.graph.operators import schema_of
from isthmus.job import Job, prepare
from isthmus.job import fleet_of as of_job
from isthmus.plans import LackingOperators
from isthmus.runtime.coordinator.backend import local_places
from isthmus.runtime.processes.signals import Stop

from .jobs import DIGITS, fleet_of, job_of


def with_engine(fleet: Fleet, device: str) -> Fleet:
    devices = (msgspec.structs.replace(d, engine="jax" if d.name == device else "torch") for d in fleet.devices)
    return msgspec.structs.replace(fleet, devices=tuple(devices))


def job_with(engine: str | dict[str, str], folder: Path) -> Job:
    job = job_of("mlp", {}, DIGITS)
    runtime = msgspec.structs.replace(job.runtime, engine=engine)
    return msgspec.structs.replace(job, fleet=str(folder / "fleet.toml"), runtime=runtime)


def test_each_device_has_an_engine() -> None:
    found = local_places("cpu", ("a", "b"), {"b": "jax"})
    assert found["a"].engine == "torch" and found["b"].engine == "jax"


@pytest.mark.parametrize(
    ("engine", "expected"), [({}, ["torch", "jax"]), ("torch", ["torch", "torch"]), ({"d0": "jax"}, ["jax", "jax"])]
)
def test_a_job_chooses_over_its_fleet_file(tmp_path: Path, engine: str | dict[str, str], expected: list[str]) -> None:
    (tmp_path / "fleet.toml").write_text(dump_fleet(with_engine(fleet_of(2), "d1")))
    assert [device.engine for device in of_job(job_with(engine, tmp_path)).devices] == expected


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("tensorflow", "runtime.engine: unknown engine 'tensorflow'"),
        ({"d0": "tf"}, "runtime.engine.d0: unknown engine 'tf'"),
        ({"z": "jax"}, "runtime.engine: unknown device 'z'"),
    ],
)
def test_refusals(tmp_path: Path, engine: str | dict[str, str], words: str) -> None:
    """Whatever is done with the job."""
    (tmp_path / "fleet.toml").write_text(dump_fleet(fleet_of(2)))
    with pytest.raises(UserError, match=words):
        of_job(job_with(engine, tmp_path))


def test_a_fleet_file_with_an_engine_that_is_none() -> None:
    text = dump_fleet(with_engine(fleet_of(2), "d1")).replace('"jax"', '"tf"')
    with pytest.raises(UserError, match=r"\[\[device\]\] 2 'd1': engine: unknown engine 'tf'"):
        parse_fleet(text, "fleet.toml")


def test_operators_without_an_entry_stay_with_torch(tmp_path: Path) -> None:
    """JAX has none for a recurrent layer."""
    (tmp_path / "fleet.toml").write_text(dump_fleet(fleet_of(2)))
    lstm = "aten.lstm.input"
    lacking = LackingOperators(device="d1", operators=(lstm,))
    prepared = prepare(job_with({"d1": "jax"}, tmp_path))
    train = msgspec.structs.replace(prepared.captured.train, schemas={lstm: schema_of(lstm)})
    captured = msgspec.structs.replace(prepared.captured, train=train)
    assert msgspec.structs.replace(prepared, captured=captured).lacking(of_job(prepared.job)) == (lacking,)
    assert prepared.lacking(of_job(prepared.job)) == ()


class _Notes(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes say what JAX computes; the losses are torch's."""
    pytest.importorskip("jax", reason="the extra jax")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(dump_fleet(fleet_of(2, 2e9)))
    losses: list[list[float | None]] = []
    for engine in ("torch", {"d1": "jax"}):
        job = job_of("mlp", {"layers": 2}, DIGITS, steps=3)
        runtime = msgspec.structs.replace(job.runtime, engine=engine, emulate=False)
        job = msgspec.structs.replace(
            job, fleet=str(fleet), planner="even", runtime=runtime, run_dir=str(tmp_path / str(len(losses)))
        )
        notes = _Notes()
        run = run_job(job, Choices(), notes, Stop())
        losses.append([point.loss for point in run.losses])
        assert sum("computed by JAX" in line for line in notes.lines) == len(losses) - 1
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
