"""Plans, bounds and certificates do not depend on how fast a machine is; solvers write nothing to standard output."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import numpy as np
import pytest
from plan_cases import fleet_of, gpt_graph, problem_of
from scipy import optimize
from scipy.sparse import csr_matrix

from isthmus.errors import UserError
from isthmus.planners import highs, over_counts, plan, planner_names
from isthmus.plans import Plan

CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "time")
SLOW = {"dtfm-genetic", "dtfm-genetic-code", "dtfm-kl"}


def made(name: str) -> Plan | str:
    problem = problem_of(gpt_graph(1), fleet_of([1e4, 3e4, 2e4], 4), micro_batches=4)
    try:
        return over_counts(problem, (4,), lambda cut: plan(name, cut), None)
    except UserError as refusal:
        return str(refusal)


@pytest.mark.parametrize("name", sorted(set(planner_names()) - SLOW))
def test_a_very_slow_clock_changes_no_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = made(name)
    with monkeypatch.context() as patched:
        for clock in CLOCKS:
            ticks = itertools.count(1.0, 3600.0)  # an hour passes between two looks
            patched.setattr(time, clock, ticks.__next__)
        slowly = made(name)
    assert slowly == usual


def test_solvers_are_given_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS has a clock of its own, which no test can set."""
    options: list[dict[str, float]] = []
    solve = optimize.milp

    def looked_at(*args: Any, **kwargs: Any) -> Any:
        options.append(dict(kwargs["options"]))
        return solve(*args, **kwargs)

    monkeypatch.setattr(optimize, "milp", looked_at)
    made("sky-optimal")
    assert options and not any("time_limit" in given for given in options)
    assert all("node_limit" in given for given in options)


def test_what_a_solver_writes_from_c_is_not_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    solve = optimize.milp

    def loud(*args: Any, **kwargs: Any) -> Any:
        os.write(1, b"HiGHS was here\n")
        return solve(*args, **kwargs)

    monkeypatch.setattr(optimize, "milp", loud)
    row = csr_matrix(np.ones((1, 2)))
    found = highs.integer_programme(np.ones(2), (row, np.ones(1), np.ones(1)), np.ones(2, dtype=np.int64))
    os.write(1, b"data\n")
    told = capfd.readouterr()
    assert found.fun == 1 and told.out == "data\n" and told.err == "HiGHS was here\n"
