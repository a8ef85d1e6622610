"""Processes of devices are lost while their machines stay: the run waits for them, and not for ever."""

from collections.abc import Callable

import msgspec
from tests.programs.ports import Asked
from tests.protocol.recorded import Recorded, ended, halted, planning

from isthmus.protocol import RunSpec, StateLayout
from isthmus.protocol.members import MOST_RECALLS
from isthmus.protocol.run_messages import DeviceReady, Inventory, ItemReported, Pause
from isthmus.protocol.run_ports import EpochStart, FinishRun
from isthmus.session.program import Event

A, B = frozenset({"a"}), frozenset({"b"})
DEVICES = ("oslo", "tokyo")
TWO = StateLayout(parts={"oslo": A, "tokyo": B})
KILLED = "its process was killed by SIGKILL"


class Run:
    """A coordinator, and what it told last."""

    def __init__(self, save_every: int = 0) -> None:
        spec = RunSpec(steps=99, micro_batches=1, micro_batch_size=1, lease_ahead=1, save_every=save_every)
        self.machine = Recorded(DEVICES, spec, layout=TWO)
        self.item = 0
        self.come(*DEVICES)

    def log(self, method: Callable[..., None], *given: object, **named: object) -> list[Asked]:
        """Reports are of the present epoch."""
        epoch = self.machine.epoch
        now = [msgspec.structs.replace(one, epoch=epoch) if isinstance(one, Event) else one for one in given]
        return self.machine.tell(method, *now, **named)

    def come(self, *devices: str) -> list[Asked]:
        """They join, and all are ready."""
        out = [told for device in devices for told in self.log(self.machine.joined, device)]
        for start in (call[1] for call in out if isinstance(call[1], EpochStart)):
            self.item = start.first_item
        return out + [told for device in DEVICES for told in self.log(self.machine.takes, device, DeviceReady())]

    def work(self, items: int) -> None:
        for _ in range(items):
            for device in DEVICES:
                self.log(self.machine.takes, device, ItemReported(item=self.item))
            self.item += 1

    def lose(self, *devices: str, returns: bool = True) -> list[Asked]:
        """What the last loss leads to."""
        return [self.log(self.machine.loses, device, KILLED, returns=returns) for device in devices][-1]

    def lose_all_and_begin_anew(self) -> list[Asked]:
        """Their machines offer them; returns what leads to."""
        self.lose(*DEVICES)
        self.log(self.machine.offered, "oslo")
        out = self.log(self.machine.offered, "tokyo")
        if out[-1][0] != "finish_run":
            assert self.log(self.machine.gets, self.machine.epoch, TWO) == [
                ("call_device", "oslo"),
                ("call_device", "tokyo"),
            ]
            self.come(*DEVICES)
        return out


def recall(count: int) -> list[Asked]:
    reasons = f"oslo: {KILLED}; tokyo: {KILLED}"
    return [("restart_run", DEVICES, count, MOST_RECALLS, reasons), planning(*DEVICES, waits=True)]


def test_all_are_called_again_once_all_are_back() -> None:
    run = Run(save_every=2)
    run.work(5)  # two steps, a checkpoint, two steps
    assert run.lose("oslo") == [("disconnect", "oslo"), ("order", "tokyo", Pause(epoch=1))]
    assert run.lose("tokyo") == [("disconnect", "tokyo")] and run.machine.awaited == set(DEVICES)
    assert run.log(run.machine.offered, "tokyo") == [], "a plan for one device is worth less than a moment's timeout"
    assert run.log(run.machine.offered, "oslo") == recall(1)
    run.log(run.machine.gets, run.machine.epoch, TWO)
    _, start = run.come(*DEVICES)[0]
    assert isinstance(start, EpochStart) and (start.step, start.from_checkpoint) == (2, True)
    assert run.machine.statistics().phase == "running"


def test_only_so_often_from_the_same_state() -> None:
    run = Run()
    for attempt in range(1, MOST_RECALLS + 1):
        run.work(3)
        assert run.lose_all_and_begin_anew() == recall(attempt)
    (halt, _), (_, finish) = run.lose_all_and_begin_anew()
    assert halt == "halt" and isinstance(finish, FinishRun) and finish.outcome == "lost"
    assert KILLED in finish.reason and f"again {MOST_RECALLS} times, each time from the state after" in finish.reason


def test_as_often_as_it_takes_where_each_time_more_is_saved() -> None:
    run = Run(save_every=2)
    for _ in range(2 * MOST_RECALLS):
        run.work(6)
        assert run.lose_all_and_begin_anew() == recall(1)


def test_whom_no_plan_can_do_without_is_waited_for() -> None:
    run = Run()
    run.lose("tokyo")
    assert run.log(run.machine.takes, "oslo", Inventory(holdings=())) == [planning("oslo", waits=True)]
    assert run.log(run.machine.gets_none, run.machine.epoch, "oslo is too small") == [] and run.machine.awaited == {
        "tokyo"
    }
    told, plan = run.log(run.machine.offered, "tokyo")
    assert told[0] == "restart_run" and told[-1] == f"tokyo: {KILLED}" and plan == planning(*DEVICES, waits=True)


