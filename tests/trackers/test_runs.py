"""Callbacks and trackers of runs, by the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import isthmus
from isthmus.api.run_session import given_callbacks
from isthmus.data import DataSpec
from isthmus.errors import UserError
from isthmus.job import TrainingConfig
from isthmus.models import ModelSpec
from isthmus.trackers.tracker import TrackedRun

LOSS = nn.functional.mse_loss


class Recording(isthmus.Callback):
    def __init__(self) -> None:
        self.said: list[object] = []

    def start(self, started: isthmus.RunStarted) -> None:
        self.said.append(started)

    def step(self, done: isthmus.StepDone) -> None:
        self.said.append(done)

    def evaluation(self, evaluated: isthmus.Evaluated) -> None:
        self.said.append(evaluated)

    def fault(self, fault: isthmus.RunFault) -> None:
        self.said.append(fault)

    def end(self, ended: isthmus.RunEnded) -> None:
        self.said.append(ended)

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.said]


class Recorder:
    """A tracker of a user, which fails once the run is over."""

    calls: list[tuple[object, ...]]

    def __init__(self, first: str = "") -> None:
        Recorder.calls = [(first,)]

    def start(self, run: TrackedRun) -> None:
        Recorder.calls.append(("start", run.project, run.group, run.resumed, run.settings["name"]))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        Recorder.calls.append(("log", step, dict(figures)))

    def event(self, step: int, text: str) -> None:
        Recorder.calls.append(("event", step, text))

    def picture(self, name: str, path: Path) -> None:
        Recorder.calls.append(("picture", name, path.is_file()))

    def end(self, outcome: str) -> None:
        raise ConnectionError(f"{outcome}: nobody listens")


NAME = f"{__name__}:Recorder"


class Notes(isthmus.Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.long
def test_a_run_of_objects_has_callbacks_and_trackers_and_a_tracker_that_fails_does_not_stop_it(tmp_path: Path) -> None:
    x = torch.randn(16, 4)
    recording, notes = Recording(), Notes()
    run = isthmus.train(
        model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)),
        loss=LOSS,
        data={"input": x, "target": x.sum(1, keepdim=True)},
        batch=8,
        steps=3,
        name="small",
        run=tmp_path / "run",
        callbacks=[recording],
        track=isthmus.Track(to=NAME, group="tried", options={NAME: {"first": "built"}}),
        observer=notes,
    )
    assert run.outcome == "done" and recording.kinds() == ["RunStarted", *["StepDone"] * 3, "RunEnded"]
    started, ended = recording.said[0], recording.said[-1]
    assert isinstance(started, isthmus.RunStarted) and isinstance(ended, isthmus.RunEnded)
    assert started.plan == run.plan and started.kind == "pipeline" and (started.first_step, started.steps) == (0, 3)
    assert ended.outcome == "done" and ended.pictures == run.pictures
    losses = [event.loss for event in recording.said if isinstance(event, isthmus.StepDone)]
    assert losses == [point.loss for point in run.losses]
    calls = Recorder.calls
    assert calls[:3] == [("built",), ("start", "isthmus", "tried", False, "small"), ("picture", "plan", True)]
    logged = [(step, figures["loss"]) for kind, step, figures in (c for c in calls if c[0] == "log")]
    assert logged == [(point.step, point.loss) for point in run.losses]
    assert calls[-3:] == [("picture", name, True) for name in ("plan", "timeline", "loss")]
    complaint = f"tracker {NAME} failed, and gets nothing more: ConnectionError: done: nobody listens"
    assert [line for line in notes.lines if "tracker" in line] == [complaint]


@pytest.mark.parametrize("executors", [1, 2])
def test_a_federated_run_has_them_too_and_a_callback_may_end_it(executors: int, tmp_path: Path) -> None:
    clients = [{"input": torch.randn(8, 4), "target": torch.zeros(8, 1)} for _ in range(4)]

    class Stopping(Recording):
        def step(self, done: isthmus.StepDone) -> None:
            super().step(done)
            if done.step == 2:
                started = self.said[0]
                assert isinstance(started, isthmus.RunStarted)
                started.stop()

    recording = Stopping()
    result = isthmus.federate(
        model=nn.Linear(4, 1),
        loss=LOSS,
        clients=clients,
        rounds=10_000,
        overrides={"runtime.executors": executors},
        run=tmp_path / "run",
        callbacks=[recording],
        track=NAME,
        observer=Notes(),
    )
    kinds = [kind for kind in recording.kinds() if kind != "RunFault"]
    assert (
        (result.outcome, result.reason) == ("stopped", "Stopping")
        and kinds[0] == "RunStarted"
        and kinds[-1] == "RunEnded"
    )
    rounds = [event for event in recording.said if isinstance(event, isthmus.StepDone)]
    assert [event.round for event in rounds] == [line.record for line in result.rounds]
    assert [event.step for event in rounds] == list(range(1, len(rounds) + 1)) and 2 <= len(rounds) < 10_000
    logged = [call[1] for call in Recorder.calls if call[0] == "log"]
    assert logged and set(logged) <= set(range(1, len(rounds) + 1))
    assert ("start", "isthmus", "", False, "linear") in Recorder.calls


def test_what_is_no_callback_and_no_tracker_is_refused(tmp_path: Path) -> None:
    given = {"model": nn.Linear(4, 1), "data": {"input": torch.zeros(4, 4)}, "run": tmp_path / "run", "steps": 1}
    for arguments, words in (
        ({"callbacks": [Recording]}, "callbacks: got the class Recording, expected an object"),
        ({"callbacks": [print]}, "callbacks: got builtin_function_or_method without start"),
        ({"callbacks": Recording()}, "expected a list"),
        ({"track": "tensorbord"}, "unknown track.to 'tensorbord': did you mean 'tensorboard'"),
        ({"callback": []}, "unknown train argument 'callback': did you mean 'callbacks'"),
    ):
        with pytest.raises(UserError, match=words):
            isthmus.train(**given, **arguments)
    assert given_callbacks({}) == () and not (tmp_path / "run" / "job.json").exists()


def test_runs_over_devices_of_a_fleet_take_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, seen = Recording(), list[tuple[object, ...]]()
    monkeypatch.setattr(
        "isthmus.api.serve.serve_job", lambda job, how, *_: seen.append((job.track.names, job.metrics, how.callbacks))
    )
    monkeypatch.setattr(
        "isthmus.api.up.run_on_engine", lambda job, how, *_: seen.append((job.track.names, job.metrics, how.callbacks))
    )
    job = isthmus.Job(
        name="x",
        model=ModelSpec(name="mlp"),
        data=DataSpec(kind="digits"),
        training=TrainingConfig(eval_every=1),
    )
    isthmus.serve(job, port=0, callbacks=[said], track="csv", metrics=["accuracy"], state=tmp_path)
    isthmus.up(job, on="local", callbacks=[said], track="csv", metrics=["accuracy"], quiet=True)
    assert seen == [(("csv",), ("accuracy",), (said,))] * 2
    with pytest.raises(UserError, match="unknown serve argument 'callback': did you mean 'callbacks'"):
        isthmus.serve(job, callback=[said])  # pyright: ignore[reportCallIssue]
