"""Federated rounds on the virtual clock."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.errors import PeerError
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import LinearFit
from isthmus.protocol.federated_planning import RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.simulator.options import Fault
from isthmus.simulator.rounds import FederatedCosts, SimulatedRound, record_texts
from isthmus_testing.virtual_runs import simulate_federated

SIZES = np.random.default_rng(1).integers(10, 400, 300)
SPEEDS = (1.0, 2.0, 4.0, 8.0)


def run(costs: FederatedCosts, *faults: Fault, rounds: int = 8, **rules: object) -> tuple[SimulatedRound, ...]:
    count = len(costs.lines)
    names = [f"e{k}" for k in range(count)]
    options = {"rounds": rounds, "needed": 100, "steals": False} | rules
    machine = Rounds(
        names, RoundRules(**options), SIZES, lambda r: np.arange(r, 300, 3), ThroughputModel(count, window_rounds=5)
    )
    return simulate_federated(machine, costs, faults=faults)


def lines(*speeds: float) -> tuple[LinearFit, ...]:
    return tuple(LinearFit(s * 1e-3, 0.01) for s in speeds)


def least_s(round_: SimulatedRound) -> float:
    """No schedule ends sooner: the work shared in any pieces."""
    timed = [t for each in round_.record.trained.values() for t in each]
    rates = [1 / line.seconds(1000) for line in lines(*SPEEDS)]
    return sum(t.samples for t in timed) / 1000 / sum(rates)


def test_a_round_lasts_as_long_as_its_busiest_executor_and_its_messages() -> None:
    costs = FederatedCosts(lines=lines(1, 1), latency_s=0.5, broadcast_s=0.25, sums_s=0.125)
    for round_ in run(costs, rounds=3):
        assert round_.seconds == pytest.approx(round_.busy_s.max() + 2 * 0.5 + 0.25 + 0.125)
        assert sum(map(len, round_.record.trained.values())) == 100


def test_what_passes_between_clients_counts_once_for_each() -> None:
    for round_ in run(FederatedCosts(lines=lines(1), between_s=0.125), rounds=2):
        assert round_.seconds == pytest.approx(round_.busy_s.max() + 100 * 0.125)


def test_lines_are_found_out_and_the_plan_comes_true() -> None:
    last = run(FederatedCosts(lines=lines(*SPEEDS)))[-1]
    assert last.record.predicted_s == pytest.approx(last.busy_s.max(), rel=1e-6)
    assert last.seconds < 1.05 * least_s(last)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_stealing_ends_rounds_sooner_where_times_are_not_known(noise: float) -> None:
    costs = FederatedCosts(lines=lines(*SPEEDS), noise=noise, latency_s=0.001)
    stolen, planned = run(costs, rounds=1, steals=True)[0], run(costs, rounds=1, steals=False)[0]
    assert stolen.record.stolen > 0
    assert stolen.seconds < 0.6 * planned.seconds


def test_certified_with_stealing_stays_near_the_bound_under_noise() -> None:
    rounds = run(FederatedCosts(lines=lines(*SPEEDS), noise=0.3, latency_s=0.001), rounds=10, steals=True)
    over = [round_.seconds / least_s(round_) for round_ in rounds[3:]]
    assert np.mean(over) < 1.1


def test_the_clients_of_a_lost_executor_are_trained_by_others() -> None:
    rounds = run(FederatedCosts(lines=lines(1, 1, 1)), Fault(device="e1", time_s=0.5), rounds=3, steals=True)
    assert [sum(map(len, r.record.trained.values())) for r in rounds] == [100] * 3
    assert "e1" not in rounds[-1].record.trained


def test_a_run_without_executors_says_so() -> None:
    with pytest.raises(PeerError, match="executor 'e0' was lost"):
        run(FederatedCosts(lines=lines(1)), Fault(device="e0", time_s=0.5))


@pytest.mark.long
def test_the_same_seed_gives_the_same_run() -> None:
    costs = FederatedCosts(lines=lines(*SPEEDS), noise=0.3, latency_s=0.001)
    first, second = run(costs, steals=True), run(costs, steals=True)
    assert [r.seconds for r in first] == [r.seconds for r in second]


def test_a_round_ends_at_its_deadline_with_the_clients_that_are_in() -> None:
    """One client at a time: an executor's result is in as soon as it is there."""
    costs = FederatedCosts(lines=lines(1, 40))
    rounds = run(costs, rounds=3, single=True, deadline_s=3.0, minimum=5)
    for round_ in rounds:
        assert round_.record.closed_by == "deadline"
        assert 3.0 <= round_.seconds < 3.0 + 40e-3 * SIZES.max() + 0.1
        done = sum(map(len, round_.record.trained.values()))
        assert 5 <= done < 100 and len(round_.record.missing) == 100 - done
    assert rounds[0].seconds == pytest.approx(3.0)


def test_a_round_ends_with_its_quorum() -> None:
    whole = run(FederatedCosts(lines=lines(1, 8)), rounds=2, single=True)
    early = run(FederatedCosts(lines=lines(1, 8)), rounds=2, single=True, quorum=0.7)
    assert [r.record.closed_by for r in (*whole, *early)] == ["all", "all", "quorum", "quorum"]
    assert [sum(map(len, r.record.trained.values())) for r in early] == [70, 70]
    assert all(a.seconds < b.seconds for a, b in zip(early, whole, strict=True))


def test_too_few_by_the_deadline_are_tried_again_and_then_the_run_ends() -> None:
    with pytest.raises(PeerError, match=r"expected at least 90, after 3 attempts of 3 s"):
        run(FederatedCosts(lines=lines(1, 40)), rounds=3, single=True, deadline_s=3.0, minimum=90)


def test_a_record_tells_its_early_end_and_its_late_updates() -> None:
    record = RoundRecord(round=4, attempt=0, trained={}, missing=(3,), stolen=2, stale=((7, 2),), closed_by="quorum")
    assert record_texts(record) == [
        "round 5: closed by its quorum; clients missing: 1",
        "round 5: clients given to other executors: 2",
        "client 7: its update of round 3 counts in round 5",
    ]
    behind = RoundRecord(round=4, attempt=0, trained={}, missing=(3,), closed_by="behind")
    assert record_texts(behind) == ["round 5: closed without those behind; clients missing: 1"]
