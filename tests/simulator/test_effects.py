"""Faults without an effect are named, with the reason, by every program; without these faults the run is the same."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from plans import make_fleet, make_plan
from tests.decoupled.small import SIZES, replicas, rules
from tests.simulator.test_serving import simulated

from isthmus.programs.rounds import Rounds
from isthmus.protocol import RunSpec
from isthmus.protocol.federated_messages import LinearFit
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.simulator import Fault, SimulationOptions, simulate_run
from isthmus.simulator.merging import MergingSimulation, PlannedStep
from isthmus.simulator.options import NOT_AT_WORK, TOO_LATE, WithoutEffect, without_effect_lines
from isthmus.simulator.queue import RunOfJob, simulate_queue
from isthmus.simulator.rounds import FederatedCosts, simulate_federation
from isthmus.simulator.serving import ServedRequest

Outcome = tuple[object, WithoutEffect]  # what came of a run but for its faults without effect, and these


def pipeline(seed: int, *faults: Fault) -> Outcome:
    """Two stages on d0 and d1; d2 is a spare device, and without a planner nothing uses it."""
    fleet, spec = make_fleet(3), RunSpec(steps=4, micro_batches=6, micro_batch_size=1)
    found = simulate_run(make_plan([(100, 200)] * 2), fleet, spec, SimulationOptions(faults=faults, seed=seed))
    return msgspec.structs.replace(found, without_effect=()), found.without_effect


def merges(seed: int, *faults: Fault) -> Outcome:
    """d0 and d1 are a pipeline, d2 its spare device."""
    step = PlannedStep(0.4, {"d0": 0.4, "d1": 0.4}, links=frozenset({frozenset(("d0", "d1"))}))
    whole = lambda present: step if {"d0", "d1"} <= present else None  # noqa: E731
    model = dataclasses.replace(replicas()[0], name="x", devices=("d0", "d1", "d2"), planned=whole)
    found = MergingSimulation(rules(120, quorum=1), [model], SIZES, faults, seed=seed, merger="d0").run()
    without, found.without_effect = found.without_effect, ()
    found.present_s.clear()  # a spare device that dies is not there for so long
    return found, without


def rounds(seed: int, *faults: Fault) -> Outcome:
    """d0 and d1 are sites."""

    def make(first: int) -> Rounds:
        wait = ExecutorChurn(start=2, wait_s=1.0)
        every = RoundRules(rounds=6, needed=2, steals=False, first_round=first, minimum=1, gathering=wait)
        names = {"d0": 0, "d1": 1}
        model = ThroughputModel(2, window_rounds=5)
        machine = Rounds(list(names), every, np.array([300, 200]), lambda _: machine.here, model, clients=names)
        return machine

    costs = FederatedCosts(lines=(LinearFit(1e-3, 0.01),) * 2, sites=(300, 200))
    found = simulate_federation(make, costs, seed, faults)
    times = [(one.seconds, tuple(one.busy_s), one.record.closed_by) for one in found.rounds]
    return (times, found.notes, found.finish, found.seconds), found.without_effect


def tokens(seed: int, *faults: Fault) -> Outcome:
    """A chain of some of d0, d1 and d2."""
    found, _ = simulated(seed, [ServedRequest(prompt=3, new=40)], *faults)
    return msgspec.structs.replace(found, without_effect=()), found.without_effect


def queue(_: int, *faults: Fault) -> Outcome:
    """Two jobs of d0 and d1, each a pipeline as above."""

    def run(number: int, faults: tuple[Fault, ...]) -> RunOfJob:
        found, without = pipeline(number, *faults)
        return RunOfJob(found.seconds, found.finish.reason, ("d0", "d1"), without)

    found = simulate_queue(["one", "two"], run, faults)
    return found.jobs, found.without_effect


LATE = Fault(device="d1", time_s=1e5)
PROGRAMS = {"pipeline": pipeline, "merges": merges, "rounds": rounds, "tokens": tokens, "queue": queue}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_one_that_comes_too_late_is_named_and_one_that_strikes_is_not(program: Callable[..., Outcome]) -> None:
    assert program(0, LATE)[1] == ((LATE, TOO_LATE),)
    slow = [Fault(kind="slow", device=device, time_s=0.01, factor=2.0) for device in ("d0", "d1")]
    found, without = program(1, LATE, *slow)
    assert found != program(1)[0] and {fault for fault, _ in without} & {LATE, *slow} != {LATE, *slow}
    assert f"d1: its process dies ({TOO_LATE})" in without_effect_lines(without)[0]


@pytest.mark.parametrize("program", [pipeline, merges, queue])
def test_of_a_device_that_the_plan_does_not_use(program: Callable[..., Outcome]) -> None:
    lost = Fault(device="d2", time_s=0.5)
    slow = Fault(kind="slow", device="d2", time_s=0.5, factor=2.0)
    link = Fault(kind="link", device="d1", other="d2", time_s=0.5, lasts_s=1.0)
    _, without = program(0, lost, slow, link)
    assert dict(without) == {
        lost: NOT_AT_WORK,
        slow: "it computed nothing after that",
        link: "nothing was to pass meanwhile",
    }


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_without_them_the_run_is_the_same(program: Callable[..., Outcome]) -> None:
    named = 0
    for seed in range(16):
        faults = _drawn(random.Random(seed), link=program is not rounds, crash=program in (merges, rounds))
        found, without = program(seed, *faults)
        idle = {fault for fault, _ in without}
        again, still = program(seed, *(fault for fault in faults if fault not in idle), LATE)
        assert (found, ()) == (again, tuple(entry for entry in still if entry[0] != LATE)), f"seed {seed}: {without}"
        named += len(idle)
    assert named


def _drawn(draw: random.Random, *, link: bool, crash: bool) -> Sequence[Fault]:
    """Up to five faults of d0 and d1, in order of time."""
    kinds = ("lost", "silent", "slow", "leave", *(("link",) if link else ()), *(("coordinator",) if crash else ()))
    found = list[Fault]()
    for time_s in sorted(draw.uniform(0.0, 12.0) for _ in range(draw.randint(1, 5))):
        kind = draw.choice(kinds)
        one, other = draw.sample(("d0", "d1"), 2)
        found.append(
            Fault(
                time_s=time_s,
                kind=kind,
                device="" if kind == "coordinator" else one,
                other=other if kind == "link" else "",
                lasts_s=draw.choice((0.2, 2.0, 8.0)),
                factor=2.0 if kind == "slow" else 1.0,
            )
        )
    return found
