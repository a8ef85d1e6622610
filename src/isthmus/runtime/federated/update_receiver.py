"""Results from executors in a phase: checked on arrival, kept until the machine accepts or drops them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.partial import AggregationWeights
from isthmus.federated.server import Server
from isthmus.protocol.federated_events import CoordinatorEvent, ExecutorDrained, ExecutorJoined, SumsSent, TasksReturned
from isthmus.protocol.run_messages import DeviceFailed, DeviceReady
from isthmus.runtime.federated.shared_memory import SharedAccumulator
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import DrainedMessage, ReturnedMessage, SumsMessage
from isthmus.runtime.messages.run import Heartbeat, ToCoordinator, content


class UpdateReceiver(Protocol):
    """One way of sending values. The coordinator calls `guard` from any thread, everything else from its own."""

    trips: int
    """Messages with values so far, and their bytes without headers."""
    value_bytes: int
    shared_bytes: int
    """Of them, those in memory that executors share."""

    def guard(self, executor: str, message: AnyMessage) -> None:
        """PeerError for what no executor sends, before its tensors are received."""
        ...

    def hello(self, executor: str) -> AnyMessage | None:
        """What an executor that has connected gets first."""
        ...

    def on_message(self, executor: str, message: AnyMessage, tensors: list[Tensor]) -> CoordinatorEvent | None:
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


class _ReceivedSums(NamedTuple):
    tensors: Mapping[str, Tensor]
    weights: AggregationWeights
    largest: Mapping[str, float]
    """Of each sum, its largest number or a bound."""
    shared_bounds: bool


class SumsReceiver:
    """Sums of executors that have everybody's data: one message per executor and phase."""

    def __init__(
        self, server: Server, pinned: dict[str, int], accumulators: Mapping[str, SharedAccumulator] | None = None
    ) -> None:
        """`pinned` are the clients of executors that train one only, `accumulators` where executors leave sums."""
        self.trips = self.value_bytes = self.shared_bytes = 0
        self._server = server
        self._pinned = pinned
        self._accumulators = accumulators or {}
        self._sums: dict[str, _ReceivedSums] = {}
        self._merged: list[str] = []
        """Whose rooms are to be given back."""

    def guard(self, executor: str, message: AnyMessage) -> None:
        said = content(message)
        if not isinstance(
            said, DeviceReady | DrainedMessage | ReturnedMessage | SumsMessage | DeviceFailed | Heartbeat
        ):
            raise PeerError(f"sent {type(said).__name__} to the coordinator")
        if message.tensors and not isinstance(message, SumsMessage):
            raise PeerError(f"sent {type(message).__name__} with tensors")

    def hello(self, executor: str) -> AnyMessage | None:
        return None

    def on_message(self, executor: str, message: AnyMessage, tensors: list[Tensor]) -> CoordinatorEvent | None:
        match message:
            case ToCoordinator(body=DeviceReady()):
                return ExecutorJoined(executor=executor, client=self._pinned.get(executor))
            case DrainedMessage(phase=phase):
                return ExecutorDrained(executor=executor, phase=phase)
            case ReturnedMessage(phase=phase, tasks=tasks):
                return TasksReturned(executor=executor, phase=phase, tasks=tasks)
            case SumsMessage(phase=phase, timed=timed, refused=refused, weights=part):
                named = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
                from_shared_memory = self._from_shared_memory(executor, message)
                largest: Mapping[str, float] = {}
                if phase == self._server.phase:  # of another phase the machine drops it unseen
                    largest = self._server.check(
                        {**from_shared_memory, **named}, {t.client for t in timed}, part, message.shared_bounds
                    )
                self._sums[executor] = _ReceivedSums(
                    {**from_shared_memory, **named}, part, largest, bool(from_shared_memory)
                )
                shared_bytes = sum(t.nbytes for t in from_shared_memory.values())
                self.trips += bool(named or from_shared_memory)
                self.value_bytes += sum(h.nbytes for h in message.tensors) + shared_bytes
                self.shared_bytes += shared_bytes
                return SumsSent(executor=executor, phase=phase, timed=timed, refused=refused)
            case _:
                return None

    def _from_shared_memory(self, executor: str, message: SumsMessage) -> Mapping[str, Tensor]:
        if message.shared_bounds is None:
            return {}
        accumulator = self._accumulators.get(executor)
        if accumulator is None or not 0 <= message.phase.number < len(accumulator.totals):
            raise PeerError("announced sums outside its shared memory")
        return accumulator.totals[message.phase.number]

    def merge(self, executor: str) -> None:
        sums = self._sums.pop(executor)
        self._server.merge(sums.tensors, sums.weights, sums.largest)
        if sums.shared_bounds:
            self._merged.append(executor)

    def settle(self) -> None:
        if self._merged:
            self._server.settle()
        for executor in self._merged:
            self._accumulators[executor].release()
        self._merged.clear()

    def ignore(self, executor: str) -> None:
        if (sums := self._sums.pop(executor, None)) is not None and sums.shared_bounds:
            self._accumulators[executor].release()
