"""A device's side of a run: stages come and go, states stay."""

from __future__ import annotations

import pytest

from isthmus.protocol import StateHolding
from isthmus.protocol.device_session import (
    CloseStage,
    Connect,
    Connected,
    DeviceSession,
    GiveState,
    LeaveRun,
    StageAssigned,
    StageFailed,
    StageStarted,
    StartStage,
    StateKept,
    TellInventory,
)
from isthmus.protocol.run_messages import (
    DeviceReady,
    FetchState,
    Halt,
    Pause,
    PlaceWeights,
    RetireSnapshots,
    SnapshotCopied,
)
from isthmus.session.program import OutOfPhase

OWN = frozenset({"a"})


def at_work(epoch: int = 1, step: int = 0) -> DeviceSession[int]:
    session: DeviceSession[int] = DeviceSession()
    assert session.handle(StageAssigned(epoch=epoch, step=step)) == [Connect()]
    assert session.handle(Connected(epoch=epoch)) == []
    assert session.handle(PlaceWeights(epoch=epoch, own=OWN)) == [StartStage(step, OWN)]
    assert session.handle(StageStarted(epoch=epoch)) == [DeviceReady(epoch=epoch)]
    assert session.phase == "working"
    return session


def test_weights_may_come_before_links() -> None:
    session: DeviceSession[int] = DeviceSession()
    session.handle(StageAssigned(epoch=1, step=3))
    assert session.handle(PlaceWeights(epoch=1, own=OWN)) == []
    assert session.handle(Connected(epoch=1)) == [StartStage(3, OWN)]


def test_a_stage_is_closed_before_the_device_says_what_it_holds() -> None:
    session = at_work()
    assert session.handle(Pause(epoch=2)) == [CloseStage(), TellInventory()]
    session.handle(StateKept(epoch=1, step=7, values={"a": 1}))  # of the stage that was closed: the epoch before
    assert session.memory.holdings() == (StateHolding(epoch=1, step=7, parts=OWN),)
    assert session.handle(Pause(epoch=3)) == [TellInventory()]


def test_another_stage_takes_the_place_of_the_one_at_work() -> None:
    assert at_work().handle(StageAssigned(epoch=2, step=5)) == [CloseStage(), Connect()]


def test_a_stage_that_fails_leaves_the_device_idle() -> None:
    session = at_work()
    assert session.handle(StageFailed(epoch=1)) == [CloseStage()]
    assert session.phase == "idle" and session.handle(StageFailed(epoch=1)) == []


def test_what_comes_of_an_epoch_that_is_over_changes_nothing() -> None:
    session = at_work()
    session.handle(StageAssigned(epoch=2, step=0))
    for event in (Connected(epoch=1), PlaceWeights(epoch=1), StageStarted(epoch=1), StageFailed(epoch=1)):
        assert session.handle(event) == []
    assert session.handle(StateKept(epoch=1, step=4, values={"b": 2}, of="d1")) == []
    assert session.phase == "connecting" and session.stale == 5 and session.memory.holdings() == ()


def test_a_copy_of_a_snapshot_is_told_and_one_s_own_is_not() -> None:
    session = at_work()
    assert session.handle(StateKept(epoch=1, step=4, values={"b": 2}, of="d1")) == [
        SnapshotCopied(of="d1", step=4, epoch=1)
    ]
    assert session.handle(StateKept(epoch=1, step=4, values={"a": 1})) == []
    assert session.memory.holdings() == (StateHolding(epoch=1, step=4, parts=frozenset({"a", "b"})),)
    assert session.handle(RetireSnapshots(step=5)) == [] and session.memory.holdings() == ()


def test_a_device_that_has_just_joined_gives_what_it_holds() -> None:
    session = at_work()
    session.handle(StateKept(epoch=1, step=4, values={"a": 1}))
    assert session.handle(FetchState(epoch=9, step=4, parts=OWN)) == [GiveState(9, {"a": 1})]


def test_what_lies_beyond_the_beginning_of_an_epoch_is_forgotten() -> None:
    session = at_work()
    for step in (4, 6):
        session.handle(StateKept(epoch=1, step=step, values={"a": step}))
    session.handle(StageAssigned(epoch=2, step=4))
    session.handle(Connected(epoch=2))
    session.handle(PlaceWeights(epoch=2))
    assert [held.step for held in session.memory.holdings()] == [4]


def test_the_end() -> None:
    session = at_work()
    assert session.handle(Halt()) == [LeaveRun()]
    assert session.handle(Pause(epoch=2)) == []
    with pytest.raises(OutOfPhase, match="PlaceWeights came in phase 'working'"):
        at_work().handle(PlaceWeights(epoch=1))
