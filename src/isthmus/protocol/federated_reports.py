"""Checks of executors' reports, and the log lines about refused updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from isthmus.protocol.federated_messages import (
    NONE,
    ClientTask,
    RefusedUpdate,
    SumsSent,
)
from isthmus.protocol.federated_phase import OpenPhase
from isthmus.protocol.federated_rules import Why

MOST_STATES = 2**31
MOST_REFUSALS = 3
"""Refused clients that a run's last line names."""


def refusal_texts(refused: Sequence[RefusedUpdate]) -> list[str]:
    """Of the refusals the first few, each with its client."""
    few = [f"client {r.client}: {r.reason.removeprefix(f'client {r.client}: ')}" for r in refused[:MOST_REFUSALS]]
    return [*few, f"and {len(refused) - MOST_REFUSALS} clients more"] if len(refused) > MOST_REFUSALS else few


def fault_of(event: SumsSent, held: Mapping[int, ClientTask]) -> str | None:
    """What is wrong with an executor's report of the clients that it was given."""
    reported = [t.client for t in event.timed] + [r.client for r in event.refused]
    if not set(reported) <= held.keys():
        return "reported clients that it was not given"
    if len(set(reported)) < len(reported):
        return "reported a client twice"
    if any(not 0 <= t.seconds < math.inf for t in event.timed):
        return "reported a time that is none"
    if any(not NONE <= t.state < MOST_STATES for t in event.timed):
        return "reported a state that is none"
    return None


def has_diverged(opened: OpenPhase, why: Why) -> bool:
    """Whether every client of the phase was trained, and none to finite numbers."""
    everyone = why == "all" and not opened.done and not opened.reasons
    return everyone and bool(opened.refused) and all(refusal.diverged for refusal in opened.refused)
