"""Devices whose stages JAX computes, in a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from isthmus.api.observer import Observer
from isthmus.api.pipeline import Choices, run_job
from isthmus.errors import UserError
from isthmus.fleet import dump_fleet
from isthmus.runtime.coordinator.backend import local_places
from isthmus.runtime.processes.signals import Stop

from .jobs import DIGITS, fleet_of, job_of


def test_each_device_has_an_engine() -> None:
    found = local_places("cpu", ("a", "b"), {"b": "jax"})
    assert found["a"].engine == "torch" and found["b"].engine == "jax"
    assert "--engine" in found["b"].options() and "jax" in found["b"].options()
    assert {place.engine for place in local_places("cpu", ("a", "b"), "jax").values()} == {"jax"}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("tensorflow", "runtime.engine: unknown engine 'tensorflow'"),
        ({"a": "tf"}, "runtime.engine.a: unknown engine 'tf'"),
        ({"z": "jax"}, "runtime.engine: unknown device 'z'"),
    ],
)
def test_refusals(engine: str | dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        local_places("cpu", ("a", "b"), engine)


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
