"""The port of a pipeline's program to its host, and the values that are passed there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from isthmus.fleet import Fleet
from isthmus.protocol.run_messages import DeviceOrder, Halt, Item, OpenItem, RetireSnapshots


class PlanRequest(msgspec.Struct, frozen=True):
    """A plan for these devices is wanted."""

    devices: tuple[str, ...]
    must: bool = True  # the run cannot go on without; else: only if it pays
    waits: bool = False  # nobody is at work until it is there
    epoch: int = 0  # in which it is wanted: an answer in a later one is of no use
    believed: Fleet | None = None  # with the figures that were measured; None: as stated


class EpochStart(msgspec.Struct, frozen=True):
    """A new epoch goes on from the state after `step` steps."""

    epoch: int
    step: int
    first_item: int  # index of the first item that it leases
    from_checkpoint: bool  # nobody holds that state: it is the last checkpoint's


Ending = Literal["done", "interrupted", "lost", "diverged", "failed"]
"""Lost: a device is, without which the run cannot go on. Diverged: its numbers are not finite. Failed: the job's model
or data raise, on whatever device."""


class FinishRun(msgspec.Struct, frozen=True):
    """How a run ends."""

    outcome: Ending
    reason: str = ""
    short_of_memory: bool = False  # whether memory was short on a device since the last step


class PipelinePort(Protocol):
    """The program asks this of its host."""

    def begin_epoch(self, start: EpochStart) -> None:
        """Put the new epoch on record before anything of it happens."""

    def assign_stage(self, device: str) -> None:
        """Give the device its stage."""

    def order(self, device: str, body: DeviceOrder) -> None:
        """Send this to one device."""

    def open_item(self, order: OpenItem) -> None:
        """Send this to every device of the plan."""

    def retire_snapshots(self, order: RetireSnapshots) -> None:
        """Send this to every device."""

    def halt(self, order: Halt) -> None:
        """Send this to every device."""

    def item_done(self, item: Item, loss: float | None, note: str, sums: tuple[float, ...]) -> None:
        """Every device finished the item. `loss` is its mean, if the item has one; `note` a line about it for people,
        empty for none; `sums` those of an evaluation: losses, counts, and sums and counts of metrics."""

    def commit_checkpoint(self, item: Item, *, finite: bool) -> None:
        """All parts of the checkpoint are written: make it the latest. `finite`: its weights are."""

    def give_up_checkpoint(self, item: Item, device: str, reason: str) -> None:
        """This device's part is not in the store as it says: there is no such checkpoint, and devices write no more
        parts to the store until the next plan."""

    def disconnect(self, device: str) -> None:
        """Hang up on a device that was lost. Whatever it says later is of an epoch that is over."""

    def make_plan(self, request: PlanRequest) -> None:
        """Plan beside all else, and say `planned` or `no_plan`."""

    def call_device(self, device: str) -> None:
        """The plan wants a device that was offered: have it join."""

    def restart_run(self, devices: tuple[str, ...], count: int, most: int, reasons: str) -> None:
        """Too few devices were left; with these the run is begun anew from its newest state, for the `count`-th time of
        `most`. `reasons`: why devices were lost."""

    def receive_state(self, device: str, number: int, step: int, donated: Mapping[str, frozenset[str]]) -> None:
        """Have a joining device get the state after `step` steps, of the parts that each device sends, and repeat what
        they do then. `number` counts the run's state transfers. Nobody sends: have it forget what it has of that."""

    def release_device(self, device: str) -> None:
        """The device may leave: nothing depends on it any more."""

    def finish_run(self, finish: FinishRun) -> None:
        """Nothing follows."""

    def note(self, text: str) -> None:
        """A person may want to know this."""

    def accept_report(self, device: str, item: int) -> None:
        """The report at hand is the one that was due: use what came with it."""

    def reject_device(self, device: str, reason: str, *, permanent: bool) -> None:
        """Take no more from a worker of a device that is lost. `permanent`: nor from a new process of it."""

    def probe_link(self, source: str, target: str) -> None:
        """Measure a link that carries nothing, and say `probed`."""
