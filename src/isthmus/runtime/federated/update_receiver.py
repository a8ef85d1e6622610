"""Results from executors in a phase: checked on arrival, kept until the machine accepts or drops them.

Values between processes of one machine: tensors are in shared memory, and messages only refer to them.

The memory is anonymous: it exists from before executors are forked until the last of them ends, and leaves no file
behind. It is overwritten in every round, so its pages are allocated once.

Coordinator to executors: one `SharedBroadcast` for the broadcast, written when a phase opens. An executor that still
trains for a closed phase then reads a mixture, but results for a closed phase are ignored.

Executor to coordinator: a `SharedAccumulator` each, which holds the executor's partial sums. It is overwritten only
after the coordinator has released the published sums: an executor may get more clients of a phase before the
coordinator has read its message.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.errors import InternalError, PeerError
from isthmus.federated.admission import AdmissionRules, Form, refusal_of
from isthmus.federated.algorithms import ClientUpdate
from isthmus.federated.partial import BYTES_PER_NUMBER, AggregationWeights, parallel_chunks
from isthmus.federated.server import Server, staleness_weight
from isthmus.federated.task_spec import TaskSpec
from isthmus.programs.masked import TakeMasksOff
from isthmus.protocol.federated_messages import NONE, ExecutorJoined, ExecutorReport, PhaseId, SumsSent, TasksReturned
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import (
    FromExecutor,
    SentValues,
    SiteValues,
    StateReport,
    SummedValues,
    TaskMessage,
    ToExecutor,
)
from isthmus.runtime.messages.run import Heartbeat
from isthmus.training.layout import TensorHeader, header_of, in_a_row, unpack

ALIGNMENT_BYTES = 64
LOOK_S = 0.0005


def _shared(size_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), dtype=torch.uint8)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _copy(place: Tensor, numbers: Tensor) -> None:
    def some(start: int, stop: int) -> None:
        place[start:stop].copy_(numbers[start:stop])

    parallel_chunks(some, len(place))


class SharedMemory(NamedTuple):
    """Memory that an executor shares with its coordinator."""

    broadcast_memory: SharedBroadcast
    accumulator: SharedAccumulator


class SharedBroadcast:
    """Room for one broadcast, which the coordinator writes and executors read."""

    def __init__(self, like: Mapping[str, Tensor], times: int = 1) -> None:
        """Large enough for so many times tensors such as these."""
        self._bytes = _shared(times * sum(_aligned(t.numel() * t.element_size()) for t in like.values()))

    def put(self, tensors: Mapping[str, Tensor]) -> tuple[TensorHeader, ...] | None:
        """Write them; returns what `get` needs. None, and nothing written, where they do not fit."""
        headers = tuple(header_of(name, t) for name, t in tensors.items())
        if sum(_aligned(h.nbytes) for h in headers) > len(self._bytes):
            return None
        for place, tensor in zip(self._places(headers), tensors.values(), strict=True):
            _copy(place, in_a_row(tensor))
        return headers

    def get(self, headers: Sequence[TensorHeader]) -> dict[str, Tensor]:
        """The tensors where they lie, until the next ones are put."""
        places = self._places(headers)
        return {header.name: unpack(place, header) for header, place in zip(headers, places, strict=True)}

    def _places(self, headers: Sequence[TensorHeader]) -> list[Tensor]:
        found: list[Tensor] = []
        at = 0
        for header in headers:
            dtype: torch.dtype = getattr(torch, header.dtype)
            found.append(self._bytes[at : at + header.nbytes].view(dtype))
            at += _aligned(header.nbytes)
        return found


class SharedAccumulator:
    """Where one executor adds up, and the coordinator reads."""

    def __init__(self, passes: Sequence[Mapping[str, Form]]) -> None:
        """`passes` are the forms of the values that each pass sums. They use the same memory, one after another."""
        sizes = [{name: math.prod(form.shape) for name, form in forms.items()} for forms in passes]
        needed = max((sum(_aligned(BYTES_PER_NUMBER * n) for n in one.values()) for one in sizes), default=0)
        memory = _shared(ALIGNMENT_BYTES + needed)
        self._counts = memory[:ALIGNMENT_BYTES].view(torch.int64)
        self._counts.zero_()
        self.totals: list[dict[str, Tensor]] = []  # each summed value's memory, int64 [numbers], for each pass
        for one in sizes:
            at, totals = ALIGNMENT_BYTES, dict[str, Tensor]()
            for name, numbers in one.items():
                totals[name] = memory[at : at + BYTES_PER_NUMBER * numbers].view(torch.int64)
                at += _aligned(BYTES_PER_NUMBER * numbers)
            self.totals.append(totals)

    def publish(self) -> None:
        """The executor: what lies here is for the coordinator now."""
        self._counts[0] += 1

    def release(self) -> None:
        """The coordinator: the first sums that were published has been read, or never will be."""
        self._counts[1] += 1

    def wait(self, timeout_s: float) -> None:
        """The executor: until all sums are released. PeerError after `timeout_s`."""
        by_s = time.monotonic() + timeout_s
        while int(self._counts[0]) != int(self._counts[1]):
            if time.monotonic() > by_s:
                raise PeerError(f"coordinator: has not read the last sums for {timeout_s:g} s")
            time.sleep(LOOK_S)


class UpdateReceiver:
    """One way of sending values. The coordinator calls `guard` from any thread, everything else from its own."""

    values: type[SentValues]  # the type of the values that executors send

    def __init__(self, server: Server) -> None:
        self.trips = self.value_bytes = 0  # messages with values so far, and their bytes without headers
        self.shared_bytes = 0  # those of these bytes that are in memory that executors share
        self._server = server

    def guard(self, executor: str, message: AnyMessage) -> None:
        """PeerError for what no executor sends, before its tensors are received."""
        if not isinstance(message, FromExecutor | Heartbeat):
            raise PeerError(f"sent {type(message).__name__} to the coordinator")
        body = message.body if isinstance(message, FromExecutor) else message
        got = message.values if isinstance(message, FromExecutor) else None
        sends = isinstance(body, SumsSent)
        if message.tensors and not sends:
            raise PeerError(f"sent {type(body).__name__} with tensors")
        if not (isinstance(got, self.values) if sends else got is None):
            raise PeerError(f"sent {type(body).__name__} with {'no values' if got is None else type(got).__name__}")

    def hello(self, executor: str) -> AnyMessage | None:
        """Return the first message to an executor that has connected; None for none."""

    def on_states(self, report: StateReport, tensors: Sequence[Tensor]) -> tuple[ToExecutor, list[Tensor]] | None:
        """Read or write states of clients; return the answer. PeerError for what no executor asks for."""
        raise PeerError(f"sent {type(report).__name__}, and keeps states itself")

    def on_report(
        self, executor: str, report: ExecutorReport, values: SentValues | None, tensors: dict[str, Tensor]
    ) -> ExecutorReport:
        """Keep the values. Returns what the machine takes. PeerError for values that cannot be believed: the executor
        is lost."""
        raise NotImplementedError

    def merge(self, executor: str) -> None:
        """Take in what the executor sent last."""
        raise NotImplementedError

    def settle(self) -> None:
        """Read the values that were merged: the memory that they are in may be used again."""

    def ignore(self, executor: str) -> None:
        """Drop it."""
        raise NotImplementedError

    def unmask(self, recovered: TakeMasksOff) -> frozenset[tuple[str, str]]:
        """Take the masks off what was taken in; returns holder and owner of each wrong share. PeerError where others
        do not give back the secrets."""
        raise InternalError(f"round {recovered.phase.round + 1}: no masks are on the sums")


class _ReceivedSums(NamedTuple):
    tensors: Mapping[str, Tensor]
    weights: AggregationWeights
    largest: Mapping[str, float]  # the largest number of each sum, or a bound
    shared_bounds: bool


class SumsReceiver(UpdateReceiver):
    """Sums of executors that have everybody's data: one message per executor and phase."""

    values = SummedValues

    def __init__(self, server: Server, accumulators: Mapping[str, SharedAccumulator] | None = None) -> None:
        """`accumulators` are where executors leave sums."""
        super().__init__(server)
        self._accumulators = accumulators or {}
        self._sums: dict[str, _ReceivedSums] = {}
        self._merged: list[str] = []  # whose rooms are to be given back

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

    def ignore(self, executor: str) -> None:
        if (sums := self._sums.pop(executor, None)) is not None and sums.shared_bounds:
            self._accumulators[executor].release()


