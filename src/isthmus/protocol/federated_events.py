"""Federated rounds: what happens to the two machines (events) and what they ask for (instructions). No tensors.

A phase is one pass of one attempt at one round. Everything names its phase; a machine drops and counts what belongs to
another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

NONE = -1
"""In place of a state's number, of a client that keeps nothing yet."""


class PhaseId(msgspec.Struct, frozen=True, order=True):
    round: int
    attempt: int = 0
    number: int = 0
    """The pass within the round, from 0 on."""


class ClientTask(msgspec.Struct, frozen=True, array_like=True, gc=False):  # a million of them are looked at in vain
    """A client to be trained. `state` is the number of the state to go on from, given by the executor that keeps it."""

    client: int
    samples: int
    state: int = NONE
    late: int = 0
    """Rounds: it is trained from the model of so many rounds before, and counts for less (FedBuff, simulated)."""


class PhaseSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What every executor must know of a phase."""

    phase: PhaseId
    clients: int
    """Of the whole cohort, as are its samples: they fix the scale of exact sums."""
    samples: int
    durable_round: int = -1
    """Rounds up to this one are on disk: states that they replaced can go."""


class LinearFit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An executor's time for a client: N t + b (Parrot, Eq. 2)."""

    seconds_per_sample: float
    fixed_s: float

    def seconds(self, samples: int) -> float:
        return samples * self.seconds_per_sample + self.fixed_s


class ClientTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A client that was trained, how long it took there, and which is its new state."""

    client: int
    samples: int
    seconds: float
    state: int = NONE
    renewed: bool = False
    """Its state of before was lost: it went on with that of a new client."""


class RefusedUpdate(msgspec.Struct, frozen=True, array_like=True):
    """A client whose update was not taken in, and why."""

    client: int
    reason: str
    diverged: bool = False
    """Its numbers are not finite, or too large to be added up."""


# To the executor


class PhaseOpened(msgspec.Struct, frozen=True, kw_only=True):
    opening: PhaseSetup
    tasks: tuple[ClientTask, ...]
    holds: bool = False
    """Say when the tasks are done, and keep the sums until the phase closes: there may be more tasks."""
    brief: bool = False
    """Expected to be over before another message could come: nobody need listen meanwhile."""


class TasksGranted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """More tasks."""

    phase: PhaseId
    tasks: tuple[ClientTask, ...]
    holds: bool = False


class TasksRecalled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Another executor is idle: give back of what has not begun as much as evens the two out."""

    phase: PhaseId
    own: LinearFit
    thief: LinearFit


class PhaseClosed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No more tasks: send the sums."""

    phase: PhaseId


class PhaseDropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The phase is over without this executor, or for all of them: forget it, but for clients whose updates are in."""

    phase: PhaseId
    kept: tuple[int, ...] = ()
    again: bool = False
    """The round is tried again."""


class UpdateRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Its update is not taken in, for this reason. Nothing follows from it but that its owner should know."""

    phase: PhaseId
    reason: str


class TasksTrained(msgspec.Struct, frozen=True, kw_only=True):
    """From the driver: the tasks it was given are trained and folded in, but for those that were refused."""

    phase: PhaseId
    timed: tuple[ClientTime, ...]
    refused: tuple[RefusedUpdate, ...] = ()


class ExecutorHalted(msgspec.Struct, frozen=True, kw_only=True):
    pass


ExecutorNotice = TasksGranted | TasksRecalled | PhaseClosed | PhaseDropped | UpdateRefused
"""What a coordinator says to an executor within a phase."""
ExecutorEvent = PhaseOpened | ExecutorNotice | TasksTrained | ExecutorHalted


# From the executor


class BeginPhase(msgspec.Struct, frozen=True):
    """Take the phase's broadcast; forget what is left of another phase."""

    opening: PhaseSetup


class TrainTasks(msgspec.Struct, frozen=True):
    """Train these (several only when they are trained together), fold them in, keep their states."""

    phase: PhaseId
    tasks: tuple[ClientTask, ...]


class ReportDrained(msgspec.Struct, frozen=True):
    phase: PhaseId


