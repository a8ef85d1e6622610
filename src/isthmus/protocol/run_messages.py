"""The bodies of a run's frames. A machine emits a body, and the machine that receives the frame takes the same body.

A body names its plan epoch. A body does not name its sender: the receiver knows the sender from the connection.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from isthmus.protocol.failures import StepFailure
from isthmus.protocol.fingerprints import StepFingerprint
from isthmus.protocol.finite import NonFinite
from isthmus.protocol.memory_shortage import MemoryPeak, MemoryShortage
from isthmus.protocol.recovery import StateHolding
from isthmus.protocol.work import Item
from isthmus.session.program import Event
from isthmus.trace import Span
from isthmus.wire_types import (
    Amount,
    Count,
    CountOrNone,
    Distinct,
    Id,
    Many,
    Name,
    NotNegative,
    Place,
    Seconds,
    Shape,
    Table,
    Text,
)

Parcel = Literal["forward", "backward", "shared", "shared_gradient", "count", "norms"]
"""The data that one stage sends another: activations and gradients per micro-batch; per item the value of a shared
parameter, its gradient, the number of items that a summed loss counts, and the gradient norms for clipping."""


class Body(Event, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One frame of a run."""


# Between two stages


class Arrived(Body, frozen=True, kw_only=True):
    """A parcel from stage `source`: FusionLLM's OP-Data, the tensors of one edge, one direction, one micro-batch."""

    parcel: Parcel
    source: Place
    item: Count
    micro_batch: CountOrNone = -1
    number: NotNegative = 0.0  # the value of a `count` parcel
    finite: bool = True  # whether the sender's loss and gradients are finite; used by `norms`


class PartsArrived(Body, frozen=True, kw_only=True):
    """Worker `source` sends a stretch of the buffer, as one tensor, in a round of a group's sum."""

    group: Place
    round: Place
    source: Place
    item: Count


# Coordinator to device


class Pause(Body, frozen=True, kw_only=True):
    """Close the stage and list the states in memory. The epoch is the new one."""


class TakeState(Body, frozen=True, kw_only=True):
    """Get these parts of the state that the stage begins from from other devices."""

    donors: Table[Name, Distinct[Text]]


class FileTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variable that a tensor of a file is."""

    name: Text
    key: Text  # its name in the file
    dtype: Id  # of the tensor in the file
    shape: Shape
    cast: Id = ""  # the variable's type, where it is another
    sha256: Id = ""  # of the tensor's bytes in the file, in hexadecimal digits; empty in a store
    offset: Amount = 0  # of its first byte in a store's file


class WeightFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a pretrained model."""

    model: Text  # a folder, an id of the hub or a URL, as the job has it
    commit: Name = ""  # of the hub; empty of others
    file: Text  # its path in the folder or repository
    size: Amount = 0  # of a store's file, in bytes
    version: Name = ""  # of a store's file: what the store says of its contents
    tensors: Many[FileTensor]


class PlaceWeights(Body, frozen=True, kw_only=True):
    """The weights of the stage follow, except the parts in `own`, which the device has in memory, those that it
    gets from `donors`, and those that it reads from `files`, as far as it has them."""

    own: Distinct[Text] = frozenset()
    donors: Table[Name, Distinct[Text]] = msgspec.field(default_factory=dict[str, frozenset[str]])
    files: Many[WeightFile] = ()


class WeightExchange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exchange with other trainers of the same weights at a training step: before it the devices add the amounts that
    come with it, and report the weights that are asked for."""

    rate_step: Count  # the learning rate is that of this step of training
    wanted: Many[Text] = ()  # parameters, by the module's own names


class OpenItem(Body, frozen=True, kw_only=True):
    """The coordinator leases an item to every device. With an exchange come amounts, by the names of parameters."""

    item: Item
    exchange: WeightExchange | None = None


class GiveState(Body, frozen=True, kw_only=True):
    """Give these devices parts of the state after `step` steps when they ask, in this epoch: besides what the device is
    to give already."""

    step: Count
    receivers: Table[Name, Distinct[Text]]


class RetireSnapshots(Body, frozen=True, kw_only=True):
    """The snapshot of this step is complete, with its copies: forget older snapshots."""

    step: Count


class SendState(Body, frozen=True, kw_only=True):
    """Give joining devices these parts of the state after `step` steps, which the device has not passed yet, and each
    later step's gradients, in the background. No parts: give no more."""

    number: Count  # the number of the state transfer in the run
    step: Count
    parts: Distinct[Text]
    receivers: Distinct[Name] = frozenset()


