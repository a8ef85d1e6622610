"""CSV and JSON lines: what a run gave, in a file of its folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import msgspec
import pytest

from isthmus.callbacks import Evaluated, RunEnded, RunStarted, StepDone
from isthmus.errors import UserError
from isthmus.graph.metrics import Metrics, give_metric
from isthmus.trackers import Track, TrackerCallback
from isthmus.trackers.callback import step_figures


def session(run: Path, first: int, last: int, outcome: str) -> None:
    notes: list[str] = []
    callback = TrackerCallback(Track(to=("csv", "jsonl"), group="rates"), notes.append, drain_s=600.0)
    settings = {"training": {"steps": 4}}
    callback.start(RunStarted(run=run, kind="pipeline", steps=4, first_step=first, settings=settings))
    for step in range(first + 1, last + 1):
        callback.step(StepDone(step=step, steps=4, loss=1 / step))
    callback.evaluation(Evaluated(step=last, loss=0.25, metrics={"accuracy": 0.5, "top_five": None}))
    callback.end(RunEnded(run=run, outcome="done" if outcome == "done" else "interrupted"))
    assert notes == []


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    session(tmp_path, 0, 2, "interrupted")
    session(tmp_path, 2, 4, "done")
    with (tmp_path / "figures.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], float(row["value"])) for row in rows if row["name"] == "loss"] == [
        (str(step), 1 / step) for step in range(1, 5)
    ]
    assert [(row["step"], row["value"]) for row in rows if row["name"] == "accuracy"] == [("2", "0.5"), ("4", "0.5")]
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [line["resumed"] for line in lines if "settings" in line] == [False, True]
    assert lines[0]["settings"]["training.steps"] == 4
    assert [(line["step"], line["accuracy"]) for line in lines if "accuracy" in line] == [(2, 0.5), (4, 0.5)]
    assert lines[-1] == {"outcome": "done"}


def test_no_metric_has_the_name_of_another_column() -> None:
    """A metric would overwrite it."""
    done = StepDone(
        step=1, steps=1, loss=1.0, step_s=1.0, tokens_per_s=1.0, samples_per_s=1.0, busy={"a": 1.0}, clients=1
    )
    others = ("step", "event", "heldout_loss", "clients/loss", "faults")
    one, several = (step_figures(msgspec.structs.replace(done, learning_rates=rates)) for rates in ((1.0,), (1.0, 2.0)))
    for name in {*one, *several, *others}:

        def named() -> None: ...

        named.__name__ = name
        with pytest.raises(UserError, match="trackers have a column of this one"):
            Metrics([give_metric(named)])
