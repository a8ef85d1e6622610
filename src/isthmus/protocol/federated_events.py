"""The outcome of a federated round, and of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.protocol.federated_messages import (
    ClientTime,
    LinearFit,
    RefusedUpdate,
)


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a round: exactly which updates are in it."""

    round: int
    attempt: int
    trained: Mapping[str, tuple[ClientTime, ...]]
    """The clients that each executor trained in the last pass."""
    earlier_s: Mapping[str, float] = {}
    """Seconds that each executor trained in the passes before that one; empty for algorithms of one pass."""
    refused: tuple[RefusedUpdate, ...] = ()
    missing: tuple[int, ...] = ()
    """Clients of the cohort that neither came, in all passes, nor were refused."""
    predicted_s: float | None = None
    """The makespan that was planned; None while nothing was known of the executors."""
    bound_s: float | None = None
    lines: Mapping[str, LinearFit] = {}
    """The estimated time of each executor when the round was planned; empty while nothing was known."""
    stolen: int = 0
    """Clients that changed hands."""
    stale: tuple[tuple[int, int], ...] = ()
    """(client, rounds late) of updates that were made for a round before."""
    closed_by: Literal["all", "quorum", "behind", "deadline"] = "all"


Outcome = Literal["done", "interrupted", "lost", "diverged", "failed"]
"""Diverged: the numbers of every client of a round are not finite. Failed: the job is at fault. Lost: the run cannot go
on for another reason."""


class FinishRounds(msgspec.Struct, frozen=True):
    outcome: Outcome
    reason: str = ""
