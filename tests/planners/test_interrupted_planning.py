"""A search that is ended early: the best plan so far, and no claim that was not proven."""

from __future__ import annotations

import itertools

import pytest
from plan_cases import fleet_of, gpt_graph, problem_of, random_graph
from term_cases import asked, priced_fleet
from test_verify import question_of

from isthmus.cost import Problem
from isthmus.errors import UserError
from isthmus.planners import INTERRUPTED, SearchStopped, cut_short, observed_by, over_counts, planner_names
from isthmus.planners import plan as plan_by
from isthmus.plans import Plan
from isthmus.verification import verify

SLOW = {"dtfm-genetic", "dtfm-genetic-code", "dtfm-kl", "sky-optimal"}
PLANNERS = sorted(set(planner_names()) - SLOW)


class Patient:
    """An observer that ends the search after so many looks, once there are so many plans."""

    def __init__(self, looks: int, plans: int) -> None:
        self.looks, self.plans = looks, plans
        self.found_s: list[float] = []
        self.said: list[str] = []

    def planning(self, name: str) -> None:
        self.said.append(name)

    def part(self, words: str) -> None:
        self.said.append(words)

    def looked_at(self, candidates: int) -> None:
        self.looks -= 1

    def found(self, step_s: float) -> None:
        self.found_s.append(step_s)

    def stopped(self) -> bool:
        return self.looks < 0 and len(self.found_s) >= self.plans


def planned(name: str, problem: Problem, observer: Patient, counts: tuple[int, ...] = ()) -> tuple[Plan, bool]:
    with observed_by(observer):
        plan = over_counts(problem, counts or (problem.micro_batches,), lambda cut: plan_by(name, cut), None)
        return plan, cut_short()


def larger() -> Problem:
    """Too large for every plan to be tried: a descent."""
    return problem_of(random_graph(3, 10), fleet_of([float(k) for k in range(1, 8)], 4), micro_batches=4)


def instances() -> list[Problem]:
    """Every order and every plan are tried; memory throttles; money counts."""
    return [
        problem_of(random_graph(5, 5), fleet_of([1.0, 3.0, 5.0], 5), micro_batches=4),
        problem_of(random_graph(3, 6), fleet_of([1.0, 3.0, 5.0], 5, memory=[900, 1200, 1500]), micro_batches=4),
        asked(7, 5, priced_fleet(7, 3), objective="cost"),
    ]


@pytest.mark.parametrize("number", range(3))
def test_a_search_that_is_ended_has_its_best_plan(number: int) -> None:
    problem = instances()[number]
    names = [name for name in PLANNERS if problem.constraints.objective == "time" or name in ("auto", "chain")]
    ended = 0
    for name, looks in itertools.product(names, (0, 100)):
        observer = Patient(looks, plans=1)
        try:
            plan, early = planned(name, problem, observer)
        except UserError:  # nothing fits the planner's way
            continue
        assert plan.planner == name
        assert (INTERRUPTED in plan.notes) == early
        assert verify(plan, question_of(problem)).holds()
        if early:
            ended += 1
            assert observer.found_s, "a plan was there before"
            assert problem.constraints.objective == "cost" or plan.predicted.step_s <= observer.found_s[0] * (1 + 1e-9)
    assert ended > 1


@pytest.mark.long
def test_more_looks_never_make_a_worse_plan() -> None:
    steps_s = [planned("auto", larger(), Patient(looks, plans=1))[0].predicted.step_s for looks in (0, 500, 10**9)]
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[-1] < steps_s[0]


@pytest.mark.parametrize("name", ["dtfm-genetic", "dtfm-genetic-code", "dtfm-kl"])
def test_a_genetic_search_ends_with_the_best_of_its_population(name: str) -> None:
    problem = problem_of(gpt_graph(1), fleet_of([1e4, 3e4, 2e4, 1e4], 4), micro_batches=4)
    plan, early = planned(name, problem, Patient(3, plans=0))
    assert early and INTERRUPTED in plan.notes
    assert verify(plan, question_of(problem)).holds()


@pytest.mark.parametrize("name", PLANNERS)
def test_an_observer_changes_no_plan(name: str) -> None:
    problem = instances()[0]

    def made(observed: bool) -> Plan | str:
        try:
            if observed:
                return planned(name, problem, Patient(0, plans=10**9))[0]
            return over_counts(problem, (problem.micro_batches,), lambda cut: plan_by(name, cut), None)
        except UserError as refusal:
            return str(refusal)

    assert made(observed=True) == made(observed=False)


@pytest.mark.parametrize("name", ["auto", "chain", "even", "random"])
def test_before_the_first_plan_there_is_none(name: str) -> None:
    with pytest.raises(SearchStopped, match="before it had found a plan"):
        planned(name, larger(), Patient(0, plans=0))


def test_what_is_searched_is_said() -> None:
    observer = Patient(500, plans=1)
    planned("auto", larger(), observer)
    assert observer.said[:2] == ["auto, 4 micro-batches", "one pipeline"]
    assert observer.found_s == sorted(observer.found_s, reverse=True)
