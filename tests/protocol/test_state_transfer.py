"""A joining device gets the run's state while the others train; what it may cost them, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import pytest
from tests.programs.ports import Asked
from tests.protocol.recorded import Recorded, planning

from isthmus.protocol import RunSpec, StateHolding, StateLayout
from isthmus.protocol.members import CLOSE_STEPS, StateTransfer
from isthmus.protocol.run_messages import (
    DeviceReady,
    GiveState,
    Inventory,
    ItemReported,
    OpenItem,
    Pause,
    PlaceWeights,
    SendState,
    StateReceived,
    TransferEnded,
)

P = ParamSpec("P")
ROME = frozenset({"rome"})
PARTS = frozenset({"w", "v"})
ALONE = StateLayout(parts={"oslo": PARTS}, repeats=True)
BOTH = StateLayout(parts={"oslo": PARTS, "rome": PARTS}, number=1, repeats=True)
SPEC = RunSpec(steps=40, micro_batches=1, micro_batch_size=1, lease_ahead=2)


class Run:
    """One device at work, which reports its items in order."""

    def __init__(self, layout: StateLayout = ALONE) -> None:
        self.machine = Recorded(("oslo",), SPEC, layout=layout)
        self.said: list[Asked] = []
        self.tell(self.machine.joined, "oslo")
        self.tell(self.machine.takes, "oslo", DeviceReady())
        self.reported = 0

    def tell(self, method: Callable[P, None], *given: P.args, **named: P.kwargs) -> list[Asked]:
        found = self.machine.tell(method, *given, **named)
        self.said += found
        return found

    def work(self, items: int = 1) -> None:
        for _ in range(items):
            self.tell(self.machine.takes, "oslo", ItemReported(item=self.reported))
            self.reported += 1

    def finish_leased(self) -> None:
        while any(isinstance(call[1], OpenItem) and call[1].item.index >= self.reported for call in self.said):
            self.work()

    def rome_is_wanted(self) -> list[Asked]:
        assert planning("oslo", "rome", must=False) in self.tell(self.machine.offered, "rome")
        self.tell(self.machine.gets, self.machine.epoch, BOTH)
        return self.tell(self.machine.joined, "rome")

    @property
    def held(self) -> bool:
        return any(isinstance(call[-1], Pause) for call in self.said)


def test_the_others_go_on_until_the_newcomer_is_close_and_wait_for_one_step() -> None:
    run = Run()
    run.work(3)
    donated = run.rome_is_wanted()
    assert donated == [
        ("receive_state", "rome", 1, 5, {"oslo": PARTS}),
        ("order", "oslo", SendState(number=1, step=5, parts=PARTS, receivers=ROME)),
    ], "all that is leased counts"
    run.work(8)
    assert run.machine.statistics().phase == "running"
    run.tell(run.machine.takes, "rome", StateReceived(number=1, of="oslo", step=5))
    run.work()
    assert run.machine.statistics().phase == "running", "it is behind"
    run.tell(run.machine.takes, "rome", StateReceived(number=1, of="oslo", step=12 - CLOSE_STEPS))
    assert run.machine.statistics().phase == "settling"
    run.finish_leased()
    assert not run.held, "the joining device lacks the last steps"
    assert run.machine.awaited == {"rome"}
    run.tell(run.machine.takes, "rome", StateReceived(number=1, of="oslo", step=13))
    assert not run.held
    assert run.tell(run.machine.takes, "rome", StateReceived(number=1, of="oslo", step=14)) == [
        ("order", "oslo", Pause(epoch=1)),
        ("order", "rome", Pause(epoch=1)),
    ]
    for device in ("oslo", "rome"):
        run.tell(run.machine.takes, device, Inventory(holdings=(StateHolding(epoch=0, step=14, parts=PARTS),), epoch=1))
    assert not any(isinstance(call[-1], GiveState) for call in run.said), "nothing has to travel"
    assert ("order", "rome", PlaceWeights(own=PARTS, epoch=1)) in run.said


def test_where_updates_cannot_be_repeated_the_state_comes_while_all_wait() -> None:
    run = Run(StateLayout(parts=ALONE.parts))
    run.work(3)
    assert run.rome_is_wanted() == []
    run.finish_leased()
    assert run.held


def test_a_lender_that_cannot_go_on_ends_it() -> None:
    run = Run()
    run.rome_is_wanted()
    assert run.tell(run.machine.takes, "oslo", TransferEnded(number=1)) == [
        ("order", "oslo", SendState(number=1, step=2, parts=frozenset()))
    ]
    run.finish_leased()
    assert run.held


@pytest.mark.parametrize("settling", [False, True])
def test_a_newcomer_that_is_lost_leaves_the_others_at_work(settling: bool) -> None:
    run = Run()
    run.rome_is_wanted()
    assert run.tell(run.machine.offered, "cairo") == []
    if settling:
        run.work(3)
        run.tell(run.machine.takes, "rome", StateReceived(number=1, of="oslo", step=2))
        run.finish_leased()
        assert run.machine.awaited == {"rome"}
    out = run.tell(run.machine.loses, "rome", "gone")
    assert ("order", "oslo", SendState(number=1, step=2, parts=frozenset())) in out
    if settling:
        assert out[-1] == ("order", "oslo", Pause(epoch=1)), "the run goes on by another plan"
    else:
        assert out[-1] == planning("cairo", "oslo", must=False), "what was not asked meanwhile is asked now"
        run.work(2)
        assert run.machine.statistics().phase == "running"
        assert not run.held


def test_no_better_plan_is_looked_for_meanwhile_but_one_that_must_be() -> None:
    run = Run()
    run.rome_is_wanted()
    assert run.tell(run.machine.offered, "cairo") == []
    assert run.tell(run.machine.leaving, "cairo") == [planning("oslo", "rome", must=True)]
    again = run.tell(run.machine.gets, run.machine.epoch, BOTH)
    assert again[0] == ("order", "oslo", SendState(number=1, step=2, parts=frozenset()))
    assert again[1:] == [
        ("receive_state", "rome", 2, 2, {"oslo": PARTS}),
        ("order", "oslo", SendState(number=2, step=2, parts=PARTS, receivers=ROME)),
    ]


def test_what_is_said_of_the_following_before_does_not_count() -> None:
    run = Run()
    run.rome_is_wanted()
    run.tell(run.machine.offered, "cairo")
    run.tell(run.machine.leaving, "cairo")
    run.tell(run.machine.gets, run.machine.epoch, BOTH)
    run.work(2)
    assert run.tell(run.machine.takes, "rome", StateReceived(number=1, of="oslo", step=2)) == []
    assert run.tell(run.machine.takes, "oslo", TransferEnded(number=1)) == []
    assert run.machine.statistics().phase == "running"
    run.tell(run.machine.takes, "rome", StateReceived(number=2, of="oslo", step=2))
    assert run.machine.statistics().phase == "settling"


def test_parts_come_from_whoever_has_them() -> None:
    found = StateTransfer(1, 7, {"rome": PARTS}, {"oslo": frozenset({"w"}), "cairo": frozenset({"v"})})
    assert found.donors == {"rome": ("cairo", "oslo")}
    found.state_received("rome", "oslo", 9)
    assert found.reached() is None
    found.state_received("rome", "cairo", 8)
    found.state_received("oslo", "rome", 3)
    assert found.reached() == 8


@pytest.mark.parametrize("steps_behind", [range(10, 60), range(10, 0, -1)])
def test_a_lag_that_grows_is_hopeless(steps_behind: range) -> None:
    found, hopeless = StateTransfer(1, 0, {"rome": PARTS}, {"oslo": PARTS}), False
    for step, lag in enumerate(steps_behind):
        found.state_received("rome", "oslo", step)
        hopeless = hopeless or found.will_not_converge(step + lag)
    assert hopeless == (steps_behind.step > 0)


def test_a_step_that_nobody_has_done_ends_the_transfer_and_no_device() -> None:
    """Its donor may have lied: the joining device forgets what it has."""
    run = Run()
    run.rome_is_wanted()
    asked = run.tell(run.machine.takes, "rome", StateReceived(number=1, of="oslo", step=99))
    assert asked[:2] == [
        ("receive_state", "rome", 1, 2, {}),
        ("order", "oslo", SendState(number=1, step=2, parts=frozenset())),
    ]
    assert "rome" in run.machine.connected and run.machine.phase == "settling"
