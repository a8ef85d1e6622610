from functools import partial

import msgspec
import pytest
from tests.programs.ports import Asked
from tests.protocol.recorded import Recorded, done, ended, halted, opened

from isthmus.protocol import Item, Lineage, RunSpec, StateLayout, items
from isthmus.protocol.run_messages import DeviceReady, ItemReported, PlaceWeights
from isthmus.session.program import OutOfPhase

DEVICES = ("oslo", "tokyo")


def spec(**fields: int) -> RunSpec:
    return RunSpec(**{"steps": 4, "micro_batches": 2, "micro_batch_size": 1, "lease_ahead": 2, **fields})


def running(run: RunSpec) -> Recorded:
    coordinator = Recorded(DEVICES, run)
    for device in DEVICES:
        coordinator.joined(device)
    for device in DEVICES:
        coordinator.takes(device, DeviceReady())
    return coordinator


def report(coordinator: Recorded, item: int, loss: float | None = None) -> list[Asked]:
    """Both devices finish an item; what the second report leads to."""
    assert coordinator.tell(coordinator.takes, "tokyo", ItemReported(item=item, loss=loss, count=loss and 2.0)) == []
    return coordinator.tell(coordinator.takes, "oslo", ItemReported(item=item))


def test_nothing_is_placed_before_all_have_joined():
    coordinator = Recorded(DEVICES, spec())
    assert coordinator.tell(coordinator.joined, "tokyo") == []
    assert coordinator.tell(coordinator.joined, "tokyo") == []
    assert coordinator.tell(coordinator.joined, "oslo") == [
        ("assign_stage", "oslo"),
        ("order", "oslo", PlaceWeights()),
        ("assign_stage", "tokyo"),
        ("order", "tokyo", PlaceWeights()),
    ]
    assert coordinator.statistics().phase == "placing"


def test_items_are_leased_ahead_once_all_are_ready():
    coordinator = Recorded(DEVICES, spec(lease_ahead=3))
    for device in DEVICES:
        coordinator.joined(device)
    assert coordinator.tell(coordinator.takes, "oslo", DeviceReady()) == []
    first_three = [item for item, _ in zip(items(spec()), range(3), strict=False)]
    assert coordinator.tell(coordinator.takes, "tokyo", DeviceReady()) == [opened(item) for item in first_three]


def test_the_slowest_device_sets_the_pace():
    coordinator = running(spec())
    t0, _, t2, t3, _ = items(spec())
    assert coordinator.tell(coordinator.takes, "oslo", ItemReported(item=0)) == []
    assert coordinator.tell(coordinator.takes, "oslo", ItemReported(item=1)) == []
    assert coordinator.tell(coordinator.takes, "tokyo", ItemReported(item=0, loss=6.0, count=4.0)) == [
        done(t0, 1.5),
        opened(t2),
    ]
    assert coordinator.tell(coordinator.takes, "tokyo", ItemReported(item=1, loss=6.0, count=0.0))[1:] == [opened(t3)]
    assert coordinator.statistics().finished == 2


def test_a_loss_that_counted_nothing_is_no_loss():
    coordinator = running(spec())
    (advance, *_) = report(coordinator, 0, loss=0.0)
    assert advance == ("item_done", next(items(spec())), None, "", ())


def test_a_checkpoint_is_committed_when_all_parts_are_written_and_the_run_ends_with_one():
    run = spec(steps=2, save_every=1)
    coordinator = running(run)
    t0, s1, t1, s2 = items(run)
    assert report(coordinator, 0, loss=3.0) == [done(t0, 1.5), opened(t1)]
    assert report(coordinator, 1) == [done(s1), ("commit_checkpoint", s1, True), opened(s2)]
    assert report(coordinator, 2, loss=1.0) == [done(t1, 0.5)]
    assert report(coordinator, 3) == [done(s2), ("commit_checkpoint", s2, True), halted(), ended("done")]
    assert coordinator.statistics().phase == "over"


def test_a_checkpoint_of_which_a_part_is_doubtful_is_given_up_and_made_of_the_steps_that_are_leased():
    run = spec(steps=3, save_every=2)
    coordinator = running(run)
    t0, t1, s2, t2, _ = items(run)
    assert report(coordinator, 0) == [done(t0), opened(s2)]
    assert report(coordinator, 1) == [done(t1), opened(t2)]
    coordinator.takes("tokyo", ItemReported(item=2, doubt="it is not there"))
    again = Item(index=4, kind="save", step=3)
    given_up = ("give_up_checkpoint", s2, "tokyo", "it is not there")
    found = coordinator.tell(coordinator.takes, "oslo", ItemReported(item=2, doubt="nor this"))
    assert found == [done(s2), given_up, opened(again)]
    assert report(coordinator, 3) == [done(t2)], "and the last checkpoint is under way"
    assert report(coordinator, 4) == [done(again), ("commit_checkpoint", again, True), halted(), ended("done")]


