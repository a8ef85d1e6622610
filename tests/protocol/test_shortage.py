"""Memory that was short: what plans may count on then, and what becomes of the run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.programs.ports import Asked
from tests.protocol.recorded import ended, planning
from tests.protocol.test_attempts import ALL, fail, held, layout, ready, running, step

from isthmus.protocol.run_messages import Pause
from isthmus.protocol.step_failures import MemoryShortage, StepFailure, believed_bytes

MIB = 1 << 20
SHORT = StepFailure(step=-1, what="memory", reason="out of memory: 1 MiB of 64 MiB free", memory=True)


def test_a_smaller_device_counts_as_what_is_there() -> None:
    short = MemoryShortage(asked=100 * MIB, free=60 * MIB, total=64 * MIB, reserved=4 * MIB, before=4 * MIB)
    assert short.capacity == 60 * MIB
    assert believed_bytes(short, planned=100 * MIB, stated=128 * MIB) == 60 * MIB


def test_what_was_asked_for_may_be_less_than_what_is_free() -> None:
    short = MemoryShortage(asked=MIB >> 10, free=MIB, total=3 * MIB, reserved=2 * MIB)
    assert short.description == (
        "asked for 1 KiB, 1 MiB of 3 MiB free but in no block that is large enough, 2 MiB reserved by this device"
    )
    assert "block" not in MemoryShortage(asked=2 * MIB, free=MIB, total=3 * MIB, reserved=2 * MIB).description


def test_a_stage_that_takes_more_than_was_planned_leaves_less_for_the_next() -> None:
    # It was planned to take 50 MiB, and had 60 when it wanted 20 more: the plan's measure is 5/8 of the truth.
    short = MemoryShortage(asked=20 * MIB, free=4 * MIB, total=64 * MIB, reserved=60 * MIB)
    assert believed_bytes(short, planned=50 * MIB, stated=64 * MIB) == 50 * MIB * 64 // 80


@given(
    asked=st.integers(0, 1 << 40),
    free=st.integers(0, 1 << 40),
    reserved=st.integers(0, 1 << 40),
    before=st.integers(0, 1 << 40),
    planned=st.integers(2, 1 << 40),
    stated=st.integers(1, 1 << 41),
)
def test_what_is_believed_shrinks_and_rules_the_same_plan_out(
    asked: int, free: int, reserved: int, before: int, planned: int, stated: int
) -> None:
    short = MemoryShortage(
        asked=asked, free=free, total=free + reserved, reserved=reserved, before=min(before, reserved)
    )
    found = believed_bytes(short, planned, stated)
    assert 1 <= found <= max(1, min(stated, short.capacity))
    assert found < planned


def test_the_run_goes_on_with_the_device_and_a_new_plan() -> None:
    machine = running()
    assert fail(machine, "oslo", SHORT) == [("order", "oslo", Pause(epoch=1)), ("order", "tokyo", Pause(epoch=1))]
    assert held(machine, *ALL) == [planning(*ALL, waits=True)], "nobody is suspected"
    machine.gets(machine.epoch, layout(*ALL))
    assert set(machine.devices) == set(ALL)


def test_it_may_be_short_before_the_first_step() -> None:
    machine = running()
    fail(machine, "oslo", SHORT)
    held(machine, *ALL)
    machine.gets(machine.epoch, layout(*ALL))
    assert machine.statistics().phase == "placing"
    assert fail(machine, "tokyo", SHORT) == [("order", "oslo", Pause(epoch=2)), ("order", "tokyo", Pause(epoch=2))], (
        "another device's first loss"
    )


def test_where_no_plan_fits_the_figures_are_told() -> None:
    machine = running()
    fail(machine, "oslo", SHORT)
    held(machine, *ALL)
    told = machine.tell(machine.gets_none, machine.epoch, "2 MiB short on 'oslo'")[-1]
    assert told == ended("lost", f"device 'oslo': {SHORT.reason}; no plan for what is left: 2 MiB short on 'oslo'"), (
        told
    )


def test_a_device_that_is_short_again_and_again_ends_the_run() -> None:
    machine = running(recovery_attempts=2)
    finish: Asked | None = None
    for attempt in range(9):
        out = fail(machine, "oslo", SHORT)
        if out[-1][0] == "finish_run":
            finish = out[-1]
            break
        held(machine, *ALL)
        machine.gets(machine.epoch, layout(*ALL))
        ready(machine)
        assert attempt < 3
    assert finish == ended("failed", f"device 'oslo': {SHORT.reason}")


def test_steps_that_are_done_begin_the_count_anew() -> None:
    machine = running(recovery_attempts=1, steps=50)
    for round_ in range(4):
        out = fail(machine, "oslo", SHORT)
        assert out[-1][0] != "finish_run", round_
        held(machine, *ALL)
        machine.gets(machine.epoch, layout(*ALL))
        ready(machine)
        step(machine, machine.statistics().leased - 1)
