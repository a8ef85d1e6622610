"""The coordinator handles events and answers with instructions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.fleet import Fleet
from isthmus.protocol.adaptation import PlanFigures
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.recovery import StateHolding, StateLayout
from isthmus.protocol.run_messages import DeviceOrder, DeviceReport, RunOrder
from isthmus.protocol.work import Item
from isthmus.session.program import Event

# To the coordinator, besides the reports of devices


class DeviceJoined(Event, frozen=True, kw_only=True):
    device: str
    holdings: tuple[StateHolding, ...] = ()
    """State that a device which was here before still has in memory."""


class DeviceLost(Event, frozen=True, kw_only=True):
    device: str
    reason: str
    worker_ids: tuple[str, ...] = ()
    """Its further stages, which are lost with it."""
    returns: bool = False
    """Whether its machine is there, so that it will be offered again."""


class StopRequested(Event, frozen=True, kw_only=True):
    """The user wants to stop: finish what is leased, save, leave."""


class PlanMade(Event, frozen=True, kw_only=True):
    """The plan that was asked for. Of one that need not be: whether it is worth the change."""

    layout: StateLayout
    worth_it: bool = True
    """Or, with figures, whether it must be."""
    figures: PlanFigures | None = None
    """Figures by which a run that need not change its plan decides."""


class NoPlan(Event, frozen=True, kw_only=True):
    """There is none for these devices."""

    reason: str


class DeviceOffered(Event, frozen=True, kw_only=True):
    """The device could work, if a plan wants it."""

    device: str


class DeviceLeaving(Event, frozen=True, kw_only=True):
    """The device is to leave without loss."""

    device: str


class DevicesQueued(Event, frozen=True, kw_only=True):
    """These devices wait for a node in the queue of their engine, and no others: they come back, nobody knows when."""

    devices: frozenset[str]


class FleetChanged(Event, frozen=True, kw_only=True):
    """Devices or links are not as the plan assumed."""


# From the coordinator, besides the orders to every device


class Order(msgspec.Struct, frozen=True):
    """Send this to one device."""

    device: str
    body: DeviceOrder


class AssignStage(msgspec.Struct, frozen=True):
    """Give the device its stage."""

    device: str


class ItemDone(msgspec.Struct, frozen=True):
    """Every device finished the item. `loss` is its mean, if the item has one."""

    item: Item
    loss: float | None = None
    note_: str = ""
    """A line about the item for people; empty for none."""
    sums: tuple[float, ...] = ()
    """Sums of an evaluation: losses, counts, and sums and counts of metrics."""


class CommitCheckpoint(msgspec.Struct, frozen=True):
    """All parts of the checkpoint are written: make it the latest."""

    item: Item
    finite: bool = True
    """Whether its weights are."""


class Disconnect(msgspec.Struct, frozen=True):
    """Hang up on a device that was lost. Whatever it says later is of an epoch that is over."""

    device: str


class MakePlan(msgspec.Struct, frozen=True):
    """Plan for these devices, beside all else, and say `PlanMade` or `NoPlan`."""

    devices: tuple[str, ...]
    must: bool = True
    """The run cannot go on without; else: only if it pays."""
    waits: bool = False
    """Nobody is at work until it is there."""
    believed: Fleet | None = None
    """With the figures that were measured; None: as stated."""


class RestartRun(msgspec.Struct, frozen=True):
    """Too few devices were left; with these the run is begun anew from its newest state."""

    devices: tuple[str, ...]
    count: int
    most: int
    reasons: str
    """Why devices were lost."""


class CallDevice(msgspec.Struct, frozen=True):
    """The plan wants a device that was offered: have it join."""

    device: str


class BeginEpoch(msgspec.Struct, frozen=True):
    """A new epoch goes on from the state after `step` steps. To be on record before anything of it happens."""

    epoch: int
    step: int
    first_item: int
    """Index of the first item that it leases."""
    from_checkpoint: bool
    """Nobody holds that state: it is the last checkpoint's."""


class ReceiveState(msgspec.Struct, frozen=True):
    """Have a joining device get the state of these devices' parts after `step` steps, and repeat what they do then."""

    device: str
    number: int
    """The number of the state transfer in the run."""
    step: int
    donated: Mapping[str, frozenset[str]]
    """Parts that each device sends."""


class ReleaseDevice(msgspec.Struct, frozen=True):
    """The device may leave: nothing depends on it any more."""

    device: str


Ending = Literal["done", "interrupted", "lost", "diverged", "failed"]
"""Lost: a device is, without which the run cannot go on. Diverged: its numbers are not finite. Failed: the job's model
or data raise, on whatever device."""


class FinishRun(msgspec.Struct, frozen=True):
    outcome: Ending
    reason: str = ""
    short_of_memory: bool = False
    """Whether memory was short on a device since the last step."""


CoordinatorEvent = (
    FromDevice[DeviceReport]
    | DeviceJoined
    | DeviceLost
    | StopRequested
    | PlanMade
    | NoPlan
    | DeviceOffered
    | DeviceLeaving
    | DevicesQueued
    | FleetChanged
)
CoordinatorInstruction = (
    AssignStage
    | Order
    | RunOrder
    | ItemDone
    | CommitCheckpoint
    | Disconnect
    | MakePlan
    | CallDevice
    | RestartRun
    | BeginEpoch
    | ReceiveState
    | ReleaseDevice
    | FinishRun
)
