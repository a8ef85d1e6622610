"""The coordinator's driver: carries out a `Coordinator` machine's instructions over real connections."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol

import msgspec
from torch import Tensor

from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.events import (
    Advance,
    Assign,
    Commit,
    CoordinatorEvent,
    CoordinatorInstruction,
    Finish,
    Halt,
    Interrupted,
    Joined,
    Lost,
    Open,
    Place,
    Ready,
    Reported,
)
from isthmus.protocol.work import Item
from isthmus.runtime.assignment import Assignment
from isthmus.runtime.channel import SocketChannel
from isthmus.runtime.lanes import SendLane
from isthmus.runtime.messages import (
    AnyMessage,
    AssignMessage,
    Failed,
    HaltMessage,
    Heartbeat,
    Join,
    OpenMessage,
    ReadyMessage,
    ReportMessage,
    Weights,
)
from isthmus.trace import Span
from isthmus.training.layout import header_of


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, and what it left."""

    outcome: Literal["done", "interrupted", "lost"]
    reason: str
    spans: tuple[Span, ...]
    """Times count from the first item's opening."""
    late_s: Mapping[str, float]
    """Per device, by how much real computing overran its emulated duration."""
    failure: IsthmusError | None = None


class Script(Protocol):
    """What a run does besides conducting: assignments, weights, checkpoints, progress."""

    def assignments(self, addresses: Mapping[str, tuple[str, int]]) -> Mapping[str, Assignment]: ...

    def weights(self, device: str) -> Mapping[str, Tensor]: ...

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        """Every device has finished the item; `spans` are those reported since the last call."""
        ...

    def saved(self, item: Item, device: str, state: Mapping[str, Tensor]) -> None:
        """A device's part of a checkpoint is here."""
        ...

    def commit(self, item: Item) -> None:
        """All parts are here."""
        ...


_Heard = CoordinatorEvent | tuple[str, AnyMessage, list[Tensor]] | tuple[str, Exception | None]


