"""Results from executors in a phase: checked on arrival, kept until the machine accepts or drops them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn, Protocol

from torch import Tensor

from isthmus.errors import InternalError, PeerError
from isthmus.federated.partial import AggregationWeights
from isthmus.federated.server import Server
from isthmus.programs.masked import TakeMasksOff
from isthmus.protocol.federated_messages import ExecutorJoined, ExecutorReport, PhaseId, SumsSent
from isthmus.runtime.federated.shared_memory import SharedAccumulator
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import FromExecutor, SentValues, SummedValues
from isthmus.runtime.messages.run import Heartbeat


class UpdateReceiver(Protocol):
    """One way of sending values. The coordinator calls `guard` from any thread, everything else from its own."""

    trips: int  # messages with values so far, and their bytes without headers
    value_bytes: int
    shared_bytes: int  # those of these bytes that are in memory that executors share

    def guard(self, executor: str, message: AnyMessage) -> None:
        """PeerError for what no executor sends, before its tensors are received."""

    def hello(self, executor: str) -> AnyMessage | None:
        """Return the first message to an executor that has connected; None for none."""
        ...

    def on_report(
        self, executor: str, report: ExecutorReport, values: SentValues | None, tensors: dict[str, Tensor]
    ) -> ExecutorReport:
        """Keep the values. Returns what the machine takes. PeerError for values that cannot be believed: the executor
        is lost."""
        ...

    def merge(self, executor: str) -> None:
        """Take in what the executor sent last."""

    def settle(self) -> None:
        """Read the values that were merged: the memory that they are in may be used again."""

    def ignore(self, executor: str) -> None:
        """Drop it."""

    def unmask(self, recovered: TakeMasksOff) -> frozenset[tuple[str, str]]:
        """Take the masks off what was taken in; returns holder and owner of each wrong share. PeerError where others
        do not give back the secrets."""
        ...


def check_frame(message: AnyMessage, values: type[SentValues]) -> None:
    """PeerError for what no executor sends that sends values of this kind."""
    if not isinstance(message, FromExecutor | Heartbeat):
        raise PeerError(f"sent {type(message).__name__} to the coordinator")
    body = message.body if isinstance(message, FromExecutor) else message
    got = message.values if isinstance(message, FromExecutor) else None
    sends = isinstance(body, SumsSent)
    if message.tensors and not sends:
        raise PeerError(f"sent {type(body).__name__} with tensors")
    if not (isinstance(got, values) if sends else got is None):
        raise PeerError(f"sent {type(body).__name__} with {'no values' if got is None else type(got).__name__}")


def unmasked(recovered: TakeMasksOff) -> NoReturn:
    """Raise InternalError: a receiver whose values have no masks was given masks to take off."""
    raise InternalError(f"round {recovered.phase.round + 1}: no masks are on the sums")


class _ReceivedSums(NamedTuple):
    tensors: Mapping[str, Tensor]
    weights: AggregationWeights
    largest: Mapping[str, float]  # the largest number of each sum, or a bound
    shared_bounds: bool


class SumsReceiver:
    """Sums of executors that have everybody's data: one message per executor and phase."""

    def __init__(self, server: Server, accumulators: Mapping[str, SharedAccumulator] | None = None) -> None:
        """`accumulators` are where executors leave sums."""
        self.trips = self.value_bytes = self.shared_bytes = 0
        self._server = server
        self._accumulators = accumulators or {}
        self._sums: dict[str, _ReceivedSums] = {}
        self._merged: list[str] = []  # whose rooms are to be given back

    def guard(self, executor: str, message: AnyMessage) -> None:
        check_frame(message, SummedValues)

    def hello(self, executor: str) -> AnyMessage | None:
        return None

    def on_report(
        self, executor: str, report: ExecutorReport, values: SentValues | None, tensors: dict[str, Tensor]
    ) -> ExecutorReport:
        if isinstance(report, ExecutorJoined) and report.samples is not None:
            raise PeerError(f"joined with {report.samples} samples, expected no number: it has everybody's data")
        if isinstance(report, SumsSent) and isinstance(values, SummedValues):
            self._keep(executor, report, values, tensors)
        return report

    def _keep(self, executor: str, sums: SumsSent, values: SummedValues, sent: Mapping[str, Tensor]) -> None:
        bounds = values.shared_bounds
        shared = {} if bounds is None else self._from_shared_memory(executor, sums.phase, bounds)
        tensors, largest = {**shared, **sent}, dict[str, float]()
        if sums.phase == self._server.phase:  # of another phase the machine drops it unseen
            clients = {t.client for t in sums.timed}
            largest = self._server.partial.check(tensors, clients, values.weights, values.shared_bounds)
        self._sums[executor] = _ReceivedSums(tensors, values.weights, largest, bool(shared))
        shared_bytes = sum(t.nbytes for t in shared.values())
        self.trips += bool(tensors)
        self.value_bytes += sum(t.nbytes for t in sent.values()) + shared_bytes
        self.shared_bytes += shared_bytes

    def _from_shared_memory(self, executor: str, phase: PhaseId, bounds: Mapping[str, float]) -> Mapping[str, Tensor]:
        accumulator = self._accumulators.get(executor)
        if accumulator is None or not 0 <= phase.number < len(accumulator.totals):
            raise PeerError("announced sums outside its shared memory")
        totals = accumulator.totals[phase.number]
        return {name: total for name, total in totals.items() if name in bounds}

    def merge(self, executor: str) -> None:
        sums = self._sums.pop(executor)
        self._server.partial.merge(sums.tensors, sums.weights, sums.largest)
        if sums.shared_bounds:
            self._merged.append(executor)

    def settle(self) -> None:
        if self._merged:
            self._server.settle()
        for executor in self._merged:
            self._accumulators[executor].release()
        self._merged.clear()

    def unmask(self, recovered: TakeMasksOff) -> frozenset[tuple[str, str]]:
        unmasked(recovered)

    def ignore(self, executor: str) -> None:
        if (sums := self._sums.pop(executor, None)) is not None and sums.shared_bounds:
            self._accumulators[executor].release()