def test_who_was_offered_while_there_was_no_plan_for_the_others() -> None:
    run = Run()
    run.lose("tokyo")
    run.log(run.machine.takes, "oslo", Inventory(holdings=()))
    run.log(run.machine.offered, "tokyo")
    assert run.log(run.machine.gets_none, run.machine.epoch, "oslo is too small")[-1] == planning(*DEVICES, waits=True)
    _, (_, finish) = run.log(run.machine.gets_none, run.machine.epoch, "both are too small")
    assert isinstance(finish, FinishRun) and "both are too small" in finish.reason


def test_who_does_not_come_back_after_all_is_done_without() -> None:
    run = Run()
    run.lose(*DEVICES)
    run.log(run.machine.offered, "oslo")
    out = run.lose("tokyo", returns=False)
    assert out[-1] == planning("oslo", waits=True)
    run = Run()
    run.lose(*DEVICES)
    run.lose("oslo", returns=False)
    *_, (_, finish) = run.lose("tokyo", returns=False)
    assert isinstance(finish, FinishRun) and "no other device is left" in finish.reason


def queue(run: Run, *devices: str) -> list[Asked]:
    return run.log(run.machine.queued_by_engine, frozenset(devices))


def test_who_is_queued_by_its_engine_is_waited_for_until_it_has_started() -> None:
    run = Run()
    run.lose("tokyo")
    run.log(run.machine.takes, "oslo", Inventory(holdings=()))
    assert queue(run, "tokyo") == []
    assert run.log(run.machine.gets_none, run.machine.epoch, "oslo is too small") == []
    assert (run.machine.awaited, run.machine.queued) == (set(), {"tokyo"}), "there is no time limit"
    assert queue(run) == [] and (run.machine.awaited, run.machine.queued) == ({"tokyo"}, set()), "it starts"
    _, plan = run.log(run.machine.offered, "tokyo")
    assert plan == planning(*DEVICES, waits=True)


def test_who_is_queued_is_not_waited_for_where_there_is_a_plan_without_it() -> None:
    run = Run()
    run.lose(*DEVICES)
    queue(run, *DEVICES)
    assert queue(run, "tokyo") == [] and run.machine.awaited == {"oslo"}
    told, plan = run.log(run.machine.offered, "oslo")
    assert told[0] == "restart_run" and plan == planning("oslo", waits=True)
    run.log(run.machine.gets, run.machine.epoch, StateLayout(parts={"oslo": A | B}))
    assert run.log(run.machine.joined, "oslo")[0][0] == "begin_epoch"
    run.log(run.machine.takes, "oslo", DeviceReady())
    assert run.machine.statistics().phase == "running"


def test_attempts_without_a_plan_do_not_count_while_more_devices_are_queued() -> None:
    run = Run()
    run.lose(*DEVICES)
    queue(run, *DEVICES)
    for device in DEVICES * MOST_RECALLS:
        assert run.log(run.machine.offered, device)[-1] == planning(device, waits=True)
        assert run.log(run.machine.gets_none, run.machine.epoch, "it is too small") == []
        run.lose(device)
    run.log(run.machine.offered, "oslo")
    run.log(run.machine.offered, "tokyo")
    assert run.log(run.machine.gets_none, run.machine.epoch, "oslo is too small") == recall(1)


def test_who_leaves_the_queue_and_is_lost_for_good_ends_the_run() -> None:
    run = Run()
    run.lose(*DEVICES)
    queue(run, *DEVICES)
    queue(run)
    assert run.machine.awaited == set(DEVICES)
    run.lose("oslo", returns=False)
    *_, (_, finish) = run.lose("tokyo", returns=False)
    assert isinstance(finish, FinishRun) and "no other device is left" in finish.reason


def test_a_stop_ends_the_wait_for_the_queue() -> None:
    run = Run()
    run.lose("tokyo")
    run.log(run.machine.takes, "oslo", Inventory(holdings=()))
    queue(run, "tokyo")
    run.log(run.machine.gets_none, run.machine.epoch, "oslo is too small")
    assert run.log(run.machine.stop)[-1] == ended("interrupted")
    run = Run()
    run.lose("tokyo")
    run.log(run.machine.takes, "oslo", Inventory(holdings=()))
    queue(run, "tokyo")
    run.log(run.machine.stop)
    assert run.log(run.machine.gets_none, run.machine.epoch, "oslo is too small")[-1] == ended("interrupted")


def test_a_person_need_not_wait_for_them() -> None:
    run = Run()
    run.lose(*DEVICES)
    assert run.log(run.machine.stop) == [halted(2), ended("interrupted")]
