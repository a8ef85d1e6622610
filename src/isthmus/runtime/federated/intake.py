"""What executors send in a turn: checked as it comes, kept until the machine says what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.partial import Weights
from isthmus.federated.server import Server
from isthmus.protocol.federated_events import CoordinatorEvent, Drained, Joined, Returned, Summed
from isthmus.runtime.federated.shared_values import SumsRoom
from isthmus.runtime.messages.every import AnyMessage
from isthmus.runtime.messages.federated import DrainedMessage, ReturnedMessage, SumsMessage
from isthmus.runtime.messages.run import Failed, Heartbeat, ReadyMessage


class Intake(Protocol):
    """One way of sending values. The conductor calls `guard` from any thread, everything else from its own."""

    trips: int
    """Messages with values so far, and their bytes without headers."""
    value_bytes: int
    shared_bytes: int
    """Of them, those in memory that executors share."""

    def guard(self, executor: str, message: AnyMessage) -> None:
        """PeerError for what no executor sends, before its tensors are received."""
        ...

    def greeting(self, executor: str) -> AnyMessage | None:
        """What an executor that has connected is told first."""
        ...

    def hear(self, executor: str, message: AnyMessage, tensors: list[Tensor]) -> CoordinatorEvent | None:
        """PeerError for one that cannot be believed: its executor is lost."""
        ...

    def merge(self, executor: str) -> None:
        """Take in what the executor sent last."""
        ...

    def settle(self) -> None:
        """What was taken in need not stay where it is: now there is time to read it, or all of it has been."""
        ...

    def ignore(self, executor: str) -> None:
        """Drop it."""
        ...


class _Sums(NamedTuple):
    tensors: Mapping[str, Tensor]
    weights: Weights
    largest: Mapping[str, float]
    """Of each sum, its largest number or a bound."""
    lent: bool


class SumsIntake:
    """Sums of executors that have everybody's data: one message per executor and turn."""

    def __init__(self, server: Server, pinned: dict[str, int], rooms: Mapping[str, SumsRoom] | None = None) -> None:
        """`pinned` are the clients of executors that train one only, `rooms` where executors leave sums."""
        self.trips = self.value_bytes = self.shared_bytes = 0
        self._server = server
        self._pinned = pinned
        self._rooms = rooms or {}
        self._sums: dict[str, _Sums] = {}
        self._merged: list[str] = []
        """Whose rooms are to be given back."""

    def guard(self, executor: str, message: AnyMessage) -> None:
        if not isinstance(message, ReadyMessage | DrainedMessage | ReturnedMessage | SumsMessage | Failed | Heartbeat):
            raise PeerError(f"sent {type(message).__name__} to the coordinator")
        if message.tensors and not isinstance(message, SumsMessage):
            raise PeerError(f"sent {type(message).__name__} with tensors")

    def greeting(self, executor: str) -> AnyMessage | None:
        return None

    def hear(self, executor: str, message: AnyMessage, tensors: list[Tensor]) -> CoordinatorEvent | None:
        match message:
            case ReadyMessage():
                return Joined(executor=executor, client=self._pinned.get(executor))
            case DrainedMessage(turn=turn):
                return Drained(executor=executor, turn=turn)
            case ReturnedMessage(turn=turn, tasks=tasks):
                return Returned(executor=executor, turn=turn, tasks=tasks)
            case SumsMessage(turn=turn, timed=timed, refused=refused, weights=part):
                named = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
                lying = self._lying(executor, message)
                largest: Mapping[str, float] = {}
                if turn == self._server.turn:  # of another turn the machine drops it unseen
                    largest = self._server.check({**lying, **named}, {t.client for t in timed}, part, message.lent)
                self._sums[executor] = _Sums({**lying, **named}, part, largest, bool(lying))
                shared_bytes = sum(t.nbytes for t in lying.values())
                self.trips += bool(named or lying)
                self.value_bytes += sum(h.nbytes for h in message.tensors) + shared_bytes
                self.shared_bytes += shared_bytes
                return Summed(executor=executor, turn=turn, timed=timed, refused=refused)
            case _:
                return None

    def _lying(self, executor: str, message: SumsMessage) -> Mapping[str, Tensor]:
        if message.lent is None:
            return {}
        room = self._rooms.get(executor)
        if room is None or not 0 <= message.turn.number < len(room.totals):
            raise PeerError("says that its sums lie where there is no room for them")
        return room.totals[message.turn.number]

    def merge(self, executor: str) -> None:
        sums = self._sums.pop(executor)
        self._server.merge(sums.tensors, sums.weights, sums.largest)
        if sums.lent:
            self._merged.append(executor)

    def settle(self) -> None:
        if self._merged:
            self._server.settle()
        for executor in self._merged:
            self._rooms[executor].give_back()
        self._merged.clear()

    def ignore(self, executor: str) -> None:
        if (sums := self._sums.pop(executor, None)) is not None and sums.lent:
            self._rooms[executor].give_back()
