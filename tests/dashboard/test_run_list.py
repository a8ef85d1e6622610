"""`isthmus runs`: what became of the runs of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.api.folder import RunFolder
from isthmus.dashboard.run_list import runs_in
from isthmus.errors import UserError
from isthmus.run_files import JOB
from tests.dashboard.folders import federated_run
from tests.runtime.commands import isthmus, refused


def test_states_steps_and_losses_of_all_runs(recorded: Path) -> None:
    federated_run(recorded.parent / "rounds")
    (recorded.parent / "damaged").mkdir()
    (recorded.parent / "damaged" / JOB).write_text("[")
    found = {run["name"]: (run["state"], run["done"], run["of"]) for run in runs_in(recorded.parent)}
    assert found == {"recorded": ("done", 24, 24), "rounds": ("done", 5, 5), "damaged": ("broken", 0, 0)}
    assert {run["name"]: run["loss"] for run in runs_in(recorded.parent)}["rounds"] == pytest.approx(4 * 0.5 / 5)


def test_the_command_lists_and_removes(recorded: Path) -> None:
    runs = recorded.parent
    federated_run(runs / "rounds")
    assert "24 of 24 steps" in isthmus("runs", runs).out
    gone = isthmus("runs", runs, "--remove", "recorded")
    assert gone.code == 0 and not recorded.exists() and (runs / "rounds" / JOB).is_file()
    again = isthmus("runs", runs, "--remove", "recorded")
    assert again.code == 2 and "not a run" in again.err


def test_a_run_that_works_is_not_removed(recorded: Path) -> None:
    with RunFolder(recorded).claimed(), pytest.raises(UserError, match="another process"):
        RunFolder(recorded).remove()
    assert (recorded / JOB).is_file()


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    for command in ("runs", "dashboard"):
        refused(isthmus(command, tmp_path / "runz"), 2, "runz: is not there")
    assert "no run has begun here" in isthmus("runs", tmp_path).out
