"""Forged documents: figures, bounds, plans and problems that are not what they were. None passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from plan_cases import document, fleet_of, gpt_graph, problem_of, random_graph, simulated_s
from term_cases import asked, priced_fleet

from isthmus.api.make_plan import question_of
from isthmus.cost import Problem
from isthmus.fleet import Link, Links, corrected
from isthmus.planners import plan as plan_by
from isthmus.plans import Plan
from isthmus.verification import Prover, Until, Verdict, prover, verify


def problems() -> list[Problem]:
    seven = fleet_of([1e6, 2e6, 3e6, 4e6, 5e6, 6e6, 7e6])
    near = msgspec.structs.replace(seven, links=Links(default=Link(0.01, 1e6)))
    return [
        problem_of(random_graph(5, 5), fleet_of([1.0, 3.0, 5.0], 5), micro_batches=4),
        problem_of(gpt_graph(2), fleet_of([2e4, 3e4], 4), micro_batches=1),
        problem_of(gpt_graph(2), near, micro_batches=8),
        asked(7, 5, priced_fleet(7, 3), objective="cost"),
    ]


def checked(plan: Plan, problem: Problem) -> Verdict:
    question = question_of(problem, (problem.micro_batches,))
    return verify(plan, question, simulated_s=lambda plan: simulated_s(problem, plan))


def forged(plan: Plan, problem: Problem) -> Iterator[tuple[str, Plan, Problem]]:
    """Ten kinds."""
    stated, predicted, replica = plan.certificate, plan.predicted, plan.replicas[0]
    assert stated is not None
    reached = stated.lower_bound * (1 + stated.gap)

    def claim(**fields: object) -> Plan:
        return msgspec.structs.replace(plan, certificate=msgspec.structs.replace(stated, **fields))  # type: ignore[arg-type]

    def raised(bound: float) -> Plan:
        return claim(lower_bound=bound, gap=reached / bound - 1, exact=False)

    yield "gap", claim(gap=stated.gap / 2 + 1e-4), problem
    yield "bound alone", claim(lower_bound=stated.lower_bound * 1.001), problem
    yield "bound and gap", raised(1.5 * reached), problem
    yield "a plan said to be best", claim(lower_bound=reached, gap=0.0, exact=not stated.exact), problem
    yield "question", claim(question="the time of a step of any plan"), problem
    yield "objective", claim(objective="cost" if stated.objective == "step" else "step"), problem
    quicker = msgspec.structs.replace(predicted, steady_s=0.9 * predicted.steady_s)
    yield "simulated step", msgspec.structs.replace(plan, predicted=quicker), problem
    shorter = msgspec.structs.replace(predicted, step_s=0.9 * predicted.step_s)
    yield "formula", msgspec.structs.replace(plan, predicted=shorter), problem
    lighter = msgspec.structs.replace(replica.stages[0], flops_forward=replica.stages[0].flops_forward // 2)
    stages = (lighter, *replica.stages[1:])
    yield (
        "plan",
        msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=stages), *plan.replicas[1:])),
        problem,
    )
    name = replica.stages[0].device
    quick = corrected(problem.fleet, {name: 2 * problem.fleet.device(name).flops_per_s}, {})
    yield "problem", plan, replace(problem, fleet=quick)


@pytest.mark.parametrize("number", range(4))
def test_no_forged_document_passes(number: int) -> None:
    problem = problems()[number]
    plan = document(problem, plan_by("chain", problem))
    assert checked(plan, problem).holds(), checked(plan, problem)
    kinds = 0
    for kind, other, question in forged(plan, problem):
        assert not checked(other, question).holds(), kind
        kinds += 1
    assert kinds == 10


@pytest.mark.parametrize("number", range(4))
def test_a_bound_that_no_decision_proves_is_not_checked(number: int) -> None:
    """Between what is proven and what the plan takes."""
    problem = problems()[number]
    plan = document(problem, plan_by("even" if number < 3 else "chain", problem.timed()))
    stated = plan.certificate
    assert stated is not None
    bound = stated.lower_bound * (1 + stated.gap) ** 0.99
    other = msgspec.structs.replace(stated, lower_bound=bound, gap=(1 + stated.gap) ** 0.01 - 1, exact=False)
    found = checked(msgspec.structs.replace(plan, certificate=other), problem)
    if stated.gap > 0.05:
        assert found.bound.status in ("unchecked", "proven") and found.holds(bound_unchecked=True)


def test_a_check_that_ends_says_whether_by_time_or_by_work(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems()[2]
    plan = document(problem, plan_by("even", problem))
    question = question_of(problem, (problem.micro_batches,))
    monkeypatch.setattr(prover, "MOST_WORK", 1)
    monkeypatch.setattr(Prover, "simple", lambda _: 0.0)
    for late, words in ((False, "not checked by as much work as a check may be"), (True, "not checked within 20 s")):
        found = verify(plan, question, until=Until(20.0, lambda late=late: late))
        assert found.bound.text == words and not found.holds()
