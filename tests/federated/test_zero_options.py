"""Zero turns something off, or leaves a bound out; it is no slip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.federated.evaluation import RoundHistory
from isthmus.protocol.federated_messages import ClientTime
from isthmus.protocol.federated_scheduler import ThroughputModel
from tests.federated.test_run_folders import JOB
from tests.runtime.commands import isthmus


def job(folder: Path, *changes: tuple[str, str]) -> Path:
    text = JOB.format(folder=folder)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


@pytest.mark.parametrize("window", [0, 5])
def test_a_window_of_none_is_all_rounds(window: int) -> None:
    throughput = ThroughputModel(1, window_rounds=window)
    for round_ in range(300):
        seconds = 1.0 if round_ < 150 else 3.0
        throughput.record(round_, 0, [ClientTime(0, 10, seconds), ClientTime(1, 20, 2 * seconds)])
    assert throughput.line(0).seconds(10) == pytest.approx(3.0 if window else 2.0)


def test_a_job_may_say_so(tmp_path: Path) -> None:
    path = job(tmp_path, ('scheme = "sp"', 'scheme = "sp"\nwindow_rounds = 0'))
    assert isthmus("train", path).code == 0


@pytest.mark.parametrize("clients", [0, 2])
def test_without_held_out_samples_nothing_is_evaluated_on_them(clients: int, tmp_path: Path) -> None:
    path = job(
        tmp_path,
        ("flat = true", "flat = true, holdout = 0"),
        ("eval_every = 0", f"eval_every = 1\neval_clients = {clients}"),
    )
    done = isthmus("train", path)
    assert done.code == 0, done.err
    assert "held-out" not in done.out and ("clients' own data" in done.out) == bool(clients)
    found = [line.evaluation for line in RoundHistory.of(tmp_path / "runs" / "small").lines()]
    if clients:
        assert all(e is not None and e.loss is None and e.clients["loss"].clients == clients for e in found)
    else:
        assert found == [None] * 3
    broadcast = json.loads(isthmus("train", path, "--json").out)
    assert (broadcast["evaluation"] is None) == (not clients)
