"""Messages of a run, between its devices and with their coordinator."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from isthmus.protocol.attempts import StepFailure
from isthmus.protocol.events import Parcel
from isthmus.protocol.finite import NonFinite
from isthmus.protocol.memory_shortage import MemoryPeak, MemoryShortage
from isthmus.protocol.recovery import StateHolding
from isthmus.protocol.run_messages import DeviceOrder, RunOrder
from isthmus.runtime.messages.assignment import Assignment
from isthmus.runtime.messages.message import Message
from isthmus.trace import Span

# Between two devices


class Hello(Message, frozen=True, kw_only=True):
    """First on a new link: which stage dials, in which epoch."""

    stage: int


class ParcelMessage(Message, frozen=True, kw_only=True):
    """FusionLLM's OP-Data: the tensors of one edge, one direction, one micro-batch."""

    parcel: Parcel
    source: int
    item: int
    micro_batch: int = -1
    number: float = 0.0
    """The value of a `count` parcel."""
    finite: bool = True
    """Of `norms`: whether the sender's loss and gradients are."""


class PartsMessage(Message, frozen=True, kw_only=True):
    """In one round of a group's sum: a stretch of the buffer, as one tensor."""

    group: int
    round: int
    source: int
    item: int


class Credit(Message, frozen=True, kw_only=True):
    """The receiver has taken this many bytes out of its buffers: the sender may send as many more."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


# Device to coordinator


class JoinRun(Message, frozen=True, kw_only=True):
    """First on a connection for a run: which device this is, and where it listens for others."""

    device: str
    host: str
    port: int
    holdings: tuple[StateHolding, ...] = ()
    """Of one that was here before: what it still has in memory."""


class PeerPath(msgspec.Struct, frozen=True, kw_only=True):
    """How a device got to another one."""

    device: str
    relayed: bool
    latency_s: float | None
    """One way, as the kernel sees it; of a relayed one, as far as the coordinator."""
    streams: int = 1
    bbr: bool = False
    """Whether this end sends by it."""


class ReadyMessage(Message, frozen=True, kw_only=True):
    """The stage, its weights and its links are in place. `paths`: to those devices that this one has dialled."""

    paths: tuple[PeerPath, ...] = ()
    notes: tuple[Annotated[str, msgspec.Meta(max_length=400)], ...] = ()
    """For people: how the stage computes."""


class ReportMessage(Message, frozen=True, kw_only=True):
    """An item is done on this device; for a save, the tensors are the stage's part of the checkpoint."""

    item: int
    loss: float | None = None
    count: float | None = None
    spans: tuple[Span, ...] = ()
    late_s: float = 0.0
    """Emulation only: by how much this item's tasklets overran their emulated durations, in sum."""
    non_finite: NonFinite | None = None
    """The first place on this device where the item's numbers were not finite."""
    peak: MemoryPeak | None = None
    """With a save: of the stage so far."""


class Failed(Message, frozen=True, kw_only=True):
    """The device cannot go on."""

    reason: str
    fault: Literal["user", "device", "other"]
    """Whose: the job's, this device's, or another device's, which fell silent or sent what is wrong."""
    failure: StepFailure | None = None
    """Of a step, by the job's model or data, or for want of memory: the device can go on with another stage, or try
    again."""
    shortage: MemoryShortage | None = None
    """What the device lacked, if that was memory."""
    starts_again: bool = False
    """Whether a new process of the device may do better: as after an error of a driver."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Both ways: still here."""


# Coordinator to device


class ToDevice(Message, frozen=True, kw_only=True):
    """With `PlaceWeights` come values of the stage's variables and optimizer state, by the module's own names."""

    body: DeviceOrder | RunOrder


class AssignMessage(Message, frozen=True, kw_only=True):
    assignment: Assignment


RunMessage = (
    Hello
    | ParcelMessage
    | PartsMessage
    | Credit
    | JoinRun
    | ReadyMessage
    | ReportMessage
    | Failed
    | Heartbeat
    | AssignMessage
    | ToDevice
)
