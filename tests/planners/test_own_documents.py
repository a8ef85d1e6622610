"""What is planned here holds when it is checked, whoever planned and whatever was asked; what is forged does not."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_cases import fleet_of, gpt_graph, problem_of, random_graph, saving
from term_cases import every_plan, priced_fleet

from isthmus.api import proof
from isthmus.api.proof import Proving, as_proven, question_of
from isthmus.cost import Problem, SyncPolicy, build_plan, parameter_state, preference
from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import Fleet, resolve_fleet
from isthmus.graph import cuts
from isthmus.planners import capabilities, least, over_counts, planner_names
from isthmus.planners import plan as plan_by
from isthmus.planners.bounds import with_certificate
from isthmus.plans import Certificate, CompressionConfig, Constraints, Plan
from isthmus.verification import Verdict, certificate, search, verify

SYNC = (
    *(SyncPolicy(),) * 3,
    SyncPolicy(mode="local", period=4),
    SyncPolicy(mode="partial", period=3),
    SyncPolicy(mode="dream", period=3),
    SyncPolicy(mode="dreamddp", period=3),
    SyncPolicy(mode="outer", period=5),
    SyncPolicy(mode="streaming", period=4),
)
PACKED = (
    *(None,) * 4,
    CompressionConfig(method="bf16"),
    CompressionConfig(method="int8"),
    *(CompressionConfig(method=m, ratio=20.0) for m in ("uniform", "adatopk", "adatopk-paper", "just-enough")),
)
COUNTS = ((4,), (1,), (6,), (2, 4), (8, 1))


def drawn(seed: int, devices: int, operators: int) -> tuple[Problem, tuple[int, ...]]:
    """A problem and the numbers of micro-batches that a plan may choose from: anything that a job may ask."""
    rng = random.Random(seed)
    memory = rng.choice([None, None, [rng.randint(300, 6000) for _ in range(devices)]])
    if rng.random() < 0.5:
        fleet = priced_fleet(seed, devices, memory=memory, egress=rng.choice([0.0, 1.0]))
    else:
        fleet = fleet_of([rng.uniform(3, 60) for _ in range(devices)], seed, memory=memory)
    counts = rng.choice(COUNTS)
    problem = problem_of(
        saving(random_graph(seed, operators), rng.choice([1, 9])),
        fleet,
        micro_batches=counts[0],
        schedule=rng.choice(["1f1b", "gpipe"]),
        recompute=rng.random() < 0.5,
        sync=rng.choice(SYNC),
        state=parameter_state(rng.choice(["sgd", "adamw"])),
        constraints=_constraints(rng, fleet),
    )
    batch = max(counts)
    return replace(problem, micro_batch_size=2 * batch // counts[0]), counts


def _constraints(rng: random.Random, fleet: Fleet) -> Constraints:
    holders = tuple(sorted(rng.sample(fleet.names, min(rng.randint(1, 2), len(fleet.names)))))
    held = rng.random() < 0.25
    return Constraints(
        objective=rng.choice(["time", "time", "cost"]),
        data_holders=holders if held else (),
        labels_stay=held and rng.random() < 0.5,
        compression=rng.choice(PACKED),
        memory_headroom=rng.choice([0.0, 0.0, 0.1]),
    )


def limited(problem: Problem, rng: random.Random) -> Problem:
    """Sometimes with a limit that some plan keeps."""
    if rng.random() < 0.6:
        return problem
    constraints, factor = problem.constraints, rng.uniform(1, 3)
    fast = plan_by("chain", problem.unlimited("time"))
    if constraints.objective == "cost":
        return replace(
            problem, constraints=msgspec.structs.replace(constraints, max_step_s=factor * fast.predicted.step_s)
        )
    return replace(
        problem, constraints=msgspec.structs.replace(constraints, max_price=factor * 10.0 ** rng.randint(3, 6))
    )


def document(name: str, problem: Problem, counts: tuple[int, ...]) -> Plan | None:
    """As the commands plan and compare; None where the planner refuses."""

    def planned(cut: Problem) -> Plan:
        return plan_by(name, cut if capabilities(name).prices else cut.timed())

    try:
        made = over_counts(problem, counts, planned, None)
    except UserError:
        return None
    return as_proven(problem, msgspec.structs.replace(made, constraints=problem.constraints), counts)


def checked(plan: Plan, problem: Problem, counts: tuple[int, ...]) -> Verdict:
    return verify(plan, question_of(problem.cut_into(plan.micro_batches), counts))


def forged(plan: Plan) -> list[Plan]:
    """The document with a figure of its certificate or its step that is better than it was."""
    stated, predicted = plan.certificate, plan.predicted
    assert stated is not None
    found: list[Plan] = []

    def claim(**fields: Any) -> None:
        found.append(msgspec.structs.replace(plan, certificate=msgspec.structs.replace(stated, **fields)))

    if stated.gap > 1e-3:
        claim(gap=stated.gap / 2)
    claim(lower_bound=stated.lower_bound * (2 + stated.gap))
    claim(lower_bound=stated.lower_bound * (2 + stated.gap), gap=0.0)
    claim(question=stated.question + " ")
    claim(objective="cost" if stated.objective == "step" else "step")
    sooner = msgspec.structs.replace(predicted, step_s=predicted.step_s * 0.9)
    return [*found, msgspec.structs.replace(plan, predicted=sooner)]


def best_claimed(plan: Plan) -> Plan:
    """The document with the claim that no plan is better."""
    stated = plan.certificate
    assert stated is not None
    reached = stated.lower_bound * (1 + stated.gap)
    return msgspec.structs.replace(
        plan, certificate=msgspec.structs.replace(stated, lower_bound=reached, gap=0.0, exact=True)
    )


def is_best(plan: Plan, problem: Problem, counts: tuple[int, ...]) -> bool:
    """By trying every plan."""
    cuts = [problem.cut_into(count) for count in counts]
    best = min(preference(cut, other)[0] for cut in cuts for other in every_plan(cut))
    return preference(problem, plan)[0] <= best * (1 + 1e-6)


def every_document_holds(seed: int, devices: int, operators: int, name: str) -> Certificate | None:
    problem, counts = drawn(seed, devices, operators)
    try:
        problem = limited(problem, random.Random(seed))
    except UserError:
        return None
    plan = document(name, problem, counts)
    if plan is None:
        return None
    found = checked(plan, problem, counts)
    limits = {"constraints.max_step_s", "constraints.max_price"} if not capabilities(name).prices else set[str]()
    assert {d.field for d in found.differences} <= limits, found  # who knows no prices is compared all the same
    assert plan.certificate is None or found.bound.status == "proven", found
    if plan.certificate is not None and not found.differences:
        for other in forged(plan):
            assert not checked(other, problem, counts).holds(), (other.certificate, other.predicted)
        if plan.certificate.gap > 1e-3 and checked(best_claimed(plan), problem, counts).holds():
            assert is_best(plan, problem, counts)  # more than its planner proved, and true
    return plan.certificate


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 5), st.sampled_from(planner_names()))
@example(129, 3, 4, "auto")  # adatopk: optimal, which the check proves and the planner does not
@example(20, 4, 7, "auto")
@pytest.mark.long
def test_what_is_planned_holds_and_what_is_forged_does_not(seed: int, devices: int, operators: int, name: str) -> None:
    every_document_holds(seed, devices, operators, name)


@pytest.mark.parametrize(
    "name",
    sorted({*planner_names()} - {"auto", "dtfm-genetic", "dtfm-genetic-code", "dtfm-kl", "islands", "sky-optimal"}),
)
def test_on_a_larger_fleet_too(name: str) -> None:
    problem = problem_of(gpt_graph(2), resolve_fleet("random:16:0"), micro_batches=8)
    for asked in (problem, replace(problem, constraints=Constraints(objective="cost", compression=PACKED[-1]))):
        plan = document(name, asked, (8,))
        assert plan is not None and plan.certificate is not None
        assert checked(plan, asked, (8,)).holds()


def test_a_certificate_is_that_of_its_plan() -> None:
    problem, counts = problem_of(random_graph(3, 5), fleet_of([5.0, 9.0, 30.0], 3)), (4,)
    best, even = (document(name, problem, counts) for name in ("auto", "even"))
    assert best is not None and even is not None and best.predicted.step_s < 0.9 * even.predicted.step_s
    assert checked(best, problem, counts).holds() and checked(even, problem, counts).holds()
    swapped = msgspec.structs.replace(even, certificate=best.certificate)
    assert not checked(swapped, problem, counts).holds()


def test_what_takes_more_work_than_a_check_is_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, counts = problem_of(random_graph(4, 8), fleet_of([5.0, 9.0, 30.0, 12.0], 3)), (8,)
    problem = problem.cut_into(8)
    settled = over_counts(problem, counts, lambda cut: plan_by("auto", cut), None)
    assert settled.certificate is not None and settled.certificate.exact
    monkeypatch.setattr(search, "MOST_GROWN", 40)
    monkeypatch.setattr(search, "MOST_TIMED", 40)
    monkeypatch.setattr(certificate, "FIRST_WORK", 1e5)
    monkeypatch.setattr(certificate, "MOST_WORK", 1e6)
    monkeypatch.setattr(proof, "PLANNING_WORK", 1e5)
    assert checked(settled, problem, counts).bound.status == "unchecked"
    stated = as_proven(problem, settled, counts)
    assert stated.certificate is not None and not stated.certificate.exact
    assert stated.certificate.lower_bound < settled.certificate.lower_bound
    assert checked(stated, problem, counts).holds()
    assert stated.notes[-1].startswith("auto proved ")


def test_a_bound_that_is_raised_for_no_time_gets_the_work_of_planning() -> None:
    ended = Proving(0.0).ended()
    assert not ended(int(proof.PLANNING_WORK))
    assert ended(int(proof.PLANNING_WORK) + 1)


@pytest.mark.long
def test_a_better_pipeline_that_the_proof_comes_upon_is_the_plan() -> None:
    problem = problem_of(gpt_graph(1), fleet_of([2e6, 2e6, 3e6], 2, memory=[900_000] * 3), micro_batches=4)
    places = [cut.position for cut in cuts(problem.flow)]
    pairs = itertools.permutations(problem.fleet.names, 2)
    plans: list[Plan] = []
    for order, place in itertools.product(pairs, places):
        with contextlib.suppress(FleetTooSmall):
            plans.append(build_plan(problem, order, [place], planner="auto"))
    best, *worse = sorted(plans, key=lambda found: found.predicted.step_s)
    stated = with_certificate(problem, worse[1], least(problem))
    either = replace(problem, schedule="auto")
    assert as_proven(either, stated, (4,)).predicted == best.predicted
    coarse = problem.cut_into(2)  # of which the job says 4
    assert as_proven(coarse, stated, (4, 2)).predicted.step_s <= best.predicted.step_s
    found = as_proven(problem, stated, (4,))
    assert found.predicted == best.predicted
    assert found.certificate is not None and found.certificate.exact
    assert found.notes[0].startswith("found by the proof")
    assert checked(found, problem, (4,)).holds()
    assert as_proven(problem, stated, (4,), judge=lambda plan: -plan.predicted.step_s).stages == stated.stages
    of_a_paper = msgspec.structs.replace(stated, planner="chain")
    assert as_proven(problem, of_a_paper, (4,), Proving(0.0)).stages == stated.stages
