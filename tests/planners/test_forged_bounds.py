"""One certificate of one question: the same for every planner's plan, and no figure of it can be edited unseen."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import fleet_of, gpt_graph, problem_of, random_graph
from term_cases import asked, priced_fleet
from test_verify import question_of
from tests.tiers import represented_by

from isthmus.cost import Problem, preference
from isthmus.errors import UserError
from isthmus.planners import over_counts, planner_names
from isthmus.planners import plan as plan_by
from isthmus.plans import Certificate, Plan
from isthmus.verification import verify

SLOW = {"sky-optimal", "dtfm-genetic", "dtfm-kl"}
PLANNERS = ("auto", "chain", "even")
LONG_TO_CHECK = 2
"""Of the instances: a second for each claim."""


def planned(name: str, problem: Problem) -> Plan | None:
    """As the commands plan; None where the planner refuses."""
    knows_prices = name in ("auto", "chain")
    try:
        return over_counts(
            problem, (problem.micro_batches,), lambda cut: plan_by(name, cut if knows_prices else cut.timed()), None
        )
    except UserError:
        return None


def certificates(problem: Problem) -> dict[str, Certificate]:
    plans = {name: planned(name, problem) for name in sorted(set(planner_names()) - SLOW)}
    return {name: plan.certificate for name, plan in plans.items() if plan is not None and plan.certificate is not None}


def instances() -> list[Problem]:
    """Settled by trying every plan; by one replica's search; by bounds alone; and of prices."""
    return [
        problem_of(random_graph(5, 5), fleet_of([1.0, 3.0, 5.0], 5), micro_batches=4),
        problem_of(gpt_graph(2), fleet_of([2e4, 3e4], 4), micro_batches=1),
        problem_of(gpt_graph(2), fleet_of([1e4, 2e4, 3e4, 4e4, 5e4, 6e4, 7e4], 4), micro_batches=8),
        asked(7, 5, priced_fleet(7, 3), objective="cost"),
    ]


@pytest.mark.parametrize("number", represented_by(range(4), 1))
def test_every_planner_states_the_same_bound_on_the_same_question(number: int) -> None:
    problem = instances()[number]
    found = certificates(problem)
    assert {"auto", "chain", "even"} <= set(found)
    assert len({c.question for c in found.values()}) == 1
    bounds = [c.lower_bound for c in found.values()]
    assert max(bounds) <= min(bounds) * (1 + 1e-9)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", represented_by(PLANNERS, "auto"))
def test_no_figure_of_a_certificate_can_be_edited(number: int, name: str) -> None:
    problem = instances()[number]
    plan = planned(name, problem)
    assert plan is not None and plan.certificate is not None
    plan = msgspec.structs.replace(plan, constraints=problem.constraints)  # whom prices do not concern planned for time
    assert verify(plan, question_of(problem)).holds()
    stated, reached = plan.certificate, preference(problem, plan)[0]
    forged = [msgspec.structs.replace(stated, gap=gap) for gap in (stated.gap + 1e-4, stated.gap / 2 + 1e-5, -0.5)]
    for factor in (0.3, 0.9, 0.999, 1.001, 1.1, 2.0):
        bound = stated.lower_bound * factor
        forged.append(msgspec.structs.replace(stated, lower_bound=bound))
        forged.append(msgspec.structs.replace(stated, lower_bound=bound, gap=reached / bound - 1))
    forged += [
        msgspec.structs.replace(stated, question="the time of a step of any plan"),
        msgspec.structs.replace(stated, objective="cost" if stated.objective == "step" else "step"),
        msgspec.structs.replace(stated, lower_bound=reached, gap=0.0, exact=True),
    ]
    if number == LONG_TO_CHECK:  # all planners state the same bound there: each edit is made to one of them
        forged.pop()  # far above the bound: a check looks for a better plan for two minutes
        forged = forged[PLANNERS.index(name) :: len(PLANNERS)]
    for claim in forged:
        if claim == stated:
            continue
        verdict = verify(msgspec.structs.replace(plan, certificate=claim), question_of(problem))
        # A bound between what is stated and what the check proves is as good as the stated one.
        proven = verdict.bound is not None and stated.lower_bound < claim.lower_bound <= (verdict.bound.proven or 0.0)
        assert not verdict.holds() or (proven and claim.lower_bound < reached), claim


@given(seed=st.integers(0, 10**6), devices=st.integers(1, 4), units=st.integers(2, 5), factor=st.floats(1.0001, 5))
@settings(max_examples=15, deadline=None)
def test_a_raised_bound_with_its_gap_is_caught_on_any_problem(
    seed: int, devices: int, units: int, factor: float
) -> None:
    fleet = fleet_of([1 + (seed * (k + 3)) % 7 for k in range(devices)], seed)
    problem = problem_of(random_graph(seed, units), fleet, micro_batches=1 + seed % 5)
    plan = planned("even", problem)
    if plan is None or plan.certificate is None:
        return
    bound = plan.certificate.lower_bound * factor
    raised = msgspec.structs.replace(plan.certificate, lower_bound=bound, gap=preference(problem, plan)[0] / bound - 1)
    assert not verify(msgspec.structs.replace(plan, certificate=raised), question_of(problem)).holds()
