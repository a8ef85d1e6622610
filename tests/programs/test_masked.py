"""Rounds whose sums are masked: when a step of secure aggregation ends, of sites that are expelled, and by time."""

from __future__ import annotations

from typing import Any

import numpy as np

from isthmus.programs.masked import MaskedRoundPort, MaskedRounds
from isthmus.protocol.federated_messages import ExecutorJoined, PhaseId, RefusedUpdate, SumsSent
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules, SecureRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.protocol.secure_messages import KeysListed, KeysSent, SiteKeys
from isthmus.session.session import Observation
from tests.programs.ports import Recorder

SITES = ("a", "b", "c", "d")
PHASE = PhaseId(0)


def opened(at_s: float) -> tuple[MaskedRounds, Recorder]:
    """A round that opens at this time, between two looks of its host."""
    asked = Recorder(MaskedRoundPort)
    rules = RoundRules(
        rounds=1,
        needed=len(SITES),
        minimum=2,
        secure=SecureRules(wait_s=2.0),
        gathering=ExecutorChurn(start=len(SITES), wait_s=1.0),
    )
    rounds = MaskedRounds(
        SITES,
        rules,
        np.ones(len(SITES), dtype=np.int64),
        lambda _: rounds.here,
        ThroughputModel(len(SITES), window_rounds=5),
        clients={site: number for number, site in enumerate(SITES)},
    )
    rounds.port = asked.port
    rounds.clock(0.0)
    rounds.looked(Observation())
    rounds.clock(at_s)
    for site in SITES:
        rounds.joined(site)
        rounds.heard(site, ExecutorJoined(samples=1))
    return rounds, asked


def keys_of(site: str) -> KeysSent:
    number = SITES.index(site)
    return KeysSent(phase=PHASE, keys=SiteKeys(site, bytes([number]) * 32, bytes([number + 9]) * 32, bytes(32)))


def listed(asked: Recorder) -> set[str]:
    """The sites that were told the keys of the others."""
    told: list[Any] = [order for what, *order in asked.took() if what == "tell"]
    return {site for site, order in told if isinstance(order, KeysListed)}


def test_no_step_waits_for_a_site_that_is_expelled() -> None:
    rounds, asked = opened(0.1)
    for site in "abc":
        rounds.heard(site, keys_of(site))
    assert not listed(asked), "the step waits for d"
    rounds.heard("d", SumsSent(phase=PHASE, timed=(), refused=(RefusedUpdate(0, "none"),)))
    assert ("dismiss", "d", "reported clients that it was not given") in asked.asked
    assert listed(asked) == {"a", "b", "c"}


def test_a_step_takes_its_whole_time_also_where_a_phase_opens_between_two_looks() -> None:
    rounds, asked = opened(1.5)
    for site in "abc":
        rounds.heard(site, keys_of(site))
    assert rounds.due_s == 3.5
    rounds.clock(3.4)
    rounds.looked(Observation())
    assert not listed(asked)
    rounds.clock(3.5)
    rounds.looked(Observation())
    assert listed(asked) == {"a", "b", "c"}