def test_a_checkpoint_that_is_given_up_waits_for_the_next_one_if_that_is_leased():
    run = spec(steps=2, save_every=1, lease_ahead=3)
    coordinator = running(run)
    t0, s1, t1, s2 = items(run)
    assert report(coordinator, 0) == [done(t0), opened(s2)]
    coordinator.takes("tokyo", ItemReported(item=1, doubt="it is not there"))
    found = coordinator.tell(coordinator.takes, "oslo", ItemReported(item=1))
    assert found == [done(s1), ("give_up_checkpoint", s1, "tokyo", "it is not there")]
    assert report(coordinator, 2) == [done(t1)]
    assert report(coordinator, 3) == [done(s2), ("commit_checkpoint", s2, True), halted(), ended("done")]


def test_a_run_without_steps_ends_at_once():
    coordinator = Recorded(("oslo",), spec(steps=3, start_step=3))
    coordinator.joined("oslo")
    assert coordinator.tell(coordinator.takes, "oslo", DeviceReady()) == [halted(), ended("done")]


def test_an_interrupted_run_finishes_what_is_leased_saves_and_leaves():
    coordinator = running(spec())
    t0, t1, *_ = items(spec())
    save = Item(index=2, kind="save", step=2)
    assert coordinator.tell(coordinator.stop) == [opened(save)]
    assert coordinator.tell(coordinator.stop) == []
    assert report(coordinator, 0) == [done(t0)]
    assert report(coordinator, 1) == [done(t1)]
    assert report(coordinator, 2) == [done(save), ("commit_checkpoint", save, True), halted(), ended("interrupted")]


@pytest.mark.parametrize("start", [2, 4])
def test_an_evaluation_that_a_stop_interrupted_is_made_when_the_run_goes_on(start: int):
    fields = {"eval_every": 2, "eval_micro_batches": 3, "lease_ahead": 9}
    coordinator = running(msgspec.structs.replace(spec(**fields, start_step=start), eval_due=True))
    opened = [item for _, item in sorted(coordinator.leases.open.items())]
    evaluated = [(item.step, item.first_sample) for item in opened if item.kind == "eval"]
    assert evaluated == [(step, first) for step in range(start, 5, 2) for first in (0, 2)]
    assert [item.step for item in opened if item.kind == "save"] == [4] * (start < 4)
    outs = [report(coordinator, item.index) for item in opened]
    assert outs[-1][-1] == ended("done")


def test_an_interrupted_run_does_not_save_twice():
    run = spec(save_every=1)
    coordinator = running(run)  # the newest lease is the checkpoint after step 0
    assert coordinator.tell(coordinator.stop) == []
    report(coordinator, 0)
    assert report(coordinator, 1)[1:] == [
        ("commit_checkpoint", Item(index=1, kind="save", step=1), True),
        halted(),
        ended("interrupted"),
    ]


def test_an_interrupt_after_the_last_lease_changes_nothing():
    coordinator = running(spec(steps=1))
    assert coordinator.tell(coordinator.stop) == []
    report(coordinator, 0)
    assert report(coordinator, 1)[-1] == ended("done")


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_an_interrupt_before_the_first_step_ends_the_run(joined: int):
    coordinator = Recorded(DEVICES, spec())
    for device in DEVICES[:joined]:
        coordinator.joined(device)
    assert coordinator.tell(coordinator.stop) == [halted(), ended("interrupted")]


@pytest.mark.parametrize("phase", ["joining", "running", "closing"])
def test_a_lost_device_ends_the_run_in_any_phase(phase: str):
    coordinator = Recorded(DEVICES, spec()) if phase == "joining" else running(spec())
    if phase == "closing":
        coordinator.stop()
    assert coordinator.statistics().phase == phase
    lost = coordinator.tell(coordinator.loses, "tokyo", "no heartbeat for 5 s")
    assert lost == [halted(), ended("lost", "device 'tokyo' was lost: no heartbeat for 5 s")]
    assert coordinator.tell(coordinator.loses, "oslo", "left") == []
    assert coordinator.tell(coordinator.takes, "oslo", ItemReported(item=0)) == []


def test_what_is_of_another_epoch_is_dropped_and_counted():
    coordinator = Recorded(DEVICES, spec(), lineage=Lineage([(1, 0)]))
    assert coordinator.tell(coordinator.takes, "oslo", ItemReported(item=0, epoch=1)) == []
    assert coordinator.tell(coordinator.gets, 3, StateLayout(parts={"oslo": frozenset()})) == []
    assert coordinator.tell(coordinator.gets_none, 1, "too small") == []
    assert coordinator.statistics().stale == 3
    assert coordinator.statistics().phase == "joining"
    assert coordinator.tell(coordinator.loses, "oslo", "silent")[0] == halted(2)


def test_a_plan_that_nobody_can_have_asked_for_is_out_of_phase():
    coordinator = Recorded(DEVICES, spec(), layout=StateLayout(parts=dict.fromkeys(DEVICES, frozenset({"w"}))))
    for device in DEVICES:
        coordinator.joined(device)
    coordinator.loses("oslo", "silent")
    assert coordinator.phase == "holding"
    for call in (partial(coordinator.gets, 1, coordinator.layout), partial(coordinator.gets_none, 1, "none")):
        with pytest.raises(OutOfPhase, match="phase 'holding'"):
            call()
