"""The bodies of a federated run's frames: a machine takes the body that the other one emitted, as in `run_messages`.

A phase is one pass of one attempt at one round. A body names its phase; a machine drops and counts what belongs to
another one. A body does not name its sender: the receiver knows the executor from the connection. Tensors travel beside
the body.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.wire_types import MOST_CLIENTS, Client, Count, CountOrNone, Finite, Many, Seconds, Text

NONE = -1  # in place of a state's number, of a client that keeps nothing yet
MOST_SAMPLES = (1 << 40) - 1  # the most samples of a site
State = Annotated[int, Meta(ge=NONE, le=MOST_CLIENTS)]  # an executor numbers the states that it keeps, of its clients


class PhaseId(msgspec.Struct, frozen=True, order=True):
    round: Count
    attempt: Count = 0
    number: Count = 0  # the pass within the round, from 0 on

    def __str__(self) -> str:
        return f"round {self.round + 1} (attempt {self.attempt + 1}, pass {self.number + 1})"


class ClientTask(msgspec.Struct, frozen=True, array_like=True, gc=False):  # a million of them are looked at in vain
    """A client to be trained. `state` is the number of the state to go on from, given by the executor that keeps it."""

    client: Client
    samples: Count
    state: State = NONE
    late: Count = 0
    """Rounds: it is trained from the model of so many rounds before, and counts for less (FedBuff, simulated)."""


class PhaseSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a phase that every executor must know."""

    phase: PhaseId
    clients: Client  # clients of the whole cohort. Like the cohort's samples they fix the scale of exact sums.
    samples: Count
    durable_round: CountOrNone = -1  # rounds up to this one are on disk: states that they replaced can go


class LinearFit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An executor's time for a client: N t + b (Parrot, Eq. 2)."""

    seconds_per_sample: Finite
    fixed_s: Finite

    def seconds(self, samples: int) -> float:
        return samples * self.seconds_per_sample + self.fixed_s


class ClientTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A client that was trained, how long it took there, and which is its new state."""

    client: Client
    samples: Count
    seconds: Seconds
    state: State = NONE
    renewed: bool = False  # its state of before was lost: it went on with that of a new client


class RefusedUpdate(msgspec.Struct, frozen=True, array_like=True):
    """A client whose update was not taken in, and why."""

    client: Client
    reason: Text
    diverged: bool = False  # its numbers are not finite, or too large to be added up


class RoundBody(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One frame of a federated run."""


# Coordinator to executor


class PhaseOpened(RoundBody, frozen=True, kw_only=True):
    """A phase begins. The broadcast comes with it. Once per executor and phase."""

    opening: PhaseSetup
    tasks: Many[ClientTask]
    holds: bool = False
    """Say when the tasks are done, and keep the sums until the phase closes: there may be more tasks."""
    brief: bool = False  # expected to be over before another message could come: nobody need listen meanwhile


class TasksGranted(RoundBody, frozen=True, kw_only=True):
    phase: PhaseId
    tasks: Many[ClientTask]
    holds: bool = False


class TasksRecalled(RoundBody, frozen=True, kw_only=True):
    """Another executor is idle: give back of what has not begun as much as evens the two out."""

    phase: PhaseId
    own: LinearFit
    thief: LinearFit


class PhaseClosed(RoundBody, frozen=True, kw_only=True):
    """No more tasks: send the sums."""

    phase: PhaseId


class PhaseDropped(RoundBody, frozen=True, kw_only=True):
    """The phase is over without this executor, or for all of them: forget it, but for clients whose updates are in."""

    phase: PhaseId
    kept: Many[Client] = ()
    again: bool = False  # the round is tried again


class UpdateRefused(RoundBody, frozen=True, kw_only=True):
    """Its update is not taken in, for this reason. Nothing follows from it but that its owner should know."""

    phase: PhaseId
    reason: Text


PhaseOrder = TasksGranted | TasksRecalled | PhaseClosed | PhaseDropped | UpdateRefused  # within a phase
ExecutorOrder = PhaseOpened | PhaseOrder  # to one executor


# Executor to coordinator


class ExecutorJoined(RoundBody, frozen=True, kw_only=True):
    samples: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] | None = None
    """Samples of a site's one client; None where the coordinator has the data too."""


class ExecutorDrained(RoundBody, frozen=True, kw_only=True):
    """The executor has nothing left to do and holds its sums."""

    phase: PhaseId


class TasksReturned(RoundBody, frozen=True, kw_only=True):
    """The answer to a recall: tasks that had not begun, or none."""

    phase: PhaseId
    tasks: Many[ClientTask]


class SumsSent(RoundBody, frozen=True, kw_only=True):
    """The executor's sums, or the update of a site's client, come with it. The executor forgets them; the coordinator's
    host holds them until the coordinator says `merge` or `ignore`."""

    phase: PhaseId
    timed: Many[ClientTime]
    refused: Many[RefusedUpdate] = ()


PhaseReport = ExecutorDrained | TasksReturned | SumsSent  # within a phase
ExecutorReport = ExecutorJoined | PhaseReport
