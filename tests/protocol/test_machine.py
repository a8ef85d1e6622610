"""The kernel of the state machines: the rules for events and phases, and a coordinator that stays in its table."""

from __future__ import annotations

import itertools
import random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import InternalError
from isthmus.protocol import Coordinator, Lineage, RunSpec, StateHolding, StateLayout
from isthmus.protocol.coordinator_events import (
    CoordinatorEvent,
    DeviceJoined,
    DeviceLeaving,
    DeviceLost,
    DeviceOffered,
    DevicesQueued,
    FinishRun,
    FleetChanged,
    NoPlan,
    PlanMade,
    StopRequested,
)
from isthmus.protocol.failures import StepFailure
from isthmus.protocol.machine import EpochMachine, FromDevice, Transitions, kind_of
from isthmus.protocol.phases import COORDINATOR
from isthmus.protocol.run_messages import (
    DeviceFailed,
    DeviceReady,
    Inventory,
    ItemReported,
    SnapshotCopied,
    StateFetched,
    StateReceived,
    TransferEnded,
)
from isthmus.session.program import Event, OutOfPhase


class Opened(Event, frozen=True, kw_only=True):
    pass


class Closed(Event, frozen=True, kw_only=True):
    breaks: bool = False
    """The machine goes to a phase that its table does not allow."""


class Door(EpochMachine[Literal["shut", "open", "gone"], Opened | Closed, str]):
    transitions = Transitions("shut", "gone", {"shut": {Opened: "open"}, "open": {Opened: "open", Closed: "gone"}})

    def _take(self, event: Opened | Closed) -> list[str]:
        self._phase = "open" if isinstance(event, Opened) else "shut" if event.breaks else "gone"
        return [self._phase]


@pytest.mark.parametrize(("first", "then"), [("shut", "ajar"), ("ajar", "gone")])
def test_a_table_with_an_unknown_phase_is_refused(first: str, then: str) -> None:
    with pytest.raises(InternalError, match="phases without a row: ajar"):
        Transitions(first, "gone", {"shut": {Opened: f"shut {then}"}})


def test_changes_are_the_pairs_of_different_phases_with_their_events() -> None:
    assert Door.transitions.changes == {("open", "gone"): ("Closed",), ("shut", "open"): ("Opened",)}


def test_an_event_of_another_epoch_is_dropped_and_counted() -> None:
    door = Door(epoch=2)
    for epoch in (1, 3):
        assert door.handle(Opened(epoch=epoch)) == []
    assert (door.phase, door.stale) == ("shut", 2)
    assert door.handle(Opened(epoch=2)) == ["open"]
    assert (door.phase, door.stale) == ("open", 2)


def test_an_event_out_of_phase_is_refused_and_changes_nothing() -> None:
    door = Door()
    with pytest.raises(OutOfPhase, match="Closed came in phase 'shut'"):
        door.handle(Closed())
    assert (door.phase, door.stale) == ("shut", 0)


def test_a_phase_that_the_table_does_not_allow_is_an_internal_error() -> None:
    door = Door()
    door.handle(Opened())
    with pytest.raises(InternalError, match="Door: Closed led from 'open' to 'shut', expected gone") as raised:
        door.handle(Closed(breaks=True))
    assert not isinstance(raised.value, OutOfPhase)


def test_a_machine_that_is_over_drops_everything() -> None:
    door = Door()
    door.handle(Opened())
    door.handle(Closed())
    assert door.handle(Opened()) == [] and door.handle(Closed()) == []
    assert (door.phase, door.stale) == ("gone", 0)


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


def holdings(draw: random.Random, machine: Coordinator) -> tuple[StateHolding, ...]:
    """The state of some step, as this epoch or the one before made it: half of the time all of it."""
    epoch, step = max(machine.epoch - draw.randint(0, 1), 0), draw.randint(0, STEPS)
    parts = PARTS if draw.random() < 0.5 else frozenset(draw.sample(sorted(PARTS), 1))
    return (StateHolding(epoch=epoch, step=step, parts=parts),)


def next_event(draw: random.Random, machine: Coordinator) -> CoordinatorEvent:
    """An event that a host may send: of a known device, with an item that is leased."""
    device, other, epoch = draw.choice(DEVICES), draw.choice(DEVICES), machine.epoch
    at_work, step = draw.choice(machine.devices), draw.randint(0, STEPS)
    held = holdings(draw, machine)
    events: list[CoordinatorEvent] = [
        DeviceJoined(device=device, holdings=held, epoch=epoch),
        FromDevice(at_work, DeviceReady(epoch=epoch)),
        FromDevice(
            at_work,
            DeviceFailed(
                reason="nan", fault="user", failure=StepFailure(step=step, what="matmul", reason="nan"), epoch=epoch
            ),
        ),
        DeviceLost(device=device, reason="gone", returns=draw.random() < 0.5, epoch=epoch),
        FromDevice(device, Inventory(holdings=held, epoch=epoch)),
        PlanMade(layout=layout(draw, list(DEVICES)), worth_it=draw.random() < 0.5, epoch=epoch),
        NoPlan(reason="too small", epoch=epoch),
        FromDevice(at_work, StateFetched(epoch=epoch)),
        FromDevice(device, SnapshotCopied(of=at_work, step=step, epoch=epoch)),
        FromDevice(device, StateReceived(of=other, step=step, number=draw.randint(1, 2), epoch=epoch)),
        FromDevice(at_work, TransferEnded(number=draw.randint(1, 2), epoch=epoch)),
        DeviceOffered(device=device, epoch=epoch),
        DeviceLeaving(device=device, epoch=epoch),
        DevicesQueued(devices=frozenset(draw.sample(DEVICES, draw.randint(0, 3))), epoch=epoch),
        FleetChanged(epoch=epoch),
        StopRequested(epoch=epoch),
    ]
    expected: list[CoordinatorEvent] = [
        FromDevice(at_work, ItemReported(item=item, loss=1.0, count=1.0, epoch=epoch)) for item in machine.leases.open
    ]
    for awaited in sorted(machine.awaited):
        expected += [
            DeviceJoined(device=awaited, holdings=held, epoch=epoch),
            FromDevice(awaited, DeviceReady(epoch=epoch)),
            FromDevice(awaited, StateFetched(epoch=epoch)),
            FromDevice(awaited, Inventory(holdings=held, epoch=epoch)),
        ]
    return draw.choice(expected if expected and draw.random() < 0.6 else events)


@given(seed=st.integers(0, 2**32 - 1), survives=st.booleans())
def test_a_coordinator_never_leaves_its_table(seed: int, survives: bool) -> None:
    draw = random.Random(seed)
    spec = RunSpec(steps=STEPS, micro_batches=1, micro_batch_size=1, lease_ahead=2, save_every=4)
    first = layout(draw, list(DEVICES))
    lineage = Lineage([(0, 0)]) if survives and draw.random() < 0.3 else None
    machine = Coordinator(
        first.parts, spec, int(lineage is not None), layout=first if survives else None, lineage=lineage
    )
    for _ in range(120):
        event, before = next_event(draw, machine), machine.phase
        if before == COORDINATOR.over:
            assert machine.handle(event) == []
            break
        fits = kind_of(event) in COORDINATOR.table[before]
        try:
            out = machine.handle(event)
        except OutOfPhase:
            assert not fits and machine.phase == before
            continue
        assert fits and machine.phase in COORDINATOR.table[before][kind_of(event)].split()
        assert (machine.phase == COORDINATOR.over) == any(isinstance(i, FinishRun) for i in out)
