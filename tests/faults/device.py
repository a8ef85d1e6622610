"""A device of a simulated run: the real worker machine, and weights that are the list of updates made to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from isthmus.protocol import Item, StageView, StateHolding, Worker
from isthmus.protocol.events import (
    Arrived,
    Collect,
    Collected,
    Compute,
    Computed,
    KeepSnapshot,
    Opened,
    Report,
    Save,
    Saved,
    Send,
    SnapshotKept,
    Update,
    Updated,
    WorkerEvent,
    WorkerInstruction,
)
from isthmus.protocol.state_inventory import StateInventory

History = tuple[tuple[int, int], ...]
"""Every update of a part: the range of samples (its first) and the epoch."""


class Stage(NamedTuple):
    """What the coordinator assigns."""

    epoch: int
    step: int
    view: StageView
    devices: tuple[str, ...]
    """Of all stages."""
    parts: frozenset[str]
    snapshot_copy: str | None


class Surroundings(NamedTuple):
    """How a device reaches others. Times are drawn where they pass."""

    later: Callable[[str, str, Callable[[], None]], None]
    """(lane, what takes time, then)"""
    to_device: Callable[[str, str, Callable[[Device], None]], None]
    """(from, to, what arrives)"""
    report: Callable[[str, Stage, Item, dict[str, History]], None]
    snapshot_sources: Callable[[str, Stage, str, int], None]


class Device:
    def __init__(self, name: str, around: Surroundings) -> None:
        self.name = name
        self.memory: StateInventory[History] = StateInventory()
        self._around = around
        self._stage: Stage | None = None
        self._worker: Worker | None = None
        self._live: dict[str, History] = {}
        self._step = 0
        self._items: dict[int, Item] = {}
        self._state: dict[str, History] = {}

    def hold(self) -> tuple[StateHolding, ...]:
        """Forget the stage; its state remains."""
        if self._stage is not None:
            self.memory.keep(self._stage.epoch, self._step, self._live)
        self._stage = self._worker = None
        return self.memory.holdings()

    def begin(self, stage: Stage, own: frozenset[str], placed: Mapping[str, History]) -> None:
        self.hold()
        self.memory.begin(stage.step)
        found = self.memory.values(stage.step, own)
        assert found.keys() == own, f"{self.name} does not have what it said it holds: {own - found.keys()}"
        self._live = {**placed, **found}
        assert self._live.keys() == stage.parts
        self._stage, self._step, self._worker = stage, stage.step, Worker(stage.view, stage.epoch)
        self._items = {}

    @property
    def epoch(self) -> int:
        return self._stage.epoch if self._stage is not None else -1

    @property
    def step(self) -> int:
        """How many updates its state has had."""
        return self._step

    def state_after(self, step: int, parts: frozenset[str]) -> dict[str, History]:
        return {part: self._live[part][:step] for part in parts}

    def handle(self, event: WorkerEvent) -> None:
        if isinstance(event, Opened) and event.epoch == self.epoch:
            self._items[event.item.index] = event.item
        if (worker := self._worker) is not None:
            for instruction in worker.handle(event):
                self._carry_out(instruction, worker)

    def _carry_out(self, instruction: WorkerInstruction, worker: Worker) -> None:
        stage = self._stage
        assert stage is not None

        def done(event: WorkerEvent, before: Callable[[], None] = lambda: None) -> Callable[[], None]:
            def act() -> None:
                if self._worker is worker:
                    before()
                    self.handle(event)

            return act

        match instruction:
            case Compute(work=work, item=item, micro_batch=number):
                self._around.later(self.name, "compute", done(Computed(work=work, item=item, micro_batch=number)))
            case Send(parcel=parcel, target=target, item=item, micro_batch=number):
                event = Arrived(
                    parcel=parcel, source=stage.view.stage, item=item, micro_batch=number, epoch=stage.epoch
                )
                self._around.to_device(self.name, stage.devices[target], lambda other: other.handle(event))
            case Collect(item=item):
                self._around.later(self.name, "collect", done(Collected(item=item)))
            case Update(item=item):
                self._around.later(self.name, "update", done(Updated(item=item), before=lambda: self._update(item)))
            case Save(item=item):
                self._state = dict(self._live)
                self._around.later(self.name, "save", done(Saved(item=item)))
            case KeepSnapshot(item=item):
                self._keep(stage, self._items[item].step)
                self._around.later(self.name, "keep", done(SnapshotKept(item=item)))
            case Report(item=item):
                state, self._state = self._state, {}
                self._around.report(self.name, stage, self._items.pop(item), state)
            case _:
                raise AssertionError(instruction)

    def _update(self, index: int) -> None:
        assert self._stage is not None
        item = self._items[index]
        assert item.step == self._step
        self._live = {part: (*history, (item.first_sample, self._stage.epoch)) for part, history in self._live.items()}
        self._step += 1

    def _keep(self, stage: Stage, step: int) -> None:
        copied = dict(self._live)
        self.memory.keep(stage.epoch, step, copied)
        if stage.snapshot_copy is None:
            return

        def arrive(other: Device) -> None:
            if other.epoch == stage.epoch:
                other.memory.keep(stage.epoch, step, copied)
                other._around.snapshot_sources(other.name, stage, self.name, step)

        snapshot_copy = stage.snapshot_copy
        self._around.later(self.name, "snapshot_copy", lambda: self._around.to_device(self.name, snapshot_copy, arrive))


class Transfer(NamedTuple):
    """A joining device that follows a device at work."""

    joiner: Device
    donor: Device
    epoch: int
    number: int
    parts: frozenset[str]


def view_of(stage: int, stages: int) -> StageView:
    before, after = ((stage - 1,) if stage else ()), ((stage + 1,) if stage + 1 < stages else ())
    return StageView(
        stage=stage,
        stages=stages,
        in_flight=stages - stage,
        forward_from=before,
        forward_to=after,
        backward_from=after,
        backward_to=before,
        eval_from=before,
        eval_to=after,
    )
