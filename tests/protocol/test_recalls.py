"""Processes of devices are lost while their machines stay: the run waits for them, and not for ever."""

import msgspec

from isthmus.protocol import Coordinator, RunSpec, StateLayout
from isthmus.protocol.coordinator_events import (
    BeginEpoch,
    CallDevice,
    CoordinatorEvent,
    CoordinatorInstruction,
    DeviceJoined,
    DeviceLost,
    DeviceOffered,
    DevicesQueued,
    Disconnect,
    FinishRun,
    MakePlan,
    NoPlan,
    Order,
    PlanMade,
    RestartRun,
    StopRequested,
)
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.members import MOST_RECALLS
from isthmus.protocol.run_messages import DeviceReady, Halt, Inventory, ItemReported, Pause

A, B = frozenset({"a"}), frozenset({"b"})
DEVICES = ("oslo", "tokyo")
TWO = StateLayout(parts={"oslo": A, "tokyo": B})
KILLED = "its process was killed by SIGKILL"


class Run:
    """A coordinator, and what it told last."""

    def __init__(self, save_every: int = 0) -> None:
        spec = RunSpec(steps=99, micro_batches=1, micro_batch_size=1, lease_ahead=1, save_every=save_every)
        self.machine = Coordinator(DEVICES, spec, layout=TWO)
        self.item = 0
        self.come(*DEVICES)

    def log(self, event: CoordinatorEvent) -> list[CoordinatorInstruction]:
        epoch = self.machine.epoch
        if isinstance(event, FromDevice):
            return self.machine.handle(FromDevice(event.device, msgspec.structs.replace(event.body, epoch=epoch)))
        return self.machine.handle(msgspec.structs.replace(event, epoch=epoch))

    def come(self, *devices: str) -> list[CoordinatorInstruction]:
        """They join, and all are ready."""
        out = [told for device in devices for told in self.log(DeviceJoined(device=device))]
        for begin in (told for told in out if isinstance(told, BeginEpoch)):
            self.item = begin.first_item
        return out + [told for device in DEVICES for told in self.log(FromDevice(device, DeviceReady()))]

    def work(self, items: int) -> None:
        for _ in range(items):
            for device in DEVICES:
                self.log(FromDevice(device, ItemReported(item=self.item)))
            self.item += 1

    def lose(self, *devices: str, returns: bool = True) -> list[CoordinatorInstruction]:
        """What the last loss leads to."""
        return [self.log(DeviceLost(device=device, reason=KILLED, returns=returns)) for device in devices][-1]

    def lose_all_and_begin_anew(self) -> list[CoordinatorInstruction]:
        """Their machines offer them; returns what leads to."""
        self.lose(*DEVICES)
        self.log(DeviceOffered(device="oslo"))
        out = self.log(DeviceOffered(device="tokyo"))
        if not isinstance(out[-1], FinishRun):
            assert self.log(PlanMade(layout=TWO)) == [CallDevice("oslo"), CallDevice("tokyo")]
            self.come(*DEVICES)
        return out


def recall(count: int) -> list[CoordinatorInstruction]:
    reasons = f"oslo: {KILLED}; tokyo: {KILLED}"
    return [RestartRun(DEVICES, count, MOST_RECALLS, reasons), MakePlan(DEVICES, waits=True)]


def test_all_are_called_again_once_all_are_back() -> None:
    run = Run(save_every=2)
    run.work(5)  # two steps, a checkpoint, two steps
    assert run.lose("oslo") == [Disconnect("oslo"), Order("tokyo", Pause(epoch=1))]
    assert run.lose("tokyo") == [Disconnect("tokyo")] and run.machine.awaited == set(DEVICES)
    assert run.log(DeviceOffered(device="tokyo")) == [], "a plan for one device is worth less than a moment's timeout"
    assert run.log(DeviceOffered(device="oslo")) == recall(1)
    run.log(PlanMade(layout=TWO))
    begin = run.come(*DEVICES)[0]
    assert isinstance(begin, BeginEpoch) and (begin.step, begin.from_checkpoint) == (2, True)
    assert run.machine.statistics().phase == "running"


def test_only_so_often_from_the_same_state() -> None:
    run = Run()
    for attempt in range(1, MOST_RECALLS + 1):
        run.work(3)
        assert run.lose_all_and_begin_anew() == recall(attempt)
    halt, finish = run.lose_all_and_begin_anew()
    assert isinstance(halt, Halt) and isinstance(finish, FinishRun) and finish.outcome == "lost"
    assert KILLED in finish.reason and f"again {MOST_RECALLS} times, each time from the state after" in finish.reason


def test_as_often_as_it_takes_where_each_time_more_is_saved() -> None:
    run = Run(save_every=2)
    for _ in range(2 * MOST_RECALLS):
        run.work(6)
        assert run.lose_all_and_begin_anew() == recall(1)


