"""Stages of one device: their names in a run, and that they compute one at a time, the most urgent first."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.plans.plan import device_of, is_first, worker_id, worker_ids_of
from isthmus.protocol.compute_lane import ComputeLane
from isthmus.protocol.run_messages import Work
from isthmus.runtime.device.tasklets import ComputeTurns


@given(st.lists(st.sampled_from(["clinic", "host/0", "host/1"]), max_size=8))
def test_each_stage_has_a_seat_of_its_own_that_tells_its_device(devices: list[str]) -> None:
    found = worker_ids_of(devices)
    assert len(set(found)) == len(found)
    assert [device_of(name) for name in found] == devices
    assert [name for name in found if is_first(name)] == list(dict.fromkeys(devices))


def test_no_seat_is_a_name_of_another_device() -> None:
    assert device_of("host/2") == "host/2" and worker_id("host/2", 1) == "host/2/stage 2"


def test_a_backward_goes_before_a_forward_and_a_later_stage_before_an_earlier_one() -> None:
    lane, begun = ComputeLane(), list[tuple[int, Work]]()
    asked: list[tuple[int, Work]] = [(0, "F"), (0, "F"), (2, "F"), (0, "B"), (2, "B")]
    for stage, work in asked:
        lane.take(work, stage, partial(begun.append, (stage, work)))
    assert begun == [(0, "F")], "the others wait"
    for _ in asked:
        lane.release()
    assert begun == [(0, "F"), (2, "B"), (0, "B"), (2, "F"), (0, "F")]


def test_one_stage_computes_at_a_time() -> None:
    sharing, inside, most = ComputeTurns(), list[int](), list[int]()

    def compute(stage: int) -> None:
        turns = sharing.of(stage)
        for number in range(200):
            with turns.turn("F"):
                inside.append(stage)
                most.append(len(inside))
                inside.remove(stage)
            if number % 3 == 2:
                turns.give()
        turns.give()

    threads = [threading.Thread(target=compute, args=(stage,), daemon=True) for stage in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 600 and max(most) == 1


def test_a_stage_that_fails_gives_the_device_back() -> None:
    sharing = ComputeTurns()
    failing = sharing.of(0)
    with pytest.raises(RuntimeError), failing.turn("F"):
        raise RuntimeError
    failing.give()
    with sharing.of(2).turn("F"):
        pass


def test_the_next_work_of_a_stage_takes_part_in_the_choice() -> None:
    """A backward that follows from a forward goes before a forward of another stage that waited for longer."""
    sharing, begun = ComputeTurns(), list[str]()
    last = sharing.of(2)
    asked = threading.Event()

    def first_stage() -> None:
        first = sharing.of(0)
        asked.set()
        with first.turn("F"):
            begun.append("F of stage 0")
        first.give()

    with last.turn("F"):
        begun.append("F of stage 2")
        waiting = threading.Thread(target=first_stage, daemon=True)
        waiting.start()
        asked.wait()
        while not sharing.waiting:
            time.sleep(0.001)
    with last.turn("B"):
        begun.append("B of stage 2")
    last.give()
    waiting.join(60)
    assert begun == ["F of stage 2", "B of stage 2", "F of stage 0"]
