"""Simulated federated rounds: whatever strikes executors, sites and coordinator, each client counts once in a round."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from isthmus.programs.masked import MaskedRounds
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import LinearFit
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules, SecureRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.simulator.options import Fault
from isthmus.simulator.rounds import FederatedCosts, SimulatedFederation, simulate_federation


def drawn(seed: int) -> SimulatedFederation:
    """Up to eight faults strike two to five executors with many clients, or sites with one each, whose sums may be
    masked."""
    draw = random.Random(seed)
    sites, count = draw.random() < 0.5, draw.randint(2, 5)
    names = [f"e{number}" for number in range(count)]
    clients = count if sites else draw.randint(6, 30)
    sizes = np.array([draw.randint(1, 50) for _ in range(clients)])
    rounds = draw.randint(2, 8)
    steals, planner = draw.random() < 0.5, draw.choice(("parrot", "uniform"))
    masked, minimum = sites and draw.random() < 0.5, draw.randint(1, count)

    def make(done: int) -> Rounds:
        rules = RoundRules(
            rounds=rounds,
            first_round=done,
            needed=clients,
            minimum=(max(2, minimum) if masked else minimum) if sites else 1,
            deadline_s=30.0,
            attempts=3,
            steals=steals and not sites,
            timeout_s=5.0,
            planner=planner,
            secure=SecureRules(wait_s=2.0) if masked else None,
            gathering=ExecutorChurn(start=count, wait_s=1.0) if sites else None,
        )
        machine = (MaskedRounds if masked else Rounds)(
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
    said = f"seed {seed}: {found.finish} {found.notes}"
    assert (found.finish.outcome == "done") != bool(found.finish.reason), said
    assert [one.record.round for one in found.rounds] == list(range(len(found.rounds))), said
    assert found.finish.outcome != "done" or len(found.rounds) == rounds, said
    for one in found.rounds:
        record = one.record
        trained = [timed.client for each in record.trained.values() for timed in each]
        assert len(set(trained)) == len(trained) and not set(trained) & set(record.missing), said
        assert sites or sorted([*trained, *record.missing]) == list(range(clients)), said
    return found


def check_harm(runs: Sequence[SimulatedFederation]) -> None:
    outcomes = Counter(found.finish.outcome for found in runs)
    assert outcomes["done"] > len(runs) / 3 and outcomes["lost"], outcomes
    said = [text for found in runs for _, text in found.notes]
    assert sum("was lost" in text for text in said) > len(runs) / 4
    assert sum("the coordinator was started again" in text for text in said) > len(runs) / 4
    assert any("left out of round" in text and "secure aggregation" in text for text in said)


def line(found: SimulatedFederation) -> str:
    trained = [sorted((name, len(timed)) for name, timed in one.record.trained.items()) for one in found.rounds]
    return f"{found.finish} {found.seconds:.6f} {trained} {len(found.notes)}"