class Conductor:
    """Listens, admits the run's devices, and runs the machine in the thread that calls `conduct`."""

    def __init__(self, machine: Coordinator, run: str, script: Script, *, host: str, patience_s: float) -> None:
        self.machine = machine
        self._run = run
        self._script = script
        self._patience_s = patience_s
        self._listener = socket.create_server((host, 0), backlog=len(machine.devices) + 8)
        self.port: int = self._listener.getsockname()[1]
        self._heard: queue.SimpleQueue[_Heard] = queue.SimpleQueue()
        self._lanes: dict[str, SendLane] = {}
        self._channels: dict[str, SocketChannel] = {}
        self._addresses: dict[str, tuple[str, int]] = {}
        self._items: dict[int, Item] = {}
        self._fresh: list[Span] = []
        self._spans: list[Span] = []
        self._late_s: dict[str, float] = {}
        self._origin_s = 0.0
        self._failure: IsthmusError | None = None
        self._assigned: Mapping[str, Assignment] = {}
        threading.Thread(target=self._admit, name="admit", daemon=True).start()

    def conduct(self, watch: Callable[[], str | None] = lambda: None) -> Outcome:
        """Run to the end. `watch` is asked every second for the name of a device whose process has died.

        The first Ctrl-C finishes what is leased, saves and ends; a second one ends at once.
        """
        with self._interruptible():
            finish = self._loop(watch)
        self._close()
        return Outcome(
            outcome=finish.outcome, reason=finish.reason, spans=tuple(self._spans),
            late_s=self._late_s, failure=self._failure,
        )  # fmt: skip

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C becomes an event; a second one raises."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGINT)

        def interrupt(*_: object) -> None:
            signal.signal(signal.SIGINT, previous)
            self._heard.put(Interrupted())

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _loop(self, watch: Callable[[], str | None]) -> Finish:
        finish: Finish | None = None
        last_beat_s = 0.0
        joining_until_s = time.monotonic() + self._patience_s
        while finish is None:
            events: list[CoordinatorEvent] = []
            with contextlib.suppress(queue.Empty):
                events += self._translate(self._heard.get(timeout=1.0))
            now_s = time.monotonic()
            if now_s - last_beat_s > self._patience_s / 4:
                last_beat_s = now_s
                for lane in self._lanes.values():
                    lane.put(Heartbeat(run=self._run))
            missing = set(self.machine.devices) - self._lanes.keys()
            if missing and now_s > joining_until_s:
                events.append(Lost(device=min(missing), reason=f"did not join within {self._patience_s:g} s"))
            if (dead := watch()) is not None and self._heard.empty():
                events.append(Lost(device=dead, reason="its process ended"))
            for event in events:
                for instruction in self.machine.handle(event):
                    finish = self._carry_out(instruction) or finish
        return finish

    def _admit(self) -> None:
        """Accept devices until the listener closes. Whoever does not name the run is shut out."""
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            channel = SocketChannel(connection, f"{address[0]}:{address[1]}", self._patience_s)
            threading.Thread(target=self._listen, args=(channel,), name=f"receive {channel.other}", daemon=True).start()

    def _listen(self, channel: SocketChannel) -> None:
        try:
            first = channel.receive(lambda m: self._only_join(m), idle_s=self._patience_s)
            if first is None:
                return
            join = first[0]
            assert isinstance(join, Join)
            device = join.device
        except Exception:
            channel.close()  # a stranger: nothing of the run has changed
            return
        channel.other = f"device {device!r}"
        self._channels[device] = channel
        self._heard.put((device, join, []))
        try:
            while (received := channel.receive(self._of_this_run, idle_s=self._patience_s)) is not None:
                self._heard.put((device, *received))
            self._heard.put((device, None))
        except Exception as e:  # the conducting thread decides
            self._heard.put((device, e))

    def _only_join(self, message: AnyMessage) -> None:
        taken = isinstance(message, Join) and message.device in self._channels
        if not isinstance(message, Join) or message.tensors or message.device not in self.machine.devices or taken:
            raise PeerError(f"{type(message).__name__} from a stranger")
        self._of_this_run(message)

    def _of_this_run(self, message: AnyMessage) -> None:
        if message.run != self._run:
            raise PeerError(f"a frame of run {message.run!r} arrived, expected {self._run!r}")

    def _translate(self, heard: _Heard) -> list[CoordinatorEvent]:
        """What a device sent, as events for the machine."""
        if not isinstance(heard, tuple):
            return [heard]
        if len(heard) == 2:
            device, error = heard
            return [Lost(device=device, reason=str(error or "its connection closed"))]
        device, message, tensors = heard
        match message:
            case Join():
                self._lanes[device] = SendLane(self._channels[device], patience_s=self._patience_s)
                self._addresses[device] = (message.host, message.port)
                return [Joined(device=device)]
            case ReadyMessage():
                return [Ready(device=device)]
            case ReportMessage():
                return [self._reported(device, message, tensors)]
            case Failed():
                family = UserError if message.user_error else PeerError
                self._failure = family(f"device {device!r}: {message.reason}")
                return [Lost(device=device, reason=message.reason)]
            case _:
                return []

    def _reported(self, device: str, message: ReportMessage, tensors: list[Tensor]) -> Reported:
        self._fresh += [self._localise(span) for span in message.spans]
        self._late_s[device] = self._late_s.get(device, 0.0) + message.late_s
        item = self._items[message.item]
        if item.kind == "save":
            self._script.saved(item, device, {h.name: t for h, t in zip(message.tensors, tensors, strict=True)})
        return Reported(device=device, item=message.item, loss=message.loss, count=message.count)

    def _localise(self, span: Span) -> Span:
        """A device speaks of items and of the machine's clock; a trace of steps and of the run's."""
        item = self._items.get(span.step)
        return msgspec.structs.replace(
            span, step=item.step if item is not None else -1,
            start_s=span.start_s - self._origin_s, end_s=span.end_s - self._origin_s,
        )  # fmt: skip

    def _carry_out(self, instruction: CoordinatorInstruction) -> Finish | None:
        match instruction:
            case Assign(device=device):
                if not self._assigned:
                    self._assigned = self._script.assignments(self._addresses)
                self._lanes[device].put(AssignMessage(run=self._run, assignment=self._assigned[device]))
            case Place(device=device):
                weights = self._script.weights(device)
                headers = tuple(header_of(name, t) for name, t in weights.items())
                self._lanes[device].put(Weights(run=self._run, tensors=headers), list(weights.values()))
            case Open(item=item):
                self._origin_s = self._origin_s or time.monotonic()
                self._items[item.index] = item
                for lane in self._lanes.values():
                    lane.put(OpenMessage(run=self._run, item=item))
            case Advance(item=item, loss=loss):
                fresh, self._fresh = self._fresh, []
                self._spans += fresh
                self._script.advanced(item, loss, tuple(fresh))
            case Commit(item=item):
                self._script.commit(item)
            case Halt():
                for lane in self._lanes.values():
                    lane.put(HaltMessage(run=self._run))
            case Finish():
                return instruction
        return None

    def _close(self) -> None:
        self._listener.close()
        for lane in self._lanes.values():
            lane.close()
        for channel in self._channels.values():
            channel.close()
