"""The kernel of policies: the rule for reports; and a coordinator that takes whatever a host may say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.programs.ports import Recorder
from tests.protocol.recorded import Recorded

from isthmus.programs.pipeline import Pipeline
from isthmus.protocol import Lineage, RunSpec, StateHolding, StateLayout
from isthmus.protocol.run_messages import (
    DeviceFailed,
    DeviceReady,
    DeviceReport,
    Inventory,
    ItemReported,
    SnapshotCopied,
    StateMissing,
    StateReceived,
    TransferEnded,
)
from isthmus.protocol.step_failures import StepFailure
from isthmus.session.program import OVER, Event, OutOfPhase, Policy, Port, report


class Opened(Event, frozen=True, kw_only=True):
    pass


class Closed(Event, frozen=True, kw_only=True):
    pass


class Door(Policy[Port]):
    def __init__(self, epoch: int = 0) -> None:
        super().__init__("shut")
        self.epoch = epoch
        self.port = Recorder(Port).port

    def is_late(self, device: str, body: Event) -> bool:
        return body.epoch != self.epoch

    @report(Opened, "shut", "open")
    def _opened(self, device: str, opened: Opened) -> None:
        self.phase = "open"

    @report(Closed, "open")
    def _closed(self, device: str, closed: Closed) -> None:
        self.phase = OVER


def test_a_report_of_another_epoch_is_dropped_and_counted() -> None:
    door = Door(epoch=2)
    for epoch in (1, 3):
        door.heard("oslo", Opened(epoch=epoch))
    assert (door.phase, door.stale) == ("shut", 2)
    door.heard("oslo", Opened(epoch=2))
    assert (door.phase, door.stale) == ("open", 2)


def test_a_report_out_of_phase_is_refused_and_changes_nothing() -> None:
    door = Door()
    with pytest.raises(OutOfPhase, match="Closed came in phase 'shut'"):
        door.heard("oslo", Closed())
    with pytest.raises(OutOfPhase, match="DeviceReady came in phase 'shut'"):
        door.heard("oslo", DeviceReady())
    assert (door.phase, door.stale) == ("shut", 0)


def test_a_policy_that_is_over_drops_everything() -> None:
    door = Door()
    for body in (Opened(), Closed(), Opened(), Closed()):
        door.heard("oslo", body)
    assert (door.phase, door.stale) == (OVER, 0)


DEVICES = ("bergen", "oslo", "tokyo")
PARTS = frozenset("abc")
STEPS = 8


def layout(draw: random.Random, devices: list[str]) -> StateLayout:
    """A plan for one or more of the devices: each part of the state has at least one holder."""
    chosen = draw.sample(devices, draw.randint(1, len(devices)))
    parts = {device: frozenset(draw.sample(sorted(PARTS), 1)) for device in chosen}
    parts[chosen[0]] |= PARTS - frozenset[str]().union(*parts.values())
    copies = dict(itertools.pairwise(chosen))
    return StateLayout(parts=parts, snapshot_copies=copies, keep_every=draw.randint(0, 2), repeats=draw.random() < 0.5)


def holdings(draw: random.Random, machine: Recorded) -> tuple[StateHolding, ...]:
    """The state of some step, as this epoch or the one before made it: half of the time all of it."""
    epoch, step = max(machine.epoch - draw.randint(0, 1), 0), draw.randint(0, STEPS)
    parts = PARTS if draw.random() < 0.5 else frozenset(draw.sample(sorted(PARTS), 1))
    return (StateHolding(epoch=epoch, step=step, parts=parts),)


def lacks(machine: Recorded) -> list[tuple[str, DeviceReport]]:
    """Each device that gets state from another one may say that it gets none."""
    return [
        (device, StateMissing(donor=donor, parts=parts, reason="closed", epoch=machine.epoch))
        for device, donors in machine.sources.donors.items()
        for donor, parts in donors.items()
        if parts
    ]


def next_report(draw: random.Random, machine: Recorded) -> tuple[str, DeviceReport]:
    """A report of a device, with an item that is leased."""
    device, other, epoch = draw.choice(DEVICES), draw.choice(DEVICES), machine.epoch
    at_work, step, held = draw.choice(machine.devices), draw.randint(0, STEPS), holdings(draw, machine)
    failure = StepFailure(step=step, what="matmul", reason="nan")
    reports: list[tuple[str, DeviceReport]] = [
        (at_work, DeviceReady(epoch=epoch)),
        (at_work, DeviceFailed(reason="nan", fault="user", failure=failure, epoch=epoch)),
        (device, Inventory(holdings=held, epoch=epoch)),
        *lacks(machine),
        (device, SnapshotCopied(of=at_work, step=step, epoch=epoch)),
        (device, StateReceived(of=other, step=step, number=draw.randint(1, 2), epoch=epoch)),
        (at_work, TransferEnded(number=draw.randint(1, 2), epoch=epoch)),
    ]
    expected: list[tuple[str, DeviceReport]] = [
        (at_work, ItemReported(item=item, loss=1.0, count=1.0, epoch=epoch)) for item in machine.leases.open
    ]
    for awaited in sorted(machine.awaited):
        expected += [
            (awaited, DeviceReady(epoch=epoch)),
            (awaited, Inventory(holdings=held, epoch=epoch)),
        ]
    expected += lacks(machine) if machine.phase == "placing" else []
    return draw.choice(expected if expected and draw.random() < 0.8 else reports)


def next_call(draw: random.Random, machine: Recorded) -> Callable[[], None]:
    """What a run may say, of a device that is awaited, or of any."""
    awaited = sorted(machine.awaited)
    device = draw.choice(awaited if awaited and draw.random() < 0.6 else DEVICES)
    queued = frozenset(draw.sample(DEVICES, draw.randint(0, 3)))
    returns, worth_it = draw.random() < 0.5, draw.random() < 0.5
    return draw.choice(
        (
            partial(machine.joined, device, holdings(draw, machine)),
            partial(machine.loses, device, "gone", returns=returns),
            partial(machine.gets, machine.epoch, layout(draw, list(DEVICES)), worth_it=worth_it),
            partial(machine.gets_none, machine.epoch, "too small"),
            partial(machine.offered, device),
            partial(machine.leaving, device),
            partial(machine.queued_by_engine, queued),
            machine.fleet_changed,
            machine.stop,
        )
    )


@given(seed=st.integers(0, 2**32 - 1), survives=st.booleans())
def test_a_coordinator_takes_what_its_phase_allows_and_ends_once(seed: int, survives: bool) -> None:
    draw = random.Random(seed)
    spec = RunSpec(steps=STEPS, micro_batches=1, micro_batch_size=1, lease_ahead=2, save_every=4)
    first = layout(draw, list(DEVICES))
    lineage = Lineage([(0, 0)]) if survives and draw.random() < 0.3 else None
    machine = Recorded(first.parts, spec, layout=first if survives else None, lineage=lineage)
    for _ in range(120):
        was_over, before = machine.over, machine.phase
        if draw.random() < 0.6:
            device, body = next_report(draw, machine)
            fits = before in Pipeline.reports[type(body)].phases
            call, fits = partial(machine.takes, device, body), fits or was_over
        else:
            call = next_call(draw, machine)
            fits = before != "holding" or getattr(call, "func", None) not in (machine.gets, machine.gets_none)
        try:
            asked = machine.tell(call)
        except OutOfPhase:
            assert not fits and machine.phase == before
            continue
        assert fits
        assert [name for name, *_ in asked[-2:]] == ["halt", "finish_run"] if machine.over > was_over else True
        assert not (was_over and asked)
