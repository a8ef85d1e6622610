"""Federated rounds: the events and instructions between a machine and its own host. No tensors.

What one machine says to the other is in `federated_messages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.planners.cohort import CohortSchedule
from isthmus.protocol.failures import CLOSED
from isthmus.protocol.federated_messages import (
    ClientTime,
    ExecutorOrder,
    ExecutorReport,
    LinearFit,
    PhaseId,
    PhaseSetup,
    RefusedUpdate,
)
from isthmus.protocol.federated_planning import PlanningProblem
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.run_events import Note
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.protocol.secure_coordinator import TakeMasksOff
from isthmus.protocol.secure_messages import SecureOrder, SecureReport

# To the coordinator, besides the executors' reports


class ExecutorLost(msgspec.Struct, frozen=True, kw_only=True):
    executor: str
    reason: str


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float
    ended: Mapping[str, str] = {}
    """How each executor's process ended, where it has."""


class RunInterrupted(msgspec.Struct, frozen=True, kw_only=True):
    """The user wants to stop: the open round is dropped."""


class RoundPlanned(msgspec.Struct, frozen=True, eq=False):
    """The answer to `PlanRound`."""

    schedule: CohortSchedule


class PhaseUnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """The executors have their tasks: there is time to plan the next round. Without it, a round is planned when it is
    opened."""


class Unmasked(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `UnmaskSums`."""

    phase: PhaseId
    reason: str = ""
    """Why the masks cannot be taken off; empty: they are off."""
    wrong: tuple[tuple[str, str], ...] = ()
    """Holder and owner of each share that is wrong; the others were enough."""


CoordinatorEvent = (
    FromDevice[ExecutorReport] | ExecutorLost | Tick | RunInterrupted | RoundPlanned | PhaseUnderWay | Unmasked
)


# From the coordinator


class Notify(msgspec.Struct, frozen=True):
    """Send this to one executor. With `PhaseOpened` comes the broadcast."""

    executor: str
    body: ExecutorOrder


class PlanRound(msgspec.Struct, frozen=True, eq=False):
    """Make the schedule of this round, and say `RoundPlanned` before anything else."""

    round: int
    problem: PlanningProblem


class MergeSums(msgspec.Struct, frozen=True):
    """Take in the sums that the executor has just sent."""

    executor: str
    phase: PhaseId


class IgnoreSums(msgspec.Struct, frozen=True):
    """The sums that the executor has just sent came too late."""

    executor: str
    phase: PhaseId


class DismissExecutor(msgspec.Struct, frozen=True):
    """Hang up on an executor that sent what it cannot have."""

    executor: str
    reason: str


class TellSite(msgspec.Struct, frozen=True):
    """Send a site a step of secure aggregation."""

    site: str
    body: SecureOrder


class UnmaskSums(msgspec.Struct, frozen=True):
    """The phase is over, and its sum is masked. Say `Unmasked` when the masks are off."""

    phase: PhaseId
    executors: frozenset[str]
    """Whose updates are in it."""


class UpdateServer(msgspec.Struct, frozen=True):
    """Every sum of the pass is in: the server's update."""

    phase: PhaseId
    opening: PhaseSetup | None = None
    """The setup of a pass without clients, which no executor opens."""


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


class CommitRound(msgspec.Struct, frozen=True):
    """The round is part of the run."""

    record: RoundRecord


Outcome = Literal["done", "interrupted", "lost", "diverged", "failed"]
"""Diverged: the numbers of every client of a round are not finite. Failed: the job is at fault. Lost: the run cannot go
on for another reason."""


class FinishRounds(msgspec.Struct, frozen=True):
    outcome: Outcome
    reason: str = ""


RoundInstruction = (
    Notify | PlanRound | MergeSums | IgnoreSums | DismissExecutor | UpdateServer | CommitRound | Halt | FinishRounds
)
"""`Halt` is for every executor."""
CoordinatorInstruction = RoundInstruction | UnmaskSums


# Between a run's machine and its host, besides


class ExecutorConnected(msgspec.Struct, frozen=True, kw_only=True):
    """An executor's process, or a site, is connected. It joins by a report of its own."""

    executor: str


class ExecutorDisconnected(msgspec.Struct, frozen=True, kw_only=True):
    """Its connection closed, or it was silent for too long."""

    executor: str
    reason: str = CLOSED


class ReportRefused(msgspec.Struct, frozen=True, kw_only=True):
    """It sent values that cannot be believed."""

    executor: str
    reason: str


FederatedEvent = (
    CoordinatorEvent
    | FromDevice[DeviceFailed]
    | FromDevice[SecureReport]
    | ExecutorConnected
    | ExecutorDisconnected
    | ReportRefused
)
FederatedInstruction = RoundInstruction | TellSite | TakeMasksOff | Note
