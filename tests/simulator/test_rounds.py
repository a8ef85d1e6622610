"""Simulated federated rounds: whatever strikes executors, sites and coordinator, each client counts once in a round."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from isthmus.errors import UserError
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import LinearFit
from isthmus.protocol.federated_rules import ExecutorChurn, RoundRules
from isthmus.protocol.federated_throughput import ThroughputModel
from isthmus.simulator.options import Fault
from isthmus.simulator.rounds import FederatedCosts, SimulatedFederation, simulate_federation

BLOCKS, EACH = 10, 220


def drawn(seed: int) -> SimulatedFederation:
    """Up to eight faults strike two to five executors with many clients, or sites with one each."""
    draw = random.Random(seed)
    sites, count = draw.random() < 0.5, draw.randint(2, 5)
    names = [f"e{number}" for number in range(count)]
    clients = count if sites else draw.randint(6, 30)
    sizes = np.array([draw.randint(1, 50) for _ in range(clients)])
    rounds = draw.randint(2, 8)
    steals, planner = draw.random() < 0.5, draw.choice(("parrot", "uniform"))

    def make(done: int) -> Rounds:
        rules = RoundRules(
            rounds=rounds,
            first_round=done,
            needed=clients,
            minimum=draw.randint(1, count) if sites else 1,
            deadline_s=30.0,
            attempts=3,
            steals=steals and not sites,
            timeout_s=5.0,
            planner=planner,
            gathering=ExecutorChurn(start=count, wait_s=1.0) if sites else None,
        )
        machine = Rounds(
            names,
            rules,
            sizes.copy(),
            lambda _: machine.here if sites else np.arange(clients),
            ThroughputModel(count, window_rounds=5),
            clients={name: number for number, name in enumerate(names)} if sites else None,
        )
        return machine

    faults = list[Fault]()
    for _ in range(draw.randint(1, 8)):
        kind = draw.choice(("lost", "silent", "slow", "join", "leave", "coordinator"))
        lasts_s = draw.choice((0.2, 2.0, 8.0)) if sites or kind == "coordinator" else math.inf
        faults.append(
            Fault(
                time_s=draw.uniform(0.0, 12.0),
                kind=kind,
                device="" if kind == "coordinator" else draw.choice(names),
                lasts_s=lasts_s,
                factor=4.0 if kind == "slow" else 1.0,
            )
        )
    costs = FederatedCosts(
        lines=tuple(LinearFit(draw.uniform(0.01, 0.1), 0.05) for _ in names),
        noise=draw.choice((0.0, 0.3)),
        latency_s=draw.choice((0.001, 0.05)),
        sites=tuple(sizes.tolist()) if sites else (),
    )
    found = simulate_federation(make, costs, seed, faults)
    said = f"seed {seed}: {found.finish} {found.events}"
    assert (found.finish.outcome == "done") != bool(found.finish.reason), said
    assert [one.record.round for one in found.rounds] == list(range(len(found.rounds))), said
    assert found.finish.outcome != "done" or len(found.rounds) == rounds, said
    for one in found.rounds:
        record = one.record
        trained = [timed.client for each in record.trained.values() for timed in each]
        assert len(set(trained)) == len(trained) and not set(trained) & set(record.missing), said
        assert sites or sorted([*trained, *record.missing]) == list(range(clients)), said
    return found


@pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.long)])
def test_under_drawn_faults_a_run_ends_and_each_client_counts_once_in_a_round(block: int) -> None:
    runs = [drawn(seed) for seed in (range(EACH) if block == 0 else range(EACH, BLOCKS * EACH))]
    outcomes = Counter(found.finish.outcome for found in runs)
    assert outcomes["done"] > len(runs) / 3 and outcomes["lost"], outcomes
    said = [event.text for found in runs for event in found.events]
    assert sum("was lost" in text for text in said) > len(runs) / 4, "the schedules must do harm"
    assert sum("the coordinator was started again" in text for text in said) > len(runs) / 4


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in range(10):
        first, again = drawn(seed), drawn(seed)
        assert (first.finish, first.events, first.seconds) == (again.finish, again.events, again.seconds)


def test_executors_exchange_nothing_so_no_link_between_them_can_fail() -> None:
    link = Fault(time_s=1.0, kind="link", device="a", other="b", lasts_s=1.0)
    rules = RoundRules(rounds=1, needed=1)
    with pytest.raises(UserError, match="clients exchange nothing with each other"):
        simulate_federation(
            lambda _: Rounds(
                "ab", rules, np.ones(2, np.int64), lambda _: np.arange(2), ThroughputModel(2, window_rounds=5)
            ),
            FederatedCosts(lines=(LinearFit(0.1, 0.1),) * 2),
            faults=[link],
        )
