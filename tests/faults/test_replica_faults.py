"""Two replicas, one of which loses a device: the other goes on at once, whatever a new plan takes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest

from isthmus.cost import PlanLayout, SyncPolicy, build_replicas
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Fleet
from isthmus.job import prepare
from isthmus.planners import scheduled
from isthmus.plans import Plan
from isthmus.protocol import Item
from isthmus.trace import Span
from tests.runtime.jobs import fleet_of, random_cut

from .real import job, pid_of

STEPS, KILLED_AFTER = 24, 9


@pytest.mark.parametrize("policy", [SyncPolicy(), SyncPolicy(mode="local", period=4)], ids=["sums", "averages"])
def test_the_other_replica_goes_on_while_a_plan_is_made(policy: SyncPolicy, tmp_path: Path) -> None:
    made = msgspec.structs.replace(job(STEPS), sync=policy)
    prepared, fleet = prepare(made), fleet_of(3, 2e7)
    cut = random_cut(prepared, 2, 0, once=True)
    problem = prepared.problem(fleet)
    layouts = [PlanLayout(("d0", "d1"), tuple(cut), 2), PlanLayout(("d2",), (), 2)]
    plan = scheduled(problem, build_replicas(problem, layouts, planner="test"))
    steps: list[int] = []
    went_on, asked = threading.Event(), list[tuple[str, ...]]()

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "train":
            steps.append(item.step)
            if len(steps) == KILLED_AFTER:
                os.kill(pid_of("d1"), signal.SIGKILL)
            if max(steps) >= KILLED_AFTER + 6:
                went_on.set()

    def replan(left: Fleet) -> Plan:
        asked.append(left.names)
        assert went_on.wait(60), "the run waits for a plan"
        alone = prepared.problem(left)
        return build_replicas(alone, [PlanLayout(("d2",), (), 4)], planner="test")

    outcome = run_plan(
        prepared,
        plan,
        fleet,
        tmp_path,
        RunOptions(replan=replan),
        Watcher(advanced=advanced),
    )
    assert outcome.outcome == "done", outcome.reason
    assert asked == [("d0", "d2")], "who is left of the other replica is thought of meanwhile"
    (recovery,) = outcome.recoveries
    assert not recovery.from_checkpoint
    assert recovery.step % policy.every == 0, "nothing that a replica learned since is left out"
    assert sorted(set(steps)) == list(range(STEPS))
