import msgspec
import pytest

from isthmus.protocol import Coordinator, Item, RunSpec, items
from isthmus.protocol.coordinator_events import (
    AssignStage,
    CommitCheckpoint,
    CoordinatorInstruction,
    DeviceJoined,
    DeviceLost,
    FinishRun,
    ItemDone,
    Order,
    StopRequested,
)
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.run_messages import DeviceReady, Halt, ItemReported, OpenItem, PlaceWeights

DEVICES = ("oslo", "tokyo")


def spec(**fields: int) -> RunSpec:
    return RunSpec(**{"steps": 4, "micro_batches": 2, "micro_batch_size": 1, "lease_ahead": 2, **fields})


def running(run: RunSpec) -> Coordinator:
    coordinator = Coordinator(DEVICES, run)
    for event in (*(DeviceJoined(device=d) for d in DEVICES), *(FromDevice(d, DeviceReady()) for d in DEVICES)):
        coordinator.handle(event)
    return coordinator


def report(coordinator: Coordinator, item: int, loss: float | None = None) -> list[CoordinatorInstruction]:
    """Both devices finish an item; what the second report leads to."""
    assert coordinator.handle(FromDevice("tokyo", ItemReported(item=item, loss=loss, count=loss and 2.0))) == []
    return coordinator.handle(FromDevice("oslo", ItemReported(item=item)))


def test_nothing_is_placed_before_all_have_joined():
    coordinator = Coordinator(DEVICES, spec())
    assert coordinator.handle(DeviceJoined(device="tokyo")) == []
    assert coordinator.handle(DeviceJoined(device="tokyo")) == []
    assert coordinator.handle(DeviceJoined(device="oslo")) == [
        AssignStage("oslo"),
        Order("oslo", PlaceWeights()),
        AssignStage("tokyo"),
        Order("tokyo", PlaceWeights()),
    ]
    assert coordinator.statistics().phase == "placing"


def test_items_are_leased_ahead_once_all_are_ready():
    coordinator = Coordinator(DEVICES, spec(lease_ahead=3))
    for device in DEVICES:
        coordinator.handle(DeviceJoined(device=device))
    assert coordinator.handle(FromDevice("oslo", DeviceReady())) == []
    first_three = [item for item, _ in zip(items(spec()), range(3), strict=False)]
    assert coordinator.handle(FromDevice("tokyo", DeviceReady())) == [OpenItem(item=item) for item in first_three]


def test_the_slowest_device_sets_the_pace():
    coordinator = running(spec())
    t0, _, t2, t3, _ = items(spec())
    assert coordinator.handle(FromDevice("oslo", ItemReported(item=0))) == []
    assert coordinator.handle(FromDevice("oslo", ItemReported(item=1))) == []
    assert coordinator.handle(FromDevice("tokyo", ItemReported(item=0, loss=6.0, count=4.0))) == [
        ItemDone(t0, 1.5),
        OpenItem(item=t2),
    ]
    assert coordinator.handle(FromDevice("tokyo", ItemReported(item=1, loss=6.0, count=0.0)))[1:] == [OpenItem(item=t3)]
    assert coordinator.statistics().finished == 2


def test_a_loss_that_counted_nothing_is_no_loss():
    coordinator = running(spec())
    (advance, *_) = report(coordinator, 0, loss=0.0)
    assert advance == ItemDone(next(items(spec())), None)


def test_a_checkpoint_is_committed_when_all_parts_are_written_and_the_run_ends_with_one():
    run = spec(steps=2, save_every=1)
    coordinator = running(run)
    t0, s1, t1, s2 = items(run)
    assert report(coordinator, 0, loss=3.0) == [ItemDone(t0, 1.5), OpenItem(item=t1)]
    assert report(coordinator, 1) == [ItemDone(s1), CommitCheckpoint(s1), OpenItem(item=s2)]
    assert report(coordinator, 2, loss=1.0) == [ItemDone(t1, 0.5)]
    assert report(coordinator, 3) == [ItemDone(s2), CommitCheckpoint(s2), Halt(), FinishRun("done")]
    assert coordinator.statistics().phase == "done"


