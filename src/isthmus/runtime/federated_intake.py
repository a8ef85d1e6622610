"""What executors send in a turn: checked as it comes, kept until the machine says what becomes of it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.partial import Weights
from isthmus.federated.server import Server
from isthmus.protocol.federated_events import CoordinatorEvent, Drained, Joined, Returned, Summed
from isthmus.runtime.federated_messages import DrainedMessage, ReturnedMessage, SumsMessage
from isthmus.runtime.messages import AnyMessage, Failed, Heartbeat, ReadyMessage


class Intake(Protocol):
    """One way of sending values. The conductor calls `guard` from any thread, everything else from its own."""

    trips: int
    """Messages with values so far, and their bytes without headers."""
    value_bytes: int

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

    def ignore(self, executor: str) -> None:
        """Drop it."""
        ...


class SumsIntake:
    """Sums of executors that have everybody's data: one message per executor and turn."""

    def __init__(self, server: Server, pinned: dict[str, int]) -> None:
        """`pinned` are the clients of executors that train one only."""
        self.trips = self.value_bytes = 0
        self._server = server
        self._pinned = pinned
        self._sums: dict[str, tuple[dict[str, Tensor], Weights]] = {}

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
                if turn == self._server.turn:  # of another turn the machine drops it unseen
                    self._server.check(named, {t.client for t in timed}, part)
                self._sums[executor] = (named, part)
                self.trips += bool(named)
                self.value_bytes += sum(h.nbytes for h in message.tensors)
                return Summed(executor=executor, turn=turn, timed=timed, refused=refused)
            case _:
                return None

    def merge(self, executor: str) -> None:
        named, part = self._sums.pop(executor)
        self._server.merge(named, part)

    def ignore(self, executor: str) -> None:
        self._sums.pop(executor, None)
