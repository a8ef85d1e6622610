"""The record of a round, checks of executors' reports, and the log lines about refused updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from isthmus.programs.merging import Why
from isthmus.programs.open_phase import OpenPhase
from isthmus.protocol.federated_messages import NONE, ClientTask, ClientTime, LinearFit, RefusedUpdate, SumsSent

MOST_STATES = 2**31
MOST_REFUSALS = 3  # refused clients that a run's last line names


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a round: exactly which updates are in it."""

    round: int
    attempt: int
    trained: Mapping[str, tuple[ClientTime, ...]]  # the clients that each executor trained in the last pass
    earlier_s: Mapping[str, float] = {}
    """Seconds that each executor trained in the passes before that one; empty for algorithms of one pass."""
    refused: tuple[RefusedUpdate, ...] = ()
    missing: tuple[int, ...] = ()  # clients of the cohort that neither came, in all passes, nor were refused
    predicted_s: float | None = None  # the makespan that was planned; None while nothing was known of the executors
    bound_s: float | None = None
    lines: Mapping[str, LinearFit] = {}
    """The estimated time of each executor when the round was planned; empty while nothing was known."""
    stolen: int = 0  # clients that changed hands
    stale: tuple[tuple[int, int], ...] = ()  # (client, rounds late) of updates that were made for a round before
    closed_by: Why = "all"


def refusal_texts(refused: Sequence[RefusedUpdate]) -> list[str]:
    """Return the first few refusals, each with its client."""
    few = [f"client {r.client}: {r.reason.removeprefix(f'client {r.client}: ')}" for r in refused[:MOST_REFUSALS]]
    return [*few, f"and {len(refused) - MOST_REFUSALS} clients more"] if len(refused) > MOST_REFUSALS else few


def fault_of(event: SumsSent, held: Mapping[int, ClientTask]) -> str | None:
    """Return the fault of an executor's report of the clients that it was given; None if it has none."""
    reported = [t.client for t in event.timed] + [r.client for r in event.refused]
    if not set(reported) <= held.keys():
        return "reported clients that it was not given"
    if len(set(reported)) < len(reported):
        return "reported a client twice"
    if wrong := [t for t in event.timed if t.samples != held[t.client].samples]:
        got, expected = wrong[0], held[wrong[0].client].samples
        return f"reported {got.samples} samples of client {got.client}, expected {expected}"
    if any(not 0 <= t.seconds < math.inf for t in event.timed):
        return "reported a time that is none"
    if any(not NONE <= t.state < MOST_STATES for t in event.timed):
        return "reported a state that is none"
    return None


def has_diverged(opened: OpenPhase, why: Why) -> bool:
    """Return whether every client of the phase was trained, and none to finite numbers."""
    everyone = why == "all" and not opened.done and not opened.reasons
    return everyone and bool(opened.refused) and all(refusal.diverged for refusal in opened.refused)


def record_of(
    opened: OpenPhase,
    passed: Sequence[OpenPhase],
    asked: Sequence[int],
    *,
    lines: Mapping[str, LinearFit],
    late: Mapping[int, int],
    why: Why,
) -> RoundRecord:
    """Return the record of a round whose last pass is over, after those that `passed`. `asked` are its clients; `late`
    gives the rounds that clients of a simulation are late."""
    trained = {t.client for timed in opened.timed.values() for t in timed}
    refusals = [r for one in (*passed, opened) for r in one.refused]
    refused = {r.client for r in refusals}
    earlier_s: dict[str, float] = {}
    for name, timed in ((name, timed) for one in passed for name, timed in one.timed.items()):
        earlier_s[name] = earlier_s.get(name, 0.0) + sum(t.seconds for t in timed)
    return RoundRecord(
        round=opened.phase.round,
        attempt=opened.phase.attempt,
        trained={name: tuple(timed) for name, timed in opened.timed.items() if timed},
        earlier_s=earlier_s,
        refused=tuple(refusals),
        missing=tuple(c for c in asked if c not in trained and c not in refused),
        predicted_s=opened.predicted_s,
        bound_s=opened.bound_s,
        lines=lines,
        stolen=opened.stolen,
        closed_by=why,
        stale=(*opened.stale, *((c, rounds) for c, rounds in late.items() if rounds and c in trained)),
    )
