"""Federated rounds: what happens to the two machines (events) and what they ask for (instructions). No tensors.

A turn is one pass of one attempt at one round. Everything names its turn; a machine drops and counts what belongs to
another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

NONE = -1
"""In place of a state's number, of a client that keeps nothing yet."""


class Turn(msgspec.Struct, frozen=True, order=True):
    round: int
    attempt: int = 0
    number: int = 0
    """The pass within the round, from 0 on."""


class Task(msgspec.Struct, frozen=True, array_like=True, gc=False):  # a million of them are looked at in vain
    """A client to be trained. `state` says which of its states to go on from, as whoever kept it numbered it."""

    client: int
    samples: int
    state: int = NONE
    late: int = 0
    """Rounds: it is trained from the model of so many rounds before, and counts for less (FedBuff, simulated)."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What every executor must know of a turn."""

    turn: Turn
    clients: int
    """Of the whole cohort, as are its samples: they fix the scale of exact sums."""
    samples: int
    durable_round: int = -1
    """Rounds up to this one are on disk: states that they replaced can go."""


class Line(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An executor's time for a client: N t + b (Parrot, Eq. 2)."""

    seconds_per_sample: float
    fixed_s: float

    def seconds(self, samples: int) -> float:
        return samples * self.seconds_per_sample + self.fixed_s


class Timed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A client that was trained, how long it took there, and which is its new state."""

    client: int
    samples: int
    seconds: float
    state: int = NONE
    renewed: bool = False
    """Its state of before was lost: it went on with that of a new client."""


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """A client whose update was not taken in, and why."""

    client: int
    reason: str
    diverged: bool = False
    """Its numbers are not finite, or too large to be added up."""


# To the executor


class TurnOpened(msgspec.Struct, frozen=True, kw_only=True):
    opening: Opening
    tasks: tuple[Task, ...]
    holds: bool = False
    """Say when the tasks are done, and keep the sums until the turn closes: there may be more tasks."""
    brief: bool = False
    """Expected to be over before another message could come: nobody need listen meanwhile."""


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """More tasks."""

    turn: Turn
    tasks: tuple[Task, ...]
    holds: bool = False


class Recalled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Another executor is idle: give back of what has not begun as much as evens the two out."""

    turn: Turn
    own: Line
    thief: Line


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No more tasks: send the sums."""

    turn: Turn


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The turn is over without this executor, or for all of them: forget it, but for clients whose updates are in."""

    turn: Turn
    kept: tuple[int, ...] = ()
    again: bool = False
    """The round is tried again."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Its update is not taken in, for this reason. Nothing follows from it but that its owner should know."""

    turn: Turn
    reason: str


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """From the driver: the tasks it was given are trained and folded in, but for those that were refused."""

    turn: Turn
    timed: tuple[Timed, ...]
    refused: tuple[Refusal, ...] = ()


class Halted(msgspec.Struct, frozen=True, kw_only=True):
    pass


Told = Granted | Recalled | Closed | Dropped | Refused
"""What a coordinator says to an executor within a turn."""
ExecutorEvent = TurnOpened | Told | Trained | Halted


# From the executor


class Begin(msgspec.Struct, frozen=True):
    """Take the turn's broadcast; forget what is left of another turn."""

    opening: Opening


class Train(msgspec.Struct, frozen=True):
    """Train these (several only when they are trained together), fold them in, keep their states."""

    turn: Turn
    tasks: tuple[Task, ...]


class TellDrained(msgspec.Struct, frozen=True):
    turn: Turn


class TellReturned(msgspec.Struct, frozen=True):
    turn: Turn
    tasks: tuple[Task, ...]


class SendSums(msgspec.Struct, frozen=True):
    """Send the sums and forget them."""

    turn: Turn
    timed: tuple[Timed, ...]
    refused: tuple[Refusal, ...]


class Forget(msgspec.Struct, frozen=True):
    """Drop the sums, and the states that the turn has written of all clients but these."""

    turn: Turn
    kept: tuple[int, ...] = ()


class Stop(msgspec.Struct, frozen=True):
    """Leave."""


ExecutorInstruction = Begin | Train | TellDrained | TellReturned | SendSums | Forget | Stop


# To the coordinator


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    executor: str
    client: int | None = None
    """The one client whose data the executor has; None where it has them all."""
    samples: int | None = None
    """That client has; None where the coordinator knows."""


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """The executor has nothing left to do and holds its sums."""

    executor: str
    turn: Turn


class Returned(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a recall: tasks that had not begun, or none."""

    executor: str
    turn: Turn
    tasks: tuple[Task, ...]


class Summed(msgspec.Struct, frozen=True, kw_only=True):
    """The executor has sent its sums. The driver holds them until `Merge` or `Ignore`."""

    executor: str
    turn: Turn
    timed: tuple[Timed, ...]
    refused: tuple[Refusal, ...] = ()


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    executor: str
    reason: str


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float


class Interrupted(msgspec.Struct, frozen=True, kw_only=True):
    """The user wants to stop: the open round is dropped."""


CoordinatorEvent = Joined | Drained | Returned | Summed | Lost | Tick | Interrupted


# From the coordinator


class Open(msgspec.Struct, frozen=True):
    executor: str
    event: TurnOpened


class Tell(msgspec.Struct, frozen=True):
    """Pass this on to an executor."""

    executor: str
    event: Told


class Merge(msgspec.Struct, frozen=True):
    """Take in the sums that the executor has just sent."""

    executor: str
    turn: Turn


class Ignore(msgspec.Struct, frozen=True):
    """The sums that the executor has just sent came too late."""

    executor: str
    turn: Turn


class Dismiss(msgspec.Struct, frozen=True):
    """Hang up on an executor that sent what it cannot have."""

    executor: str
    reason: str


class Absorb(msgspec.Struct, frozen=True):
    """Every sum of the pass is in: the server's turn."""

    turn: Turn


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a round: exactly which updates are in it."""

    round: int
    attempt: int
    trained: Mapping[str, tuple[Timed, ...]]
    """By executor, of the last pass."""
    earlier_s: Mapping[str, float] = {}
    """By executor, seconds of training in the passes before that one; empty for algorithms of one pass."""
    refused: tuple[Refusal, ...] = ()
    missing: tuple[int, ...] = ()
    """Clients of the cohort that neither came, in all passes, nor were refused."""
    predicted_s: float | None = None
    """The makespan that was planned; None while nothing was known of the executors."""
    bound_s: float | None = None
    lines: Mapping[str, Line] = {}
    """What was believed of each executor when the round was planned; empty while nothing was known."""
    stolen: int = 0
    """Clients that changed hands."""
    stale: tuple[tuple[int, int], ...] = ()
    """(client, rounds late) of updates that were made for a round before."""
    closed_by: Literal["all", "quorum", "deadline"] = "all"


class Commit(msgspec.Struct, frozen=True):
    """The round is part of the run."""

    record: Record


class Halt(msgspec.Struct, frozen=True):
    """Tell every executor to leave."""


Outcome = Literal["done", "interrupted", "lost", "diverged"]
"""Diverged: the numbers of every client of a round are not finite. Lost: the run cannot go on for another reason."""


class Finish(msgspec.Struct, frozen=True):
    outcome: Outcome
    reason: str = ""


CoordinatorInstruction = Open | Tell | Merge | Ignore | Dismiss | Absorb | Commit | Halt | Finish
