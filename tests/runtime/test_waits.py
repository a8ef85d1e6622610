"""Whom a run waits for, and for how long, is told after three seconds, and again."""

from __future__ import annotations

from isthmus.protocol import RunSpec, StateLayout
from isthmus.protocol.run_messages import DeviceReady, ItemReported
from isthmus.session.session import Deadlines, Observation, Waits
from tests.protocol.recorded import Recorded


def test_a_wait_is_told_after_three_seconds_and_less_and_less_often() -> None:
    told: list[str] = []
    waits = Waits(told.append)
    for second in range(70):
        waits.look("to join", ("rome", "oslo")[: 1 + (second < 40)], float(second))
    assert told[0] == "waiting to join: oslo for 3 s, rome for 3 s"
    assert told[-1].startswith("waiting to join: rome for") and len(told) == 4


def test_of_many_a_few_are_named() -> None:
    told: list[str] = []
    waits = Waits(told.append)
    for second in range(4):
        waits.look("to join", [f"d{n}" for n in range(20)], float(second))
    assert told[0].count(" for 3 s") == 8 and told[0].endswith("and 12 more")


def test_another_wait_begins_anew() -> None:
    told: list[str] = []
    waits = Waits(told.append)
    for second in range(12):
        waits.look("to join" if second < 2 else "to stop", ("oslo",) if second % 6 else (), float(second))
    assert told == ["waiting to stop: oslo for 3 s", "waiting to stop: oslo for 3 s"]


def test_a_plan_is_waited_for_too() -> None:
    told: list[str] = []
    deadlines = Deadlines(6.0, 60.0, told.append)
    for second in range(5):
        assert not list(deadlines.missed("planning", (), float(second)))
    assert told == ["waiting for a plan: the planner for 3 s"]
    late = [device for second in range(5, 13) for device, _ in deadlines.missed("holding", ("oslo",), float(second))]
    assert late == ["oslo"]


def test_a_device_whose_process_is_there_may_take_longer_to_start_it() -> None:
    deadlines = Deadlines(6.0, 60.0, lambda _: None)
    told: dict[str, float] = {}
    for second in range(200):
        for device, why in deadlines.missed("joining", ("oslo", "rome"), float(second), lambda d: d == "rome"):
            told.setdefault(why, second)
            assert device == ("oslo" if "60 s" in why else "rome")
    assert told == {"it did not join within 60 s": 61, "it did not join within 180 s": 181}


def test_who_is_behind_the_others_is_named_once_it_is_not_the_usual() -> None:
    told: list[str] = []
    deadlines = Deadlines(6.0, 60.0, told.append)
    times = iter(range(1000))
    for item in range(5):
        for second in range(10):
            deadlines.lag(item, ("rome",) if second > 3 else (), float(next(times)))
    assert told == ["waiting to finish what others have: rome for 3 s"], "the first, and no usual one"
    for _ in range(30):
        deadlines.lag(6, ("rome",), float(next(times)))
    assert "rome for 1" in told[1]


def test_the_machine_knows_who_is_behind() -> None:
    spec = RunSpec(steps=4, micro_batches=1, micro_batch_size=1)
    machine = Recorded(("oslo", "rome"), spec, layout=StateLayout(parts={}))
    for device in machine.devices:
        machine.joined(device)
    for device in machine.devices:
        machine.takes(device, DeviceReady())
    assert machine.behind == (0, frozenset())
    machine.takes("oslo", ItemReported(item=0))
    assert machine.behind == (0, {"rome"})


def test_who_has_not_saved_yet_is_named_so() -> None:
    spec = RunSpec(steps=4, micro_batches=1, micro_batch_size=1, save_every=1)
    machine = Recorded(("oslo", "rome"), spec, layout=StateLayout(parts={}))
    for device in machine.devices:
        machine.joined(device)
    for device in machine.devices:
        machine.takes(device, DeviceReady())
    for device, item in (("oslo", 0), ("rome", 0), ("oslo", 1)):
        machine.takes(device, ItemReported(item=item))
    told: list[object] = []
    machine.port.note = told.append
    for second in range(5):
        machine.clock(float(second))
        machine.looked(Observation())
    assert told == ["waiting to save their parts of the checkpoint: rome for 3 s"]
