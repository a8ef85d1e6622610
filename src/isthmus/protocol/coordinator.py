"""The coordinator: the life of a run. Events in, instructions out.

    joining ──all joined──► placing ──all ready──► running ──last item reported──► done
                                                      │  └─interrupted─► closing ──saved──► done
                    a device is lost, in any phase ───┴──► done (the last committed checkpoint stays)

It leases items ahead of the slowest device, so that no device waits for it, and commits a checkpoint once every
device has reported its part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

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
from isthmus.protocol.work import Item, RunSpec, items

Phase = Literal["joining", "placing", "running", "closing", "done"]


class CoordinatorStatistics(msgspec.Struct, frozen=True):
    phase: Phase
    finished: int
    """Items that every device has reported."""
    leased: int
    stale: int


class Coordinator:
    """The state machine of a run over the devices of one plan."""

    def __init__(self, devices: Iterable[str], spec: RunSpec, epoch: int = 0) -> None:
        self.devices = tuple(devices)
        self.spec = spec
        self._epoch = epoch
        self._phase: Phase = "joining"
        self._joined: set[str] = set()
        self._ready: set[str] = set()
        self._rest = items(spec)
        self._open: dict[int, Item] = {}
        self._reports: dict[int, dict[str, Reported]] = {}
        self._leased = self._finished = 0
        self._interrupted = False
        self._stale = 0

    def statistics(self) -> CoordinatorStatistics:
        return CoordinatorStatistics(self._phase, self._finished, self._leased, self._stale)

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorInstruction]:
        """Take one event; return what to do now."""
        if event.epoch != self._epoch or self._phase == "done":
            self._stale += event.epoch != self._epoch
            return []
        match event:
            case Joined(device=device):
                return self._on_joined(device)
            case Ready(device=device):
                return self._on_ready(device)
            case Reported():
                return self._on_reported(event)
            case Lost(device=device, reason=reason):
                return self._end("lost", f"device {device!r} was lost: {reason}")
            case Interrupted():
                return self._on_interrupted()

    def _on_joined(self, device: str) -> list[CoordinatorInstruction]:
        self._joined.add(device)
        if self._phase != "joining" or not self._joined.issuperset(self.devices):
            return []
        self._phase = "placing"
        return [step for d in self.devices for step in (Assign(d), Place(d))]

    def _on_ready(self, device: str) -> list[CoordinatorInstruction]:
        self._ready.add(device)
        if self._phase != "placing" or not self._ready.issuperset(self.devices):
            return []
        self._phase = "running"
        return self._lease()

    def _on_reported(self, report: Reported) -> list[CoordinatorInstruction]:
        reports = self._reports.setdefault(report.item, {})
        reports[report.device] = report
        if not reports.keys() >= set(self.devices):
            return []
        del self._reports[report.item]
        item = self._open.pop(report.item)
        self._finished += 1
        out: list[CoordinatorInstruction] = [Advance(item, _mean_loss(reports.values()))]
        if item.kind == "save":
            out.append(Commit(item))
        if self._phase == "running":
            out += self._lease()
        if not self._open:
            out += self._end("interrupted" if self._interrupted else "done")
        return out

    def _on_interrupted(self) -> list[CoordinatorInstruction]:
        if self._phase != "running":
            return self._end("interrupted") if self._phase in ("joining", "placing") else []
        newest = self._open[max(self._open)]
        if newest.kind == "save" and newest.step == self.spec.steps:
            return []  # the run's last item is leased already: it ends as if nobody had asked
        self._interrupted = True
        self._phase = "closing"
        if newest.kind == "save":
            return []
        steps = newest.step + 1 if newest.kind == "train" else newest.step
        return [self._open_item(Item(index=newest.index + 1, kind="save", step=steps))]

    def _lease(self) -> list[CoordinatorInstruction]:
        out: list[CoordinatorInstruction] = []
        while len(self._open) < self.spec.lease_ahead and (item := next(self._rest, None)) is not None:
            out.append(self._open_item(item))
        return out or ([] if self._open else self._end("done"))

    def _open_item(self, item: Item) -> Open:
        self._open[item.index] = item
        self._leased += 1
        return Open(item)

    def _end(self, outcome: Literal["done", "interrupted", "lost"], reason: str = "") -> list[CoordinatorInstruction]:
        if self._phase == "done":
            return []
        self._phase = "done"
        return [Halt(), Finish(outcome, reason)]


def _mean_loss(reports: Iterable[Reported]) -> float | None:
    """Sum of losses over sum of counts; None when no stage of the item has the loss, or nothing was counted."""
    told = [r for r in reports if r.loss is not None]
    count = sum(r.count or 0.0 for r in told)
    return sum(r.loss or 0.0 for r in told) / count if count else None
