"""A device's side of a run: stages come and go, states stay."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.programs.ports import Asked, Recorder

from isthmus.protocol import StateHolding
from isthmus.protocol.device_session import DeviceSession, SessionOrder, SessionPort
from isthmus.protocol.run_messages import Halt, Pause, PlaceWeights, RetireSnapshots, TakeState
from isthmus.session.program import OutOfPhase

OWN = frozenset({"a"})


class Worker:
    """A session, and what it asks: each method returns what was asked because of it."""

    def __init__(self) -> None:
        self.session: DeviceSession[int] = DeviceSession()
        self.port = Recorder(SessionPort)
        self.session.port = self.port.port

    def ordered(self, order: SessionOrder) -> list[Asked]:
        self.session.ordered(order)
        return self.port.took()

    def assigned(self, epoch: int, step: int = 0) -> list[Asked]:
        self.session.assigned(epoch, step)
        return self.port.took()

    def connected(self, epoch: int) -> list[Asked]:
        self.session.connected(epoch)
        return self.port.took()

    def fetched(self, epoch: int, donor: str, values: Mapping[str, int]) -> list[Asked]:
        self.session.fetched(epoch, donor, values)
        return self.port.took()

    def unfetched(self, epoch: int, donor: str, reason: str) -> list[Asked]:
        self.session.unfetched(epoch, donor, reason)
        return self.port.took()

    def started(self, epoch: int) -> list[Asked]:
        self.session.started(epoch)
        return self.port.took()

    def failed(self, epoch: int) -> list[Asked]:
        self.session.failed(epoch)
        return self.port.took()

    def kept(self, epoch: int, step: int, values: Mapping[str, int], of: str = "") -> list[Asked]:
        self.session.kept(epoch, step, values, of)
        return self.port.took()


def at_work() -> Worker:
    worker = Worker()
    assert worker.assigned(1) == [("connect",)]
    assert worker.connected(1) == []
    assert worker.ordered(PlaceWeights(epoch=1, own=OWN)) == [("start", 0, OWN)]
    assert worker.started(1) == [("ready",)] and worker.session.epoch == 1
    assert worker.session.phase == "working"
    return worker


def test_weights_may_come_before_links() -> None:
    worker = Worker()
    worker.assigned(1, 3)
    assert worker.ordered(PlaceWeights(epoch=1, own=OWN)) == []
    assert worker.connected(1) == [("start", 3, OWN)]


def test_a_stage_is_closed_before_the_device_says_what_it_holds() -> None:
    worker = at_work()
    assert worker.ordered(Pause(epoch=2)) == [("close_stage",), ("inventory",)]
    worker.kept(1, 7, {"a": 1})  # of the stage that was closed: the epoch before
    assert worker.session.memory.holdings() == (StateHolding(epoch=1, step=7, parts=OWN),)
    assert worker.ordered(Pause(epoch=3)) == [("inventory",)]


def test_what_a_stage_that_is_closed_keeps_is_in_the_inventory() -> None:
    """The device says `kept` while it closes: the session has the new epoch by then."""
    worker = at_work()
    held: list[tuple[StateHolding, ...]] = []
    worker.session.port.close_stage = lambda: worker.session.kept(1, 7, {"a": 1})
    worker.session.port.inventory = lambda: held.append(worker.session.memory.holdings())
    worker.ordered(Pause(epoch=2))
    assert held == [(StateHolding(epoch=1, step=7, parts=OWN),)]


def test_links_that_fail_at_once_leave_the_device_idle() -> None:
    worker = Worker()
    worker.session.port.connect = lambda: worker.session.failed(1)
    assert worker.assigned(1) == [("close_stage",)] and worker.session.phase == "idle"


def test_another_stage_takes_the_place_of_the_one_at_work() -> None:
    assert at_work().assigned(2, 5) == [("close_stage",), ("connect",)]


def test_a_stage_that_fails_leaves_the_device_idle() -> None:
    worker = at_work()
    assert worker.failed(1) == [("close_stage",)]
    assert worker.session.phase == "idle" and worker.failed(1) == []


def test_what_comes_of_an_epoch_that_is_over_changes_nothing() -> None:
    worker = at_work()
    worker.assigned(2)
    assert worker.connected(1) == worker.ordered(PlaceWeights(epoch=1)) == worker.started(1) == worker.failed(1) == []
    assert worker.kept(1, 4, {"b": 2}, of="d1") == []
    session = worker.session
    assert session.phase == "connecting" and session.stale == 5 and session.memory.holdings() == ()


def test_a_copy_of_a_snapshot_is_told_and_one_s_own_is_not() -> None:
    worker = at_work()
    assert worker.kept(1, 4, {"b": 2}, of="d1") == [("copied", 4, "d1")]
    assert worker.kept(1, 4, {"a": 1}) == []
    memory = worker.session.memory
    assert memory.holdings() == (StateHolding(epoch=1, step=4, parts=frozenset({"a", "b"})),)
    assert worker.ordered(RetireSnapshots(step=5)) == [] and memory.holdings() == ()


B, C = frozenset("b"), frozenset("c")


def fetching() -> Worker:
    worker = Worker()
    worker.kept(0, 4, {"a": 1})
    worker.assigned(1, 4)
    worker.connected(1)
    order = PlaceWeights(epoch=1, own=OWN, donors={"d1": B | C})
    assert worker.ordered(order) == [("fetch", 4, {"d1": B | C})]
    return worker


def test_a_stage_begins_when_others_have_given_what_it_lacks() -> None:
    worker = fetching()
    assert worker.fetched(1, "d1", {"b": 2}) == []
    assert worker.fetched(1, "d1", {"c": 3}) == [("start", 4, OWN | B | C)]
    assert worker.session.memory.values(4, OWN | B | C) == {"a": 1, "b": 2, "c": 3}


def test_a_second_donor_gives_what_the_first_one_did_not() -> None:
    worker = fetching()
    worker.fetched(1, "d1", {"b": 2})
    assert worker.unfetched(1, "d1", "closed") == [("missing", "d1", C, "closed")]
    assert worker.unfetched(1, "d1", "closed") == []
    assert worker.ordered(TakeState(epoch=1, donors={"d2": C})) == [("fetch", 4, {"d2": C})]
    assert worker.fetched(1, "d2", {"c": 3}) == [("start", 4, OWN | B | C)]


def test_what_was_given_before_another_plan_is_in_the_inventory() -> None:
    worker = fetching()
    worker.fetched(1, "d1", {"b": 2})
    assert worker.ordered(Pause(epoch=2)) == [("close_stage",), ("inventory",)]
    assert worker.fetched(1, "d1", {"c": 3}) == worker.unfetched(1, "d1", "closed") == [], "of an epoch that is over"
    assert worker.ordered(TakeState(epoch=2, donors={"d2": C})) == [], "no stage waits for it"
    assert StateHolding(epoch=1, step=4, parts=B) in worker.session.memory.holdings()


def test_what_lies_beyond_the_beginning_of_an_epoch_is_forgotten() -> None:
    worker = at_work()
    for step in (4, 6):
        worker.kept(1, step, {"a": step})
    worker.assigned(2, 4)
    worker.connected(2)
    worker.ordered(PlaceWeights(epoch=2))
    assert [held.step for held in worker.session.memory.holdings()] == [4]


def test_the_end() -> None:
    worker = at_work()
    assert worker.ordered(Halt()) == [("leave",)]
    assert worker.ordered(Pause(epoch=2)) == worker.assigned(2) == worker.failed(1) == worker.kept(1, 4, {}) == []
    assert worker.session.memory.holdings() == ()
    with pytest.raises(OutOfPhase, match="PlaceWeights came in phase 'working'"):
        at_work().ordered(PlaceWeights(epoch=1))
