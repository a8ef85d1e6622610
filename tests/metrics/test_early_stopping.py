"""Early stopping by the loss or a metric, in pipelines and federated runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import isthmus
from isthmus.api.run_entries import run_entries
from isthmus.errors import UserError
from isthmus.runtime.processes.signals import Stop
from tests.metrics.plain import Classifier, samples


def stopped_at(values: list[float], **options: object) -> int | None:
    """The number of the evaluation that stops the run."""
    stops: list[int] = []
    stopping = isthmus.EarlyStopping("accuracy", **options)  # pyright: ignore[reportArgumentType]
    stopping.start(
        isthmus.RunStarted(
            run=Path("run"),
            kind="pipeline",
            steps=9,
            metrics=("accuracy",),
            stop=lambda _: stops.append(number),
        )
    )
    number = 0
    for number, value in enumerate(values):
        stopping.evaluation(isthmus.Evaluated(step=number, loss=1.0, metrics={"accuracy": value}))
    return stops[0] if stops else None


def test_it_stops_after_so_many_evaluations_without_a_better_one() -> None:
    assert stopped_at([0.1, 0.2, 0.2, 0.1], after=2) == 3
    assert stopped_at([0.1, 0.2, 0.2, 0.3, 0.3], after=2) is None
    assert stopped_at([0.5, 0.4, 0.3], after=2, lower_is_better=True) is None
    assert stopped_at([0.1, 0.105, 0.109], after=2, least=0.05) == 2
    assert stopped_at([math.nan, 0.1, 0.2, 0.3], after=2) is None
    assert stopped_at([0.1, math.nan, math.nan], after=2) == 2


@pytest.mark.parametrize("options", [{"after": "2"}, {"after": True}, {"after": 0}, {"least": -1.0}, {"least": "x"}])
def test_what_is_no_number_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"EarlyStopping: (after|least): got .*, expected a"):
        stopped_at([], **options)


def test_a_job_that_evaluates_nothing_is_refused() -> None:
    settings, names = {"training": {"eval_every": 0}}, ("accuracy",)
    started = isthmus.RunStarted(run=Path("run"), kind="pipeline", steps=9, settings=settings, metrics=names)
    with pytest.raises(UserError, match=r"expected training\.eval_every above 0"):
        isthmus.EarlyStopping("accuracy").start(started)


def never_better(outputs: object, batch: object) -> torch.Tensor:
    assert isinstance(outputs, torch.Tensor)
    return outputs.mean() * 0


calls = itertools.count(1)


def falling(outputs: object, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.tensor(1 / next(calls))


falling.lower_is_better = True  # pyright: ignore[reportFunctionMemberAccess]


def test_a_function_says_itself_whether_low_values_are_good(tmp_path: Path) -> None:
    """It goes down, and the run on."""

    def drawn() -> Classifier:
        torch.manual_seed(4)  # from other first weights the error may stand still for two rounds
        return Classifier()

    runs = {
        name: isthmus.federate(
            model=drawn(),
            loss=F.cross_entropy,
            clients=[samples(64)],
            test=samples(64, 7),
            rounds=100,  # the stop is asked for beside later rounds
            metrics=[falling],
            callbacks=[isthmus.EarlyStopping("falling", after=2, **more)],
            run=tmp_path / name,
            overrides={"runtime.executors": 1},
        )
        for name, more in (("said", {}), ("otherwise", {"lower_is_better": False}))
    }
    assert runs["said"].outcome == "done" and runs["otherwise"].outcome == "stopped"


def test_a_pipeline_stops_with_a_checkpoint(tmp_path: Path) -> None:
    run = isthmus.train(
        model=Classifier(),
        loss=F.cross_entropy,
        data=samples(64),
        test=samples(20, 7),
        steps=400,
        metrics=[never_better],
        callbacks=[isthmus.EarlyStopping("never_better", after=2)],
        run=tmp_path / "run",
        overrides={"training.eval_every": 1},
    )
    assert run.outcome == isthmus.Run(run.path).outcome == "stopped"
    assert run.reason == "EarlyStopping: never_better was not better than 0 for 2 evaluations (best at step 1)"
    assert run.checkpoint is not None and len(run.losses) < 400


def test_a_federated_run_stops(tmp_path: Path) -> None:
    result = isthmus.federate(
        model=Classifier(),
        loss=F.cross_entropy,
        clients=[samples(20, seed) for seed in range(2)],
        rounds=400,
        metrics=[never_better],
        callbacks=[isthmus.EarlyStopping("never_better", after=2)],
        run=tmp_path / "run",
        overrides={"runtime.executors": 1, "training.eval_clients": 2},
    )
    assert result.outcome == isthmus.Run(result.path).outcome == "stopped" and len(result.rounds) < 400
    assert result.reason == "EarlyStopping: never_better was not better than 0 for 2 evaluations (best in round 1)"


class Asked(isthmus.Callback):
    """Ends the run after its second step, and keeps how it ended."""

    def start(self, started: isthmus.RunStarted) -> None:
        self.stop = started.stop

    def step(self, done: isthmus.StepDone) -> None:
        if done.step == 2:
            self.stop("enough")

    def end(self, ended: isthmus.RunEnded) -> None:
        self.ended = ended


def test_replicas_that_never_wait_stop(tmp_path: Path) -> None:
    notes, asked = Lines(), Asked()
    run = isthmus.train(
        model=Classifier(),
        loss=F.cross_entropy,
        data=samples(64),
        steps=400,
        callbacks=[asked],
        track="csv",
        run=tmp_path / "run",
        observer=notes,
        overrides={"sync.mode": "decoupled", "training.batch_size": 8},
    )
    assert (run.path / "figures.csv").read_text().startswith("step"), "trackers hear of its steps"
    assert (run.outcome, run.reason) == ("stopped", "Asked: enough") and len(run.losses) < 400
    assert (asked.ended.outcome, asked.ended.reason) == ("stopped", "Asked: enough")
    assert notes.lines[-1] == "stopped by Asked: enough"
    assert run_entries(run.path)[-1].text == "stopped"


class Lines(isthmus.Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.long
def test_a_run_that_goes_on_was_not_stopped(tmp_path: Path) -> None:
    asked, notes = Asked(), Lines()
    run = isthmus.train(
        model=Classifier(),
        loss=F.cross_entropy,
        data=samples(64),
        steps=400,
        callbacks=[asked],
        run=tmp_path / "run",
        observer=notes,
    )
    assert (asked.ended.outcome, asked.ended.reason) == ("stopped", "Asked: enough")
    assert notes.lines[-1] == "stopped by Asked: enough" and run_entries(run.path)[-1].text == "stopped"
    again = run.resume(steps=len(run.losses) + 1)
    assert (again.outcome, again.reason) == ("done", "") and isthmus.Run(run.path).reason == ""


def test_a_stop_that_is_not_a_callback_s_interrupts() -> None:
    stop = Stop()
    stop.request()
    stop.request("too late")
    assert stop.reason == ""
    other = Stop()
    other.request("first")
    other.request()
    assert other.reason == "first"


def test_a_metric_that_the_job_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="EarlyStopping: metric: got 'accuracy', expected one of loss"):
        isthmus.federate(
            model=Classifier(),
            loss=F.cross_entropy,
            clients=[samples(20)],
            callbacks=[isthmus.EarlyStopping("accuracy")],
            run=tmp_path / "run",
            overrides={"runtime.executors": 1},
        )
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="after: got 0"):
        isthmus.EarlyStopping(after=0)
