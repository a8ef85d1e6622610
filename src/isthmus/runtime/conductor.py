"""The coordinator's driver: carries out a `Coordinator` machine's instructions over real connections."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
from torch import Tensor

from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.coordinator_events import (
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
from isthmus.runtime.interrupting import interruptible
from isthmus.runtime.lanes import SendLane
from isthmus.runtime.losses import Losses
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
from isthmus.runtime.reception import Heard, Reception
from isthmus.trace import Span
from isthmus.training.layout import TensorHeader, header_of

TICK_S = 0.25
"""How often to look whether everybody is still there."""
MOST_SPANS = 500_000
"""What is kept of a trace: days of training would not fit in memory."""
LATE_ITEMS = 64
"""Spans of an item may come with a later item's report, at most this many later."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, and what it left."""

    outcome: Literal["done", "interrupted", "lost"]
    reason: str
    spans: tuple[Span, ...]
    """Times count from the first item's opening. Of a long run, the first `MOST_SPANS`."""
    elapsed_s: float
    """Since the first item's opening; 0 when there was none."""
    late_s: Mapping[str, float]
    """Per device, by how much real computing overran its emulated duration."""
    failure: IsthmusError | None = None
    """Set when a device was lost."""


class Address(NamedTuple):
    """Where a device listens for others, and the id of its key, empty where connections are plain TCP."""

    host: str
    port: int
    id: str = ""


class Script(Protocol):
    """What a run does besides conducting: assignments, weights, checkpoints, progress."""

    def assignments(self, addresses: Mapping[str, Address]) -> Mapping[str, Assignment]: ...

    def weights(self, device: str) -> Mapping[str, Tensor]: ...

    def check_state(self, device: str, tensors: Sequence[TensorHeader]) -> None:
        """Before they are received: PeerError unless they are the device's part of a checkpoint. Any thread."""
        ...

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        """Every device has finished the item; `spans` are those reported since the last call."""
        ...

    def saved(self, item: Item, device: str, state: Mapping[str, Tensor]) -> None:
        """A device's part of a checkpoint is here."""
        ...

    def commit(self, item: Item) -> None:
        """All parts are here."""
        ...


class Conductor:
    """Runs the machine in the thread that calls `conduct`, over the connections that its reception is given."""

    def __init__(self, machine: Coordinator, run: str, script: Script, *, patience_s: float) -> None:
        self.machine = machine
        self._run = run
        self._script = script
        self._patience_s = patience_s
        self._heard: queue.SimpleQueue[Heard | Interrupted] = queue.SimpleQueue()
        self._over = threading.Event()
        self._lanes: dict[str, SendLane] = {}
        self._addresses: dict[str, Address] = {}
        self._items: dict[int, Item] = {}
        self._reports: dict[str, int] = dict.fromkeys(machine.devices, 0)
        self._fresh: list[Span] = []
        self._spans: list[Span] = []
        self._late_s: dict[str, float] = {}
        self._origin_s = 0.0
        self._failure: IsthmusError | None = None
        self._assigned: Mapping[str, Assignment] = {}
        self.reception = Reception(
            run, machine.devices, heard=self._heard.put, guard=self._guard, patience_s=patience_s
        )
        """Takes the devices' connections."""

    def conduct(self, ended: Callable[[], Mapping[str, str]] = dict) -> Outcome:
        """Run to the end. `ended` tells of which devices the process has ended, and how.

        The first Ctrl-C finishes what is leased, saves and ends; a second one ends at once.
        """
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            with interruptible(lambda: self._heard.put(Interrupted())):
                finish = self._loop(Losses(ended))
            ended_s = time.monotonic()
            for lane in self._lanes.values():
                lane.close()
        finally:
            self._over.set()
            self.reception.close()
        return Outcome(
            outcome=finish.outcome, reason=str(self._failure or finish.reason), failure=self._failure,
            spans=tuple(self._spans), late_s=self._late_s, elapsed_s=ended_s - (self._origin_s or ended_s),
        )  # fmt: skip

    def _beat(self) -> None:
        """In a thread of its own: a hook or a slow disk may hold up the conducting one for long."""
        while not self._over.wait(self._patience_s / 4):
            for lane in list(self._lanes.values()):
                lane.put(Heartbeat(run=self._run))

    def _loop(self, losses: Losses) -> Finish:
        finish: Finish | None = None
        looked_s, joining_until_s = 0.0, time.monotonic() + self._patience_s
        while finish is None:
            events: list[CoordinatorEvent] = []
            with contextlib.suppress(queue.Empty):
                events += self._translate(self._heard.get(timeout=TICK_S), losses)
            now_s = time.monotonic()
            if losses.certain or now_s - looked_s >= TICK_S:
                looked_s = now_s
                missing = set(self.machine.devices) - self._lanes.keys()
                if missing and now_s > joining_until_s:
                    losses.vanished(min(missing), f"it did not join within {self._patience_s:g} s")
                if (verdict := losses.verdict(now_s)) is not None:
                    device, self._failure = verdict
                    events.append(Lost(device=device, reason=str(self._failure)))
            for event in events:
                for instruction in self.machine.handle(event):
                    finish = self._carry_out(instruction) or finish
        return finish

    def _guard(self, device: str, message: AnyMessage) -> None:
        """Refuse what no device sends, before its tensors are received. Any thread."""
        if not isinstance(message, ReadyMessage | ReportMessage | Failed | Heartbeat):
            raise PeerError(f"sent {type(message).__name__} to the coordinator")
        if isinstance(message, ReportMessage) and (item := self._items.get(message.item)) and item.kind == "save":
            self._script.check_state(device, message.tensors)
        elif message.tensors:
            raise PeerError(f"sent {type(message).__name__} with tensors")

    def _translate(self, heard: Heard | Interrupted, losses: Losses) -> list[CoordinatorEvent]:
        """What a device sent, as events for the machine."""
        if isinstance(heard, Interrupted):
            return [heard]
        device, message, tensors = heard
        match message:
            case None:
                losses.vanished(device, "its connection closed")
            case Exception():
                losses.vanished(device, str(message).removeprefix(f"device {device!r}: "))
            case Join():
                channel = self.reception.channel(device)
                self._lanes[device] = SendLane(channel, patience_s=self._patience_s)
                party = channel.party.id if channel.party is not None else ""
                self._addresses[device] = Address(message.host, message.port, party)
                return [Joined(device=device)]
            case ReadyMessage():
                return [Ready(device=device)]
            case ReportMessage():
                if message.item != self._reports[device] or message.item not in self._items:
                    expected = self._reports[device]
                    losses.told(device, PeerError(f"device {device!r}: reported item {message.item}, not {expected}"))
                    return []
                return [self._reported(device, message, tensors)]
            case Failed(fault="other"):
                losses.blames(device, message.reason)
            case Failed():
                family = UserError if message.fault == "user" else PeerError
                losses.told(device, family(f"device {device!r}: {message.reason}"))
            case _:
                pass
        return []

    def _reported(self, device: str, message: ReportMessage, tensors: list[Tensor]) -> Reported:
        self._reports[device] = message.item + 1
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
                self._items.pop(item.index - LATE_ITEMS - self.machine.spec.lease_ahead, None)
                for lane in self._lanes.values():
                    lane.put(OpenMessage(run=self._run, item=item))
            case Advance(item=item, loss=loss):
                fresh, self._fresh = self._fresh, []
                if len(self._spans) < MOST_SPANS:
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
