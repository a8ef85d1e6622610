"""The bodies of a run's frames. A machine emits a body, and the machine that receives the frame takes the same body.

A body names its plan epoch. A body does not name its sender: the receiver knows the sender from the connection.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from isthmus.protocol.draws import Draws
from isthmus.protocol.fingerprints import StepFingerprint
from isthmus.protocol.finite import NonFinite
from isthmus.protocol.recovery import StateHolding
from isthmus.protocol.step_failures import MemoryPeak, MemoryShortage, StepFailure
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

Work = Literal["F", "B", "W", "E"]
"""A task on a micro-batch: forward, backward, the weight gradients where they are apart, an evaluation's forward."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of leased work. Every device does all items, in order.

    `train` is one optimizer step, `eval` a forward-only pass over held-out samples, `save` a checkpoint, `keep` a
    snapshot in the devices' memory.
    `first_sample` is a position in the data order, which the coordinator owns.
    """

    index: Count
    kind: Literal["train", "eval", "save", "keep"]
    step: Count  # train: the step's number, from 0. The others: how many steps came before.
    first_sample: Count = 0
    micro_batches: Count = 0
    first_micro_batch: Count = 0
    """The number in the step of this item's first micro-batch: a replica's item is a part of the whole item."""
    to_store: bool = False  # save: devices that may do so write their parts of the checkpoint to the run's store


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's part of every item: of each step's `of` micro-batches, `count` from number `first` on."""

    first: Count
    count: Count
    of: Count
    micro_batch_size: Count

    def part(self, item: Item) -> Item:
        """Return the replica's part of an item. Its part of a shorter item, an evaluation's, is about as large a
        share."""
        first = self.first * item.micro_batches // self.of
        last = (self.first + self.count) * item.micro_batches // self.of
        return msgspec.structs.replace(
            item,
            first_sample=item.first_sample + first * self.micro_batch_size,
            micro_batches=last - first,
            first_micro_batch=first,
        )


def shares(counts: Sequence[int], micro_batch_size: int) -> tuple[Share, ...]:
    """The parts of replicas with so many micro-batches of each step."""
    starts = itertools.accumulate(counts, initial=0)
    return tuple(
        Share(first=first, count=count, of=sum(counts), micro_batch_size=micro_batch_size)
        for first, count in zip(starts, counts, strict=False)
    )


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, micro-batches, evaluations and checkpoints of a run. Zero turns an `every` off."""

    steps: int
    micro_batches: int
    micro_batch_size: int
    eval_every: int = 0
    eval_micro_batches: int = 0  # whole ones
    eval_rest: int = 0  # samples of an evaluation beyond whole micro-batches
    save_every: int = 0
    lease_ahead: int = 3
    """Items that a device may know of before it finishes the first of them: the coordinator is never waited for."""
    start_step: int = 0
    eval_due: bool = False  # whether the evaluation of the start step is still to be made
    non_finite_steps: int = 0
    """Consecutive steps with numbers that are not finite after which the run ends; 0: it never ends for that."""
    recovery_attempts: int = 0
    """Attempts to go on after losses, with no step done in between, after which the run ends; 0: it never gives up."""

    @property
    def evaluated_micro_batches(self) -> int:
        """Micro-batches of an evaluation, the two of its rest included."""
        return self.eval_micro_batches + (2 if self.eval_rest else 0)

    def eval_weight(self, item: Item) -> float:
        """The factor of an evaluation item's sums in those of the whole evaluation. That of the copies alone takes off
        the copies that filled the item before."""
        of_copies = item.first_sample // self.micro_batch_size == self.eval_micro_batches + 1
        return self.eval_rest / self.micro_batch_size - 1.0 if self.eval_rest and of_copies else 1.0


def items(spec: RunSpec, *, due: bool = False) -> Iterator[Item]:
    """The run's items. An evaluation is split so that no item has more micro-batches than a training step. Its rest is
    two items: a micro-batch that copies of the first sample fill up, and one of such copies alone, whose share is taken
    off again.

    `due` begins with what comes after the step before the first one.
    """
    count = itertools.count()
    if due and spec.start_step:
        yield from _after(spec.start_step, spec, count)
    batch = spec.micro_batches * spec.micro_batch_size
    for step in range(spec.start_step, spec.steps):
        yield Item(
            index=next(count), kind="train", step=step, first_sample=step * batch, micro_batches=spec.micro_batches
        )
        yield from _after(step + 1, spec, count)


def _after(done: int, spec: RunSpec, count: Iterator[int]) -> Iterator[Item]:
    """Yield the items that are due after so many steps."""
    last = done == spec.steps
    if spec.eval_every and (done % spec.eval_every == 0 or last):
        whole, most = spec.eval_micro_batches, spec.micro_batches
        parts = [(start, min(most, whole - start)) for start in range(0, whole, most)]
        for start, size in parts + ([(whole, 1), (whole + 1, 1)] if spec.eval_rest else []):
            first = start * spec.micro_batch_size
            yield Item(index=next(count), kind="eval", step=done, first_sample=first, micro_batches=size)
    if last or (spec.save_every and done % spec.save_every == 0):
        yield Item(index=next(count), kind="save", step=done)


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
    sha256: Id = ""
    """Digest of the tensor's bytes in the file, in hexadecimal digits; empty of a pretrained model in a store."""
    offset: Amount = 0  # of its first byte in a store's file


class WeightFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a pretrained model, or of a checkpoint in a store."""

    model: Text  # a folder, an id of the hub or a URL, as the job has it; of a checkpoint the URL of the run's store
    commit: Name = ""  # of the hub; empty of others
    file: Text  # its path in the folder or repository
    size: Amount = 0  # of a store's file, in bytes
    version: Name = ""  # of a store's file: what the store says of its contents
    tensors: Many[FileTensor]


class PlaceWeights(Body, frozen=True, kw_only=True):
    """The weights of the stage follow, except the parts in `own`, which the device has in memory, those that it
    gets from `donors`, those that it reads from `files`, as far as it has them, and those that it draws."""

    own: Distinct[Text] = frozenset()
    donors: Table[Name, Distinct[Text]] = msgspec.field(default_factory=dict[str, frozenset[str]])
    files: Many[WeightFile] = ()
    drawn: Draws | None = None


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


class WrittenPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a checkpoint that a device wrote to the run's store."""

    file: WeightFile
    sha256: Id  # of the whole file, in hexadecimal digits


class ItemReported(Body, frozen=True, kw_only=True):
    """The device finished an item. `loss` and `count` are sums over the item's micro-batches, from the loss's stage.
    With a save comes the stage's part of the checkpoint, unless it is in the store."""

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
    written: WrittenPart | None = None  # with a save: the stage's part, where the device wrote it to the store
    doubt: Text = ""  # of the coordinator's host, whatever a device says: why `written` is not true
    unwritten: Text = ""  # with a save: why the part comes with the report, and is not in the store


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
    """The device cannot read or draw these tensors itself: they are to follow. For the run's host: the machine takes
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