class ReportReturned(msgspec.Struct, frozen=True):
    phase: PhaseId
    tasks: tuple[ClientTask, ...]


class SendSums(msgspec.Struct, frozen=True):
    """Send the sums and forget them."""

    phase: PhaseId
    timed: tuple[ClientTime, ...]
    refused: tuple[RefusedUpdate, ...]


class ForgetPhase(msgspec.Struct, frozen=True):
    """Drop the sums, and the states that the phase has written of all clients but these."""

    phase: PhaseId
    kept: tuple[int, ...] = ()


class StopExecutor(msgspec.Struct, frozen=True):
    """Leave."""


ExecutorInstruction = BeginPhase | TrainTasks | ReportDrained | ReportReturned | SendSums | ForgetPhase | StopExecutor


# To the coordinator


class ExecutorJoined(msgspec.Struct, frozen=True, kw_only=True):
    executor: str
    client: int | None = None
    """The one client whose data the executor has; None where it has them all."""
    samples: int | None = None
    """That client has; None where the coordinator knows."""


class ExecutorDrained(msgspec.Struct, frozen=True, kw_only=True):
    """The executor has nothing left to do and holds its sums."""

    executor: str
    phase: PhaseId


class TasksReturned(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a recall: tasks that had not begun, or none."""

    executor: str
    phase: PhaseId
    tasks: tuple[ClientTask, ...]


class SumsSent(msgspec.Struct, frozen=True, kw_only=True):
    """The executor has sent its sums. The driver holds them until `MergeSums` or `IgnoreSums`."""

    executor: str
    phase: PhaseId
    timed: tuple[ClientTime, ...]
    refused: tuple[RefusedUpdate, ...] = ()


class ExecutorLost(msgspec.Struct, frozen=True, kw_only=True):
    executor: str
    reason: str


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float


class RunInterrupted(msgspec.Struct, frozen=True, kw_only=True):
    """The user wants to stop: the open round is dropped."""


CoordinatorEvent = ExecutorJoined | ExecutorDrained | TasksReturned | SumsSent | ExecutorLost | Tick | RunInterrupted


# From the coordinator


class StartPhase(msgspec.Struct, frozen=True):
    executor: str
    event: PhaseOpened


class Notify(msgspec.Struct, frozen=True):
    """Pass this on to an executor."""

    executor: str
    event: ExecutorNotice


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


class UpdateServer(msgspec.Struct, frozen=True):
    """Every sum of the pass is in: the server's update."""

    phase: PhaseId


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a round: exactly which updates are in it."""

    round: int
    attempt: int
    trained: Mapping[str, tuple[ClientTime, ...]]
    """By executor, of the last pass."""
    earlier_s: Mapping[str, float] = {}
    """By executor, seconds of training in the passes before that one; empty for algorithms of one pass."""
    refused: tuple[RefusedUpdate, ...] = ()
    missing: tuple[int, ...] = ()
    """Clients of the cohort that neither came, in all passes, nor were refused."""
    predicted_s: float | None = None
    """The makespan that was planned; None while nothing was known of the executors."""
    bound_s: float | None = None
    lines: Mapping[str, LinearFit] = {}
    """What was believed of each executor when the round was planned; empty while nothing was known."""
    stolen: int = 0
    """Clients that changed hands."""
    stale: tuple[tuple[int, int], ...] = ()
    """(client, rounds late) of updates that were made for a round before."""
    closed_by: Literal["all", "quorum", "deadline"] = "all"


class CommitRound(msgspec.Struct, frozen=True):
    """The round is part of the run."""

    record: RoundRecord


class HaltExecutors(msgspec.Struct, frozen=True):
    """Tell every executor to leave."""


Outcome = Literal["done", "interrupted", "lost", "diverged"]
"""Diverged: the numbers of every client of a round are not finite. Lost: the run cannot go on for another reason."""


class FinishRounds(msgspec.Struct, frozen=True):
    outcome: Outcome
    reason: str = ""


CoordinatorInstruction = (
    StartPhase
    | Notify
    | MergeSums
    | IgnoreSums
    | DismissExecutor
    | UpdateServer
    | CommitRound
    | HaltExecutors
    | FinishRounds
)