SLACK = 2  # an update so many times too large is received, to be refused by name; a larger one ends the connection
SLACK_BYTES = 1 << 16


class SiteUpdateReceiver(UpdateReceiver):
    """`note` gets every update that does not count, with its sender and the reason."""

    values: type[SentValues] = SiteValues

    def __init__(
        self,
        server: Server,
        clients: Mapping[str, int],
        task_spec: Callable[[int], TaskSpec],
        rules: AdmissionRules,
        run: str,
        note: Callable[[str], None],
        *,
        rounds_late: Callable[[str, PhaseId], int | None],
    ) -> None:
        """`clients` are the sites' numbers; `task_spec` says what a client is asked to do; `rounds_late` is the
        coordinator's: late updates are scaled down."""
        super().__init__(server)
        self._clients = clients
        self._offer = task_spec
        self._rules = rules
        self._run = run
        self._note = note
        self._rounds_late = rounds_late
        self._samples: dict[str, int] = {}
        self._updates: dict[str, ClientUpdate] = {}
        self._figures: dict[int, dict[str, Mapping[str, float]]] = {}
        most = max(sum(math.prod(f.shape) * f.dtype.itemsize for f in forms.values()) for forms in server.forms)
        self._most_bytes = SLACK * most + SLACK_BYTES
        self.prepare()

    def prepare(self) -> None:
        """For a subclass."""

    def guard(self, executor: str, message: AnyMessage) -> None:
        super().guard(executor, message)
        size_bytes = sum(h.nbytes for h in message.tensors)
        if size_bytes > self._most_bytes:
            raise PeerError(f"sent {size_bytes} bytes of values, expected at most {self._most_bytes}")

    def hello(self, executor: str) -> AnyMessage | None:
        self._samples.pop(executor, None)  # it has a new connection, on which it joins
        return TaskMessage(run=self._run, task_spec=self._offer(self._clients[executor]))

    def on_report(
        self, executor: str, report: ExecutorReport, values: SentValues | None, tensors: dict[str, Tensor]
    ) -> ExecutorReport:
        if isinstance(report, ExecutorJoined):
            if report.samples is None:
                raise PeerError("joined without its number of samples")
            if executor in self._samples:
                raise PeerError(f"joined again, with {report.samples} samples, on one connection")
            most = self._offer(self._clients[executor]).aggregation.most_samples
            if most is not None and report.samples != most:
                raise PeerError(
                    f"joined with {report.samples} samples, expected {most}: federated.aggregation.most_samples"
                )
            self._samples[executor] = report.samples
            self._note(f"site {executor} takes part with {'' if most is None else 'at most '}{report.samples} samples")
        elif executor not in self._samples:
            raise PeerError(f"sent {type(report).__name__} before it had joined")
        elif isinstance(report, TasksReturned):
            raise PeerError("gave back clients, which no site is asked for")
        elif isinstance(report, SumsSent) and isinstance(values, self.values):
            self.trips += 1
            self.value_bytes += sum(t.nbytes for t in tensors.values())
            return self._keep(executor, report, values, tensors)
        return report

    def _check_of(self, executor: str, sums: SumsSent, client: int, samples: int) -> None:
        """PeerError for an update that is not of the site's client."""
        if [(t.client, t.samples) for t in sums.timed] != [(client, samples)] or sums.refused:
            raise PeerError(f"sent an update that is not of client {client} with {samples} samples")
        keeps, round_ = self._server.keeps, sums.phase.round
        may = {round_} if keeps and self._server.passes == 1 else {round_, NONE} if keeps else {NONE}
        if (state := sums.timed[0].state) not in may:
            raise PeerError(f"sent an update with state {state}, expected {' or '.join(map(str, sorted(may)))}")

    def _keep(self, executor: str, sums: SumsSent, values: SentValues, tensors: dict[str, Tensor]) -> SumsSent:
        """Keep an update that counts. Of one that is refused, the machine learns that."""
        assert isinstance(values, SiteValues), "the frame was checked"
        update = ClientUpdate(values=tensors, weight=values.weight)
        client, samples, phase = self._clients[executor], self._samples[executor], sums.phase
        self._check_of(executor, sums, client, samples)
        late = self._rounds_late(executor, phase)
        if late is not None:
            try:
                steps = self._offer(client).local.steps(samples)
                admitted = self._server.admit(update, samples, self._rules, steps)
            except PeerError as e:
                self._note(f"site {executor}: its update of round {phase.round + 1} is refused: {e}")
                return SumsSent(phase=phase, timed=(), refused=(refusal_of(client, e),))
            self._updates[executor] = staleness_weight(admitted, late)
            if values.figures and not late:
                self._figures.setdefault(phase.round, {})[executor] = values.figures
        return sums

    def merge(self, executor: str) -> None:
        update = self._updates.pop(executor, None)
        if update is not None:
            self._server.partial.fold(self._clients[executor], update, self._samples[executor])

    def take_figures(self, round_: int) -> dict[str, Mapping[str, float]]:
        """Return each site's figures of its own data in the round; those of earlier rounds are forgotten."""
        found = self._figures.pop(round_, {})
        self._figures = {number: figures for number, figures in self._figures.items() if number > round_}
        return found

    def ignore(self, executor: str) -> None:
        self._updates.pop(executor, None)
        self._note(f"site {executor}: sent an update when none was due: it is ignored")
