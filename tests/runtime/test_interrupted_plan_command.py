"""`isthmus plan` while it takes long: progress on standard error, and Ctrl-C ends it with the best plan so far."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pty
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from isthmus.cost import Problem
from isthmus.planners import INTERRUPTED, keep, looked_at
from isthmus.planners.baselines.even import even
from isthmus.planners.observer import stopped
from isthmus.plans import Plan
from tests.interpreters import script

from .commands import isthmus, write_job

SCRIPT = """
import sys
from isthmus.planners import registry
from isthmus.report import progress
progress.QUIET_S = 0.0
registry._OURS = {**registry._OURS, "endless": registry.PlannerEntry(f"{sys.argv[1]}:endless")}
sys.argv = ["isthmus", *sys.argv[2:]]
from isthmus.cli import main
main()
"""
"""`isthmus` with a planner more, which says at once what it does."""


def endless(problem: Problem) -> Plan:
    """One plan, and then it looks for another, until it is stopped."""
    keep(even(problem))
    return _looking()


def interrupted_late(problem: Problem) -> Plan:
    """Ctrl-C comes when there is a plan."""
    keep(even(problem))
    os.kill(os.getpid(), signal.SIGINT)
    return _looking()


def interrupted_early(problem: Problem) -> Plan:
    """Ctrl-C comes before there is one."""
    looked_at()
    os.kill(os.getpid(), signal.SIGINT)
    return _looking()


def interrupted_twice(problem: Problem) -> Plan:
    """Who presses again does not want to wait."""
    keep(even(problem))
    os.kill(os.getpid(), signal.SIGINT)
    while not stopped():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        time.sleep(0.001)


def deaf(problem: Problem) -> Plan:
    """Never looks up."""
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        time.sleep(0.001)


def _looking() -> Plan:
    while True:
        looked_at()
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("interrupted_late", "interrupted_early", "interrupted_twice", "deaf")
    entries = [EntryPoint(name, f"{__name__}:{name}", "isthmus.planners") for name in names]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [e for e in entries if e.group == group])


def test_ctrl_c_ends_planning_with_the_best_plan(tmp_path: Path) -> None:
    job = write_job(tmp_path, fleet="three-sites")
    done = isthmus("plan", job, "--planner", "interrupted_late", "--json")
    assert done.code == 0, done.err
    assert INTERRUPTED in done.err and INTERRUPTED in json.loads(done.out)["notes"]
    document = tmp_path / "plan.json"
    document.write_text(done.out)
    verified = isthmus("plan", job, "--verify", document)
    assert verified.code == 0, verified.out
    assert INTERRUPTED in isthmus("plan", job, "--planner", "interrupted_late").out


def test_a_comparison_shows_who_was_asked_till_then(tmp_path: Path) -> None:
    done = isthmus("plan", write_job(tmp_path), "--compare", "even,interrupted_late,chain", "--json")
    assert done.code == 0 and INTERRUPTED in done.err
    told = json.loads(done.out)
    assert {row["planner"]: row["interrupted"] for row in told["rows"]} == {"even": False, "interrupted_late": True}
    assert told["not_asked"] == ["chain"]
    table = isthmus("plan", write_job(tmp_path), "--compare", "even,interrupted_late,chain").out
    assert "interrupted_late was interrupted: its best till then" in table
    assert "without a row, for planning was interrupted: chain" in table


@pytest.mark.parametrize("planner", ["interrupted_early", "interrupted_twice", "deaf"])
def test_without_a_plan_the_exit_code_is_130(tmp_path: Path, planner: str) -> None:
    done = isthmus("plan", write_job(tmp_path), "--planner", planner)
    assert (done.code, done.out) == (130, "")
    if planner == "interrupted_early":
        assert done.err == "error: planning was interrupted before it had found a plan\n"


def test_ctrl_c_while_a_run_is_planned_is_as_ever(tmp_path: Path) -> None:
    done = isthmus("train", write_job(tmp_path, planner="interrupted_late"), "--run", tmp_path / "run")
    assert done.code == 130 and "nothing was written" in done.err


def test_a_terminal_shows_one_live_line(tmp_path: Path) -> None:
    """And a real Ctrl-C."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*script(SCRIPT, tmp_path), __name__, "plan", str(write_job(tmp_path, planner="endless")), "--json"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        said = b""
        while b"(endless, 4 micro-batches" not in said or b"best step so far" not in said:
            said += os.read(ours, 4096)
        assert b"planning: " in said
        process.send_signal(signal.SIGINT)
        while INTERRUPTED[:30].encode() not in said:
            said += os.read(ours, 4096)
        out, _ = process.communicate()
        assert process.returncode == 0 and INTERRUPTED in json.loads(out)["notes"]
    finally:
        process.kill()
        process.wait()
        os.close(ours)
