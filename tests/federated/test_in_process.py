"""A run in one process ends when it is asked to, and does not go on with a round for ever."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from isthmus.federated.in_process import InProcess
from isthmus.programs.open_phase import RoundRecord
from tests.federated.populations import Run


def test_an_interrupted_run_keeps_the_rounds_that_were_committed(tmp_path: Path) -> None:
    run, whole = Run("fedavg", {}, tmp_path / "run"), Run("fedavg", {}, tmp_path / "whole", rounds=2)
    whole.run()

    def committed(record: RoundRecord) -> None:
        run.records.append(record)
        if len(run.records) == 2:
            driver.interrupt()

    driver = InProcess(run.machine, run.server, run.sites, committed=committed)
    assert driver.run().outcome == "interrupted"
    assert [record.round for record in run.records] == [0, 1]
    assert run.model.equal(whole.model)


def test_a_round_that_takes_too_long_is_tried_again_and_given_up(tmp_path: Path) -> None:
    run = Run("fedavg", {}, tmp_path, deadline_s=10.0, attempts=3)
    passing = count(0.0, 8.0)
    finish = InProcess(run.machine, run.server, run.sites, clock=lambda: next(passing)).run()
    assert finish.outcome == "lost"
    assert "round 1: 0 clients were in, expected at least 1, after 3 attempts of 10 s" in finish.reason
    assert not run.records


def test_a_round_in_time_is_committed(tmp_path: Path) -> None:
    run = Run("fedavg", {}, tmp_path, rounds=3, deadline_s=10.0)
    passing = count(0.0, 0.1)
    driver = InProcess(run.machine, run.server, run.sites, committed=run.records.append, clock=lambda: next(passing))
    assert driver.run().outcome == "done"
    assert [record.closed_by for record in run.records] == ["all"] * 3