def test_whom_no_plan_can_do_without_is_waited_for() -> None:
    run = Run()
    run.lose("tokyo")
    assert run.log(FromDevice("oslo", Inventory(holdings=()))) == [MakePlan(("oslo",), waits=True)]
    assert run.log(NoPlan(reason="oslo is too small")) == [] and run.machine.awaited == {"tokyo"}
    told, plan = run.log(DeviceOffered(device="tokyo"))
    assert isinstance(told, RestartRun) and told.reasons == f"tokyo: {KILLED}" and plan == MakePlan(DEVICES, waits=True)


def test_who_was_offered_while_there_was_no_plan_for_the_others() -> None:
    run = Run()
    run.lose("tokyo")
    run.log(FromDevice("oslo", Inventory(holdings=())))
    run.log(DeviceOffered(device="tokyo"))
    assert run.log(NoPlan(reason="oslo is too small"))[-1] == MakePlan(DEVICES, waits=True)
    _, finish = run.log(NoPlan(reason="both are too small"))
    assert isinstance(finish, FinishRun) and "both are too small" in finish.reason


def test_who_does_not_come_back_after_all_is_done_without() -> None:
    run = Run()
    run.lose(*DEVICES)
    run.log(DeviceOffered(device="oslo"))
    out = run.lose("tokyo", returns=False)
    assert out[-1] == MakePlan(("oslo",), waits=True)
    run = Run()
    run.lose(*DEVICES)
    run.lose("oslo", returns=False)
    *_, finish = run.lose("tokyo", returns=False)
    assert isinstance(finish, FinishRun) and "no other device is left" in finish.reason


def queue(run: Run, *devices: str) -> list[CoordinatorInstruction]:
    return run.log(DevicesQueued(devices=frozenset(devices)))


def test_who_is_queued_by_its_engine_is_waited_for_until_it_has_started() -> None:
    run = Run()
    run.lose("tokyo")
    run.log(FromDevice("oslo", Inventory(holdings=())))
    assert queue(run, "tokyo") == []
    assert run.log(NoPlan(reason="oslo is too small")) == []
    assert (run.machine.awaited, run.machine.queued) == (set(), {"tokyo"}), "there is no time limit"
    assert queue(run) == [] and (run.machine.awaited, run.machine.queued) == ({"tokyo"}, set()), "it starts"
    _, plan = run.log(DeviceOffered(device="tokyo"))
    assert plan == MakePlan(DEVICES, waits=True)


def test_who_is_queued_is_not_waited_for_where_there_is_a_plan_without_it() -> None:
    run = Run()
    run.lose(*DEVICES)
    queue(run, *DEVICES)
    assert queue(run, "tokyo") == [] and run.machine.awaited == {"oslo"}
    told, plan = run.log(DeviceOffered(device="oslo"))
    assert isinstance(told, RestartRun) and plan == MakePlan(("oslo",), waits=True)
    run.log(PlanMade(layout=StateLayout(parts={"oslo": A | B})))
    assert isinstance(run.log(DeviceJoined(device="oslo"))[0], BeginEpoch)
    run.log(FromDevice("oslo", DeviceReady()))
    assert run.machine.statistics().phase == "running"


def test_attempts_without_a_plan_do_not_count_while_more_devices_are_queued() -> None:
    run = Run()
    run.lose(*DEVICES)
    queue(run, *DEVICES)
    for device in DEVICES * MOST_RECALLS:
        assert run.log(DeviceOffered(device=device))[-1] == MakePlan((device,), waits=True)
        assert run.log(NoPlan(reason="it is too small")) == []
        run.lose(device)
    run.log(DeviceOffered(device="oslo"))
    run.log(DeviceOffered(device="tokyo"))
    assert run.log(NoPlan(reason="oslo is too small")) == recall(1)


def test_who_leaves_the_queue_and_is_lost_for_good_ends_the_run() -> None:
    run = Run()
    run.lose(*DEVICES)
    queue(run, *DEVICES)
    queue(run)
    assert run.machine.awaited == set(DEVICES)
    run.lose("oslo", returns=False)
    *_, finish = run.lose("tokyo", returns=False)
    assert isinstance(finish, FinishRun) and "no other device is left" in finish.reason


def test_a_stop_ends_the_wait_for_the_queue() -> None:
    run = Run()
    run.lose("tokyo")
    run.log(FromDevice("oslo", Inventory(holdings=())))
    queue(run, "tokyo")
    run.log(NoPlan(reason="oslo is too small"))
    assert run.log(StopRequested())[-1] == FinishRun("interrupted")
    run = Run()
    run.lose("tokyo")
    run.log(FromDevice("oslo", Inventory(holdings=())))
    queue(run, "tokyo")
    run.log(StopRequested())
    assert run.log(NoPlan(reason="oslo is too small"))[-1] == FinishRun("interrupted")


def test_a_person_need_not_wait_for_them() -> None:
    run = Run()
    run.lose(*DEVICES)
    assert run.log(StopRequested()) == [Halt(epoch=2), FinishRun("interrupted")]
