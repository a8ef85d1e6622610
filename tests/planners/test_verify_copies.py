"""The check of chains that several holders feed: it passes what planners make, and sees what is forged."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from test_feeding import every_chain, fed_problem

from isthmus.api.make_plan import question_of, with_bound
from isthmus.cost import Problem
from isthmus.planners import plan as plan_by
from isthmus.plans import Objective, Plan, Replica
from isthmus.verification import Verdict, verify


def check(plan: Plan, problem: Problem) -> Verdict:
    return verify(plan, question_of(problem, (problem.micro_batches,)))


def documented(problem: Problem, planner: str = "auto") -> Plan:
    return with_bound(problem, plan_by(planner, problem), (problem.micro_batches,))


@pytest.mark.parametrize("objective", ["time", "cost"])
@pytest.mark.parametrize("labels_stay", [False, True])
@pytest.mark.parametrize("holders", [2, 3])
def test_what_planners_make_of_several_holders_passes(holders: int, labels_stay: bool, objective: Objective) -> None:
    for seed in range(3):
        problem = fed_problem(seed, 4, holders=holders, labels_stay=labels_stay, objective=objective)
        verdict = check(documented(problem), problem)
        assert not verdict.differences
        assert verdict.bound.status == "none stated" and "no proof: several holders" in verdict.bound.text


@pytest.mark.parametrize("memory", [1 << 40, 6000, 3000])
@pytest.mark.parametrize("labels_stay", [False, True])
def test_every_chain_has_the_figures_that_the_check_computes(labels_stay: bool, memory: int) -> None:
    for seed in range(4):
        problem = fed_problem(seed, 4, labels_stay=labels_stay, memory=memory)
        chains = list(every_chain(problem))
        for plan in chains[:: max(1, len(chains) // 8)]:
            assert not check(plan, problem).differences


def changed(plan: Plan, change: Callable[[Replica], Replica]) -> Plan:
    return msgspec.structs.replace(plan, replicas=(change(plan.replicas[0]),))


def test_a_copy_that_is_not_what_it_was_is_seen() -> None:
    problem = fed_problem(1, 4, holders=3, labels_stay=True)
    plan = next(p for p in every_chain(problem) if len(p.replicas[0].stages) == 3)
    middle = plan.replicas[0].stages[1].device

    def moved(replica: Replica) -> Replica:
        first, *rest = replica.copies
        return msgspec.structs.replace(replica, copies=(msgspec.structs.replace(first, device=middle), *rest))

    def heavier(replica: Replica) -> Replica:
        *rest, last = replica.copies
        return msgspec.structs.replace(
            replica, copies=(*rest, msgspec.structs.replace(last, flops_forward=last.flops_forward + 1))
        )

    def fewer(replica: Replica) -> Replica:
        return msgspec.structs.replace(replica, copies=replica.copies[:-1])

    assert not check(plan, problem).differences
    for change in (moved, heavier, fewer):
        found = [d.field for d in check(changed(plan, change), problem).differences]
        assert any(field.startswith("replicas[0].copies") for field in found)
    groups = plan.sync.groups
    sync = msgspec.structs.replace(plan.sync, groups=groups[:1])
    assert check(msgspec.structs.replace(plan, sync=sync), problem).differences