class Halt(Body, frozen=True, kw_only=True):
    """The run is over for this device."""


DeviceOrder = Pause | PlaceWeights | TakeState | GiveState | SendState  # to one device
RunOrder = OpenItem | RetireSnapshots | Halt  # to every device of the run


# Device to coordinator


class PeerPath(msgspec.Struct, frozen=True, kw_only=True):
    """How a device got to another one."""

    device: Name
    relayed: bool
    latency_s: Seconds | None  # one way, as the kernel sees it; of a relayed one, as far as the coordinator
    streams: Place = 1
    bbr: bool = False  # whether this end sends by it


class DeviceReady(Body, frozen=True, kw_only=True):
    """The stage, its weights and its links are in place. `paths`: to those devices that this one has dialled."""

    paths: Many[PeerPath] = ()
    notes: Many[Annotated[str, msgspec.Meta(max_length=400)]] = ()  # for people: how the stage computes


class ItemReported(Body, frozen=True, kw_only=True):
    """The device finished an item. `loss` and `count` are sums over the item's micro-batches, from the loss's stage.
    With a save comes the stage's part of the checkpoint."""

    item: Count
    loss: float | None = None
    count: NotNegative | None = None
    metrics: Many[float] = ()
    """The sum and count of each metric of an evaluation, one after another, from the loss's stage."""
    spans: Many[Span] = ()
    late_s: Seconds = 0.0  # emulation only: by how much this item's tasklets overran their emulated durations, in sum
    non_finite: NonFinite | None = None  # the first place on this device where the item's numbers were not finite
    peak: MemoryPeak | None = None  # with a save: of the stage so far
    fingerprints: Many[StepFingerprint] = ()
    """Fingerprints of this step or earlier ones, as far as they are hashed; with a save, of all steps before it."""


class DeviceFailed(Body, frozen=True, kw_only=True):
    """The device cannot go on with its stage."""

    reason: Text
    fault: Literal["user", "device", "other"]
    """The fault is the job's, this device's, or another device's, which fell silent or sent what is wrong."""
    failure: StepFailure | None = None
    """An error of a step by the job's model or data, or for want of memory: the device can go on with another stage, or
    try again."""
    shortage: MemoryShortage | None = None  # memory that the device lacked, if it lacked memory
    starts_again: bool = False  # whether a new process of the device may do better: as after an error of a driver


class Inventory(Body, frozen=True, kw_only=True):
    """The device has closed its stage, and holds these states in memory."""

    holdings: Many[StateHolding]


class StateMissing(Body, frozen=True, kw_only=True):
    """A donor does not give the device these parts of the state that its stage begins from."""

    donor: Name
    parts: Distinct[Text]
    reason: Text


class SnapshotCopied(Body, frozen=True, kw_only=True):
    """The device holds a copy of another one's part of a snapshot."""

    of: Name
    step: Count


class StateReceived(Body, frozen=True, kw_only=True):
    """A joining device has the state of another device's parts, as it is after `step` steps."""

    number: Count  # the number of the state transfer in the run
    of: Name
    step: Count


class TransferEnded(Body, frozen=True, kw_only=True):
    """The device sends no more, as its steps are quicker than what it sends of them; or it takes no more."""

    number: Count


class WeightsRead(Body, frozen=True, kw_only=True):
    """A training step begins: with it come those of the stage's weights that its exchange wanted. For the run's host:
    the machine takes no notice."""

    item: Count


class WeightsLacked(Body, frozen=True, kw_only=True):
    """The device does not have these tensors of files itself: they are to follow. For the run's host: the machine takes
    no notice."""

    names: Many[Text]
    reason: Text


DeviceReport = (
    DeviceReady
    | ItemReported
    | DeviceFailed
    | Inventory
    | StateMissing
    | SnapshotCopied
    | StateReceived
    | TransferEnded
)
