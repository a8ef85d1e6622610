"""A worker handles events and answers with instructions. Both have names and numbers only, never tensors.

An event from a peer carries the plan epoch under which it arose; a machine drops and counts events of another epoch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from isthmus.protocol.run_messages import Arrived, Halt, OpenItem, Parcel, PartsArrived
from isthmus.session.program import Event

Work = Literal["F", "B", "W", "E"]
"""Forward, backward, the weight gradients where they are apart, and the evaluation's forward."""


# To the worker


class Computed(Event, frozen=True, kw_only=True):
    """The tasklet that the compute lane ran is done."""

    work: Work
    item: int
    micro_batch: int


class Filled(Event, frozen=True, kw_only=True):
    """The buffers of the item's groups hold what this worker adds to their sums."""

    item: int


class Taken(Event, frozen=True, kw_only=True):
    """The sums are where the engine uses them."""

    item: int


class Collected(Event, frozen=True, kw_only=True):
    """The item's gradients are final on this stage and their norms known."""

    item: int
    finite: bool = True
    """Whether they are, and the loss if this stage has it."""


class Updated(Event, frozen=True, kw_only=True):
    item: int


class Saved(Event, frozen=True, kw_only=True):
    """From this worker's driver, or to the coordinator through a report."""

    item: int


class SnapshotKept(Event, frozen=True, kw_only=True):
    """A copy of the stage's state is in memory."""

    item: int


# From the worker


class Compute(msgspec.Struct, frozen=True):
    work: Work
    item: int
    micro_batch: int


class Send(msgspec.Struct, frozen=True):
    parcel: Parcel
    target: int
    item: int
    micro_batch: int = -1


class SendParts(msgspec.Struct, frozen=True):
    """Send worker `target` its parts of a group's buffer in this round."""

    group: int
    round: int
    target: int
    item: int


class Merge(msgspec.Struct, frozen=True):
    """All parts of the round are here: add them to the group's buffer, or put them in their places."""

    group: int
    round: int
    item: int


class Fill(msgspec.Struct, frozen=True):
    """Fill the buffers of these groups: with summed gradients, or with weighted parameters or deltas."""

    item: int
    groups: tuple[int, ...]


class Take(msgspec.Struct, frozen=True):
    """Use the sums in the buffers of these groups."""

    item: int
    groups: tuple[int, ...]


class Collect(msgspec.Struct, frozen=True):
    """Scale the summed gradients, add those of shared parameters, compute norms."""

    item: int


class Update(msgspec.Struct, frozen=True):
    """Apply the optimizers (clipped, if norms were exchanged)."""

    item: int
    skip: bool = False
    """Drop the gradients instead: they are not finite on some stage of the replica."""


class Save(msgspec.Struct, frozen=True):
    """Write this stage's part of a checkpoint."""

    item: int


class KeepSnapshot(msgspec.Struct, frozen=True):
    """Copy this stage's state in memory: its part of a snapshot."""

    item: int


class Report(msgspec.Struct, frozen=True):
    """Tell the coordinator that the item is done here, with this stage's loss if it has one."""

    item: int


class Leave(msgspec.Struct, frozen=True):
    """Leave the run."""


WorkerEvent = (
    OpenItem | Arrived | PartsArrived | Computed | Filled | Taken | Collected | Updated | Saved | SnapshotKept | Halt
)
WorkerInstruction = (
    Compute | Send | SendParts | Merge | Fill | Take | Collect | Update | Save | KeepSnapshot | Report | Leave
)
