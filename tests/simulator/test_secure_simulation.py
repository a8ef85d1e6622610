"""Masked rounds on a virtual clock: the same coordinator, over sites that leave and return at any moment."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.programs.masked import MaskedRounds
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import LinearFit
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules, SecureRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.simulator.options import Fault
from isthmus.simulator.rounds import FederatedCosts, SimulatedFederation, simulate_federation

SITES = 5
ROUNDS = 4


def simulated(*faults: Fault, secure: bool = True, minimum: int = 2) -> SimulatedFederation:
    names = [f"site-{number}" for number in range(SITES)]
    sizes = np.arange(1, SITES + 1) * 10
    rules = RoundRules(
        rounds=ROUNDS,
        needed=SITES,
        minimum=minimum,
        deadline_s=30.0,
        attempts=5,
        secure=SecureRules(wait_s=2.0) if secure else None,
        gathering=ExecutorChurn(start=SITES, wait_s=1.0),
    )
    machine = (MaskedRounds if secure else Rounds)(
        names,
        rules,
        sizes.copy(),
        lambda round_: machine.here,
        ThroughputModel(SITES, window_rounds=5),
        clients={name: number for number, name in enumerate(names)},
    )
    lines = tuple(LinearFit(0.01, 0.1) for _ in names)
    costs = FederatedCosts(lines=lines, sites=tuple(sizes.tolist()), latency_s=0.05)
    return simulate_federation(lambda _: machine, costs, faults=faults)


def test_masks_cost_the_latency_of_their_messages() -> None:
    """Keys and shares go around while sites train; the shares that take the masks off come after: one more trip."""
    plain, masked = simulated(secure=False), simulated()
    assert masked.finish.outcome == "done"
    for before, after in zip(plain.rounds, masked.rounds, strict=True):
        assert after.record.trained == before.record.trained
        assert abs(after.seconds - before.seconds - 2 * 0.05) < 1e-9


def test_a_site_that_leaves_while_keys_go_around_is_missing_from_the_round() -> None:
    found = simulated(Fault(device="site-2", time_s=0.06, lasts_s=4.94))
    assert found.finish.outcome == "done"
    assert all(len(one.record.trained) >= 2 for one in found.rounds)
    assert any("site-2" not in one.record.trained for one in found.rounds)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, SITES - 1), st.floats(0.01, 4.0), st.floats(0.1, 3.0)), max_size=8))
def test_whenever_sites_leave_a_round_is_of_enough_or_is_tried_again(away: list[tuple[int, float, float]]) -> None:
    found = simulated(*(Fault(device=f"site-{site}", time_s=at_s, lasts_s=for_s) for site, at_s, for_s in away))
    assert found.finish.outcome in ("done", "lost"), found.finish
    assert [one.record.round for one in found.rounds] == list(range(len(found.rounds)))
    assert all(len(one.record.trained) >= 2 for one in found.rounds)
    assert found.finish.outcome == "lost" or len(found.rounds) == ROUNDS