def test_a_run_without_steps_ends_at_once():
    coordinator = Coordinator(("oslo",), spec(steps=3, start_step=3))
    coordinator.handle(DeviceJoined(device="oslo"))
    assert coordinator.handle(FromDevice("oslo", DeviceReady())) == [Halt(), FinishRun("done")]


def test_an_interrupted_run_finishes_what_is_leased_saves_and_leaves():
    coordinator = running(spec())
    t0, t1, *_ = items(spec())
    save = Item(index=2, kind="save", step=2)
    assert coordinator.handle(StopRequested()) == [OpenItem(item=save)]
    assert coordinator.handle(StopRequested()) == []
    assert report(coordinator, 0) == [ItemDone(t0)]
    assert report(coordinator, 1) == [ItemDone(t1)]
    assert report(coordinator, 2) == [ItemDone(save), CommitCheckpoint(save), Halt(), FinishRun("interrupted")]


@pytest.mark.parametrize("start", [2, 4])
def test_an_evaluation_that_a_stop_interrupted_is_made_when_the_run_goes_on(start: int):
    fields = {"eval_every": 2, "eval_micro_batches": 3, "lease_ahead": 9}
    coordinator = running(msgspec.structs.replace(spec(**fields, start_step=start), eval_due=True))
    opened = [item for _, item in sorted(coordinator._leases.open.items())]  # pyright: ignore[reportPrivateUsage]
    evaluated = [(item.step, item.first_sample) for item in opened if item.kind == "eval"]
    assert evaluated == [(step, first) for step in range(start, 5, 2) for first in (0, 2)]
    assert [item.step for item in opened if item.kind == "save"] == [4] * (start < 4)
    outs = [report(coordinator, item.index) for item in opened]
    assert outs[-1][-1] == FinishRun("done")


def test_an_interrupted_run_does_not_save_twice():
    run = spec(save_every=1)
    coordinator = running(run)  # the newest lease is the checkpoint after step 0
    assert coordinator.handle(StopRequested()) == []
    report(coordinator, 0)
    assert report(coordinator, 1)[1:] == [
        CommitCheckpoint(Item(index=1, kind="save", step=1)),
        Halt(),
        FinishRun("interrupted"),
    ]


def test_an_interrupt_after_the_last_lease_changes_nothing():
    coordinator = running(spec(steps=1))
    assert coordinator.handle(StopRequested()) == []
    report(coordinator, 0)
    assert report(coordinator, 1)[-1] == FinishRun("done")


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_an_interrupt_before_the_first_step_ends_the_run(joined: int):
    coordinator = Coordinator(DEVICES, spec())
    for device in DEVICES[:joined]:
        coordinator.handle(DeviceJoined(device=device))
    assert coordinator.handle(StopRequested()) == [Halt(), FinishRun("interrupted")]


@pytest.mark.parametrize("phase", ["joining", "running", "closing"])
def test_a_lost_device_ends_the_run_in_any_phase(phase: str):
    coordinator = Coordinator(DEVICES, spec()) if phase == "joining" else running(spec())
    if phase == "closing":
        coordinator.handle(StopRequested())
    assert coordinator.statistics().phase == phase
    lost = coordinator.handle(DeviceLost(device="tokyo", reason="no heartbeat for 5 s"))
    assert lost == [Halt(), FinishRun("lost", "device 'tokyo' was lost: no heartbeat for 5 s")]
    assert coordinator.handle(DeviceLost(device="oslo", reason="left")) == []
    assert coordinator.handle(FromDevice("oslo", ItemReported(item=0))) == []


def test_a_stale_epoch_is_dropped_and_counted():
    coordinator = Coordinator(DEVICES, spec(), epoch=2)
    assert coordinator.handle(DeviceLost(device="oslo", reason="of an older plan", epoch=1)) == []
    assert coordinator.statistics().stale == 1
    assert coordinator.statistics().phase == "joining"
    assert coordinator.handle(DeviceLost(device="oslo", reason="of this plan", epoch=2))[0] == Halt(epoch=2)
