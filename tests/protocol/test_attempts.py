"""How often a run tries again before it gives up, and whom it blames."""

from __future__ import annotations

from tests.programs.ports import Asked
from tests.protocol.recorded import Recorded, ended, halted, planning

from isthmus.protocol import RunSpec, StateLayout
from isthmus.protocol.run_messages import DeviceFailed, DeviceReady, Inventory, ItemReported, Pause
from isthmus.protocol.step_failures import Attempts, StepFailure

ALL = ("oslo", "tokyo")
LABEL = StepFailure(step=0, what="aten.nll_loss", reason="Target 39 is out of bounds")


def layout(*devices: str) -> StateLayout:
    return StateLayout(parts={d: frozenset({"w"}) for d in devices})


def running(**fields: int) -> Recorded:
    spec = RunSpec(**{"steps": 9, "micro_batches": 1, "micro_batch_size": 1, "lease_ahead": 1, **fields})
    machine = Recorded(ALL, spec, layout=layout(*ALL))
    for device in ALL:
        machine.joined(device)
    ready(machine)
    return machine


def ready(machine: Recorded) -> None:
    for device in machine.devices:
        machine.takes(device, DeviceReady(epoch=machine.epoch))
    assert machine.statistics().phase == "running"


def held(machine: Recorded, *devices: str) -> list[Asked]:
    """Those who are left say what they hold; what the last of them leads to."""
    return [machine.tell(machine.takes, d, Inventory(holdings=(), epoch=machine.epoch)) for d in devices][-1]


def lose(machine: Recorded, device: str) -> list[Asked]:
    return machine.tell(machine.loses, device, "it hung up")


def begin_again(machine: Recorded, *lost: str) -> None:
    """With those who are left, and the lost ones, who came back."""
    for device in lost:
        machine.joined(device)
    held(machine, *ALL)
    machine.gets(machine.epoch, layout(*ALL))
    ready(machine)


def step(machine: Recorded, item: int) -> None:
    for device in machine.devices:
        machine.takes(device, ItemReported(item=item, epoch=machine.epoch))


def fail(machine: Recorded, device: str, failure: StepFailure = LABEL) -> list[Asked]:
    failed = DeviceFailed(reason=failure.reason, fault="user", failure=failure, epoch=machine.epoch)
    return machine.tell(machine.takes, device, failed)


def test_attempts_that_do_no_step_come_to_an_end():
    machine = running(recovery_attempts=3)
    for _ in range(3):
        assert not any(i[0] == "finish_run" for i in lose(machine, "oslo"))
        begin_again(machine, "oslo")
    halt, finish = lose(machine, "oslo")
    assert halt == halted(machine.epoch)
    assert finish == ended("lost", "device 'oslo' was lost: it hung up; 3 attempts to go on did no step")


def test_devices_that_blame_each_other_in_turn_are_no_way_out():
    attempts = Attempts(3)
    ended: list[bool] = []
    for device in ("oslo", "tokyo", "oslo", "tokyo", "oslo"):
        ended.append(attempts.lost(device))
        attempts.began()
    assert ended == [False, False, False, False, True]


def test_a_step_in_between_gives_new_attempts():
    machine = running(recovery_attempts=2)
    for number in range(5):
        assert not any(i[0] == "finish_run" for i in lose(machine, "oslo"))
        begin_again(machine, "oslo")
        step(machine, machine.statistics().leased - 1)
        assert machine.statistics().finished == number + 1


def test_many_devices_that_are_lost_at_once_are_one_attempt():
    attempts = Attempts(2)
    for ends in (False, False, True):
        assert [attempts.lost(f"device {number}") for number in range(50)] == [ends] * 50
        attempts.began()


def test_a_step_that_fails_alike_on_two_devices_is_the_jobs():
    machine = running()
    assert fail(machine, "oslo") == [("order", "oslo", Pause(epoch=1)), ("order", "tokyo", Pause(epoch=1))]
    assert held(machine, *ALL) == [planning("tokyo", waits=True)]
    machine.gets(machine.epoch, layout("tokyo"))
    ready(machine)
    reason = "device 'tokyo', as on device 'oslo' before: Target 39 is out of bounds"
    assert fail(machine, "tokyo") == [halted(1), ended("failed", reason)]


def test_a_device_that_is_needed_tries_twice():
    machine = running()
    fail(machine, "oslo")
    held(machine, *ALL)
    assert machine.tell(machine.gets_none, machine.epoch, "too large") == [planning(*ALL, waits=True)]
    machine.gets(machine.epoch, layout(*ALL))
    ready(machine)
    assert fail(machine, "oslo")[-1] == ended("failed", "device 'oslo', again: Target 39 is out of bounds")


def test_another_failure_or_another_step_is_not_the_same():
    machine = running()
    for failure in (LABEL, StepFailure(step=1, what=LABEL.what, reason=""), StepFailure(step=1, what="b", reason="")):
        stopped = fail(machine, "oslo", failure)
        assert ("order", "oslo", Pause(epoch=machine.epoch)) in stopped
        held(machine, *ALL)
        machine.gets_none(machine.epoch, "too large")
        machine.gets(machine.epoch, layout(*ALL))
        ready(machine)


def test_a_device_whose_step_others_can_do_stays_out_of_plans():
    machine = running()
    fail(machine, "oslo")
    held(machine, *ALL)
    machine.gets(machine.epoch, layout("tokyo"))
    ready(machine)
    step(machine, machine.statistics().leased - 1)
    asked = machine.tell(machine.fleet_changed)
    assert asked == [planning("tokyo", must=False)]


def test_a_device_that_did_the_step_after_all_is_trusted_again():
    machine = running()
    fail(machine, "oslo")
    held(machine, *ALL)
    machine.gets_none(machine.epoch, "too large")
    machine.gets(machine.epoch, layout(*ALL))
    ready(machine)
    step(machine, machine.statistics().leased - 1)
    fail(machine, "tokyo", StepFailure(step=1, what="b", reason=""))
    assert held(machine, *ALL) == [planning("oslo", waits=True)]
