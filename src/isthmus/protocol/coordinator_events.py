"""What happens to a coordinator (events) and what it asks for (instructions)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.protocol.attempts import StepFailure
from isthmus.protocol.events import Event
from isthmus.protocol.finite import NonFinite
from isthmus.protocol.recovery import Holding, Layout
from isthmus.protocol.work import Item

# To the coordinator


class Joined(Event, frozen=True, kw_only=True):
    device: str
    holdings: tuple[Holding, ...] = ()
    """Of one that was here before: what it still has in memory."""


class Ready(Event, frozen=True, kw_only=True):
    """The device holds its stage, its weights and its links."""

    device: str


class Reported(Event, frozen=True, kw_only=True):
    """A device finished an item. `loss` and `count` are sums over the item's micro-batches, from the loss's stage."""

    device: str
    item: int
    loss: float | None = None
    count: float | None = None
    non_finite: NonFinite | None = None
    """The first place on this device where the item's numbers were not finite."""


class StepFailed(Event, frozen=True, kw_only=True):
    """The job's model or data raised on the device, or memory was short; it is there still and holds what it held."""

    device: str
    failure: StepFailure


class Lost(Event, frozen=True, kw_only=True):
    device: str
    reason: str
    seats: tuple[str, ...] = ()
    """Of its further stages: they are lost with it."""
    returns: bool = False
    """Whether its machine is there, so that it will be offered again."""


class Interrupted(Event, frozen=True, kw_only=True):
    """The user wants to stop: finish what is leased, save, leave."""


class Held(Event, frozen=True, kw_only=True):
    """The device has stopped, and says what it holds."""

    device: str
    holdings: tuple[Holding, ...]


class Planned(Event, frozen=True, kw_only=True):
    """The plan that was asked for. Of one that need not be: whether it is worth the change."""

    layout: Layout
    pays: bool = True


class NoPlan(Event, frozen=True, kw_only=True):
    """There is none for these devices."""

    reason: str


class Fetched(Event, frozen=True, kw_only=True):
    """What the device was to give is here."""

    device: str


class Mirrored(Event, frozen=True, kw_only=True):
    """The device holds a copy of another one's part of a snapshot."""

    device: str
    of: str
    step: int


class Followed(Event, frozen=True, kw_only=True):
    """A newcomer has what another device lends it, as it is after `step` steps."""

    device: str
    of: str
    step: int
    number: int
    """Of the following."""


class FollowingEnded(Event, frozen=True, kw_only=True):
    """The device lends no more: its steps are quicker than what it sends of them."""

    device: str
    number: int


class Offered(Event, frozen=True, kw_only=True):
    """The device could work, if a plan wants it."""

    device: str


class Leaving(Event, frozen=True, kw_only=True):
    """The device is to leave without loss."""

    device: str


class Changed(Event, frozen=True, kw_only=True):
    """Devices or links are not as the plan assumed."""


# From the coordinator


class Assign(msgspec.Struct, frozen=True):
    """Give the device its stage."""

    device: str


class Place(msgspec.Struct, frozen=True):
    """Give the device its weights."""

    device: str
    own: frozenset[str] = frozenset()
    """Parts that it takes from its own memory."""


class Open(msgspec.Struct, frozen=True):
    """Lease the item to every device."""

    item: Item


class Advance(msgspec.Struct, frozen=True):
    """Every device finished the item. `loss` is its mean, if the item has one."""

    item: Item
    loss: float | None = None
    remark: str = ""
    """What a person may want to know of it."""


class Commit(msgspec.Struct, frozen=True):
    """All parts of the checkpoint are written: make it the latest."""

    item: Item
    finite: bool = True
    """Whether its weights are."""


class Hold(msgspec.Struct, frozen=True):
    """Tell the device to stop where it is, to forget its stage, and to say what it holds."""

    device: str


class Fence(msgspec.Struct, frozen=True):
    """Hang up on a device that was lost. Whatever it says later is of an epoch that is over."""

    device: str


class MakePlan(msgspec.Struct, frozen=True):
    """Plan for these devices, beside all else, and say `Planned` or `NoPlan`."""

    devices: tuple[str, ...]
    must: bool = True
    """The run cannot go on without; else: only if it pays."""
    waits: bool = False
    """Nobody is at work until it is there."""


class Recall(msgspec.Struct, frozen=True):
    """Too few devices were left; with these the run is begun anew from its newest state."""

    devices: tuple[str, ...]
    count: int
    most: int
    reasons: str
    """Why devices were lost."""


class Call(msgspec.Struct, frozen=True):
    """The plan wants a device that was offered: have it join."""

    device: str


class Begin(msgspec.Struct, frozen=True):
    """A new epoch goes on from the state after `step` steps. To be on record before anything of it happens."""

    epoch: int
    step: int
    first_item: int
    """Index of the first item that it leases."""
    from_checkpoint: bool
    """Nobody holds that state: it is the last checkpoint's."""


class Fetch(msgspec.Struct, frozen=True):
    """Have the device give these parts of its state after `step` steps."""

    device: str
    step: int
    parts: frozenset[str]


class Follow(msgspec.Struct, frozen=True):
    """Have a newcomer get the state of these devices' lent parts after `step` steps, and repeat what they do then."""

    device: str
    number: int
    """Of the following, among the run's."""
    step: int
    lent: Mapping[str, frozenset[str]]
    """By device."""


class Lend(msgspec.Struct, frozen=True):
    """Have the device give these parts of its state after `step` steps, which it has not gone beyond, and each later
    step's gradients, beside its work. No parts: give no more."""

    device: str
    number: int
    step: int
    parts: frozenset[str]


class Retire(msgspec.Struct, frozen=True):
    """A snapshot is complete, with its copies: devices may forget those before."""

    step: int


class Release(msgspec.Struct, frozen=True):
    """The device may leave: nothing depends on it any more."""

    device: str


class Halt(msgspec.Struct, frozen=True):
    """Tell every device that is still there to leave."""


Ending = Literal["done", "interrupted", "lost", "diverged", "failed"]
"""Lost: a device is, without which the run cannot go on. Diverged: its numbers are not finite. Failed: the job's model
or data raise, on whatever device."""


class Finish(msgspec.Struct, frozen=True):
    outcome: Ending
    reason: str = ""


CoordinatorEvent = (
    Joined | Ready | Reported | StepFailed | Lost | Interrupted | Held | Planned | NoPlan | Fetched | Mirrored
    | Followed | FollowingEnded | Offered | Leaving | Changed
)  # fmt: skip
CoordinatorInstruction = (
    Assign | Place | Open | Advance | Commit | Hold | Fence | MakePlan | Call | Recall | Begin | Fetch | Follow | Lend
    | Retire | Release | Halt | Finish
)  # fmt: skip
