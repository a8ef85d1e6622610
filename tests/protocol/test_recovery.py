"""Which state counts, who has it, and what the coordinator does about a loss: instruction lists."""

from hypothesis import given
from hypothesis import strategies as st

from isthmus.protocol import Coordinator, Lineage, RunSpec, StateHolding, StateLayout
from isthmus.protocol.coordinator_events import (
    AssignStage,
    BeginEpoch,
    CallDevice,
    CoordinatorInstruction,
    DeviceJoined,
    DeviceLeaving,
    DeviceLost,
    DeviceOffered,
    Disconnect,
    FinishRun,
    MakePlan,
    NoPlan,
    Order,
    PlanMade,
    ReleaseDevice,
)
from isthmus.protocol.device_session import StateInventory
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.recovery import recovery_step, state_donors
from isthmus.protocol.run_events import Note, Observation
from isthmus.protocol.run_machine import RunMachine
from isthmus.protocol.run_messages import (
    DeviceReady,
    FetchState,
    Inventory,
    ItemReported,
    OpenItem,
    Pause,
    PlaceWeights,
    RetireSnapshots,
    SnapshotCopied,
    StateFetched,
)

A, B = frozenset({"a"}), frozenset({"b"})
TWO = StateLayout(parts={"oslo": A, "tokyo": B}, snapshot_copies={"oslo": "tokyo", "tokyo": "oslo"}, keep_every=2)


def held(epoch: int, step: int, parts: frozenset[str]) -> StateHolding:
    return StateHolding(epoch=epoch, step=step, parts=parts)


def test_what_was_done_beyond_the_step_that_others_went_on_from_does_not_count():
    lineage = Lineage([(0, 0), (1, 40)])
    assert lineage.counts(0, 40) and not lineage.counts(0, 47)
    assert lineage.counts(1, 47) and not lineage.counts(1, 39) and not lineage.counts(2, 47)
    lineage.begin(3, 45)
    assert lineage.counts(1, 45) and not lineage.counts(1, 46)


def test_the_newest_step_that_is_held_whole():
    holdings = {"oslo": [held(0, 4, A | B), held(0, 6, A)], "tokyo": [held(0, 5, B), held(0, 7, A | B)]}
    assert recovery_step(A | B, holdings, Lineage([(0, 0)])) == 7
    assert recovery_step(A | B, holdings, Lineage([(0, 0), (1, 6)])) == 4
    assert recovery_step(A | B, {"oslo": [held(0, 6, A)]}, Lineage([(0, 0)])) is None


sets = st.sets(st.sampled_from("abcdef"))


@given(st.dictionaries(st.sampled_from("xyz"), sets), st.dictionaries(st.sampled_from("xyzuv"), sets))
def test_each_missing_part_is_lent_once_by_one_who_has_it(needs: dict[str, set[str]], holds: dict[str, set[str]]):
    somewhere = set[str]().union(*holds.values())
    needs = {device: wanted & somewhere for device, wanted in needs.items()}
    found = state_donors(needs, holds)
    given_parts = [part for parts in found.values() for part in parts]
    missing = {part for device, wanted in needs.items() for part in wanted - holds.get(device, set())}
    assert sorted(given_parts) == sorted(missing)
    assert all(parts <= holds[device] for device, parts in found.items())


def test_a_memory_forgets_what_is_of_no_use():
    memory: StateInventory[int] = StateInventory()
    for step in (2, 4, 6):
        memory.keep(0, step, {"a": step})
    memory.keep(0, 4, {"b": 40})
    assert memory.values(4, {"a", "b", "c"}) == {"a": 4, "b": 40}
    memory.retire(4)
    memory.begin(4)
    assert memory.holdings() == (held(0, 4, A | B),)
    memory.keep(1, 4, {"a": -4})
    assert memory.values(4, {"a", "b"}) == {"a": -4, "b": 40}


def running(layout: StateLayout = TWO, **fields: int) -> Coordinator:
    spec = RunSpec(**{"steps": 9, "micro_batches": 1, "micro_batch_size": 1, "lease_ahead": 2, **fields})
    coordinator = Coordinator(layout.parts, spec, layout=layout)
    for device in layout.parts:
        coordinator.handle(DeviceJoined(device=device))
    for device in layout.parts:
        coordinator.handle(FromDevice(device, DeviceReady()))
    return coordinator


def report(coordinator: Coordinator, *items: int) -> list[CoordinatorInstruction]:
    out: list[CoordinatorInstruction] = []
    for item in items:
        for device in coordinator.devices:
            out += coordinator.handle(FromDevice(device, ItemReported(item=item, epoch=coordinator.epoch)))
    return out


def kinds(instructions: list[CoordinatorInstruction]) -> list[type[CoordinatorInstruction]]:
    return [type(i) for i in instructions]


def test_a_snapshot_is_leased_and_acknowledged_when_all_copies_are_there():
    coordinator = running()
    opened = [i.item.kind for i in report(coordinator, 0, 1) if isinstance(i, OpenItem)]
    assert opened == ["keep", "train"]
    report(coordinator, 2)
    assert coordinator.handle(FromDevice("tokyo", SnapshotCopied(of="oslo", step=2))) == []
    assert coordinator.statistics().recovery_point == 0
    assert coordinator.handle(FromDevice("oslo", SnapshotCopied(of="tokyo", step=2))) == [RetireSnapshots(step=2)]
    assert coordinator.statistics().recovery_point == 2


def test_a_loss_from_beginning_to_end():
    coordinator = running()
    report(coordinator, 0, 1, 2)
    assert coordinator.handle(DeviceLost(device="tokyo", reason="silent")) == [
        Disconnect("tokyo"),
        Order("oslo", Pause(epoch=1)),
    ]
    assert coordinator.handle(FromDevice("oslo", ItemReported(item=3, epoch=0))) == [], "of an epoch that is over"
    holdings = (held(0, 2, A | B), held(0, 3, A))
    assert coordinator.handle(FromDevice("oslo", Inventory(holdings=holdings, epoch=1))) == [
        MakePlan(("oslo",), waits=True)
    ]
    out = coordinator.handle(PlanMade(layout=StateLayout(parts={"oslo": A | B}), epoch=1))
    assert out[0] == BeginEpoch(1, 2, coordinator.statistics().leased, False)
    assert out[1:] == [AssignStage("oslo"), Order("oslo", PlaceWeights(own=A | B, epoch=1))]
    (first, *_) = coordinator.handle(FromDevice("oslo", DeviceReady(epoch=1)))
    assert isinstance(first, OpenItem) and (first.item.kind, first.item.step) == ("train", 2)


def test_what_a_device_lacks_is_fetched_before_it_is_placed():
    coordinator = running()
    coordinator.handle(DeviceLost(device="tokyo", reason="silent"))
    coordinator.handle(DeviceJoined(device="lima", epoch=1))
    assert kinds(coordinator.handle(FromDevice("oslo", Inventory(holdings=(held(0, 0, A | B),), epoch=1)))) == [
        MakePlan
    ]
    layout = StateLayout(parts={"oslo": A, "lima": B})
    out = coordinator.handle(PlanMade(layout=layout, epoch=1))
    assert out[1:] == [Order("oslo", FetchState(step=0, parts=B, epoch=1))]
    assert coordinator.awaited == {"oslo"}
    assert coordinator.handle(FromDevice("oslo", StateFetched(epoch=1))) == [
        AssignStage("oslo"),
        Order("oslo", PlaceWeights(own=A, epoch=1)),
        AssignStage("lima"),
        Order("lima", PlaceWeights(epoch=1)),
    ]


def test_a_loss_in_the_middle_of_a_recovery_begins_it_again():
    coordinator = running(StateLayout(parts={"oslo": A, "tokyo": B, "lima": frozenset({"c"})}))
    coordinator.handle(DeviceLost(device="tokyo", reason="silent"))
    coordinator.handle(FromDevice("oslo", Inventory(holdings=(), epoch=1)))
    assert coordinator.handle(DeviceLost(device="lima", reason="silent", epoch=1)) == [
        Disconnect("lima"),
        Order("oslo", Pause(epoch=2)),
    ]
    assert coordinator.handle(FromDevice("oslo", Inventory(holdings=(), epoch=1))) == []
    assert coordinator.handle(FromDevice("oslo", Inventory(holdings=(), epoch=2))) == [MakePlan(("oslo",), waits=True)]
    told = coordinator.handle(NoPlan(reason="it does not fit", epoch=2))[-1]
    assert told == FinishRun("lost", "device 'lima' was lost: silent; no plan for what is left: it does not fit")


def test_who_leaves_waits_until_the_others_hold_its_part():
    coordinator = running()
    assert coordinator.handle(DeviceLeaving(device="tokyo")) == [MakePlan(("oslo",), must=True)]
    assert coordinator.handle(PlanMade(layout=StateLayout(parts={"oslo": A | B}))) == []
    assert not [i for i in report(coordinator, 0) if isinstance(i, OpenItem)], "nothing more is leased"
    assert report(coordinator, 1)[1:] == [Order("oslo", Pause(epoch=1)), Order("tokyo", Pause(epoch=1))]
    coordinator.handle(FromDevice("oslo", Inventory(holdings=(held(0, 2, A),), epoch=1)))
    out = coordinator.handle(FromDevice("tokyo", Inventory(holdings=(held(0, 2, B),), epoch=1)))
    assert out == [BeginEpoch(1, 2, 2, False), Order("tokyo", FetchState(step=2, parts=B, epoch=1))]
    coordinator.handle(FromDevice("tokyo", StateFetched(epoch=1)))
    assert coordinator.handle(FromDevice("oslo", DeviceReady(epoch=1)))[-1] == ReleaseDevice("tokyo")


def leaving(*devices: str) -> RunMachine:
    """A run of two devices, which were asked to leave."""
    machine = RunMachine(running(), timeout_s=9.0)
    for device in ("oslo", "tokyo"):
        machine.handle(DeviceJoined(device=device), 0.0)
    machine.handle(Observation(leaving=frozenset(devices)), 1.0)
    return machine


def test_who_cannot_leave_stays_and_it_is_said():
    machine = leaving("oslo", "tokyo")
    stays = "was asked to leave and stays: no plan could be made without it: too small; ask again to try again"
    out = machine.handle(NoPlan(reason="too small"), 2.0)
    assert out == [Note(f"oslo {stays}"), Note(f"tokyo {stays}")]
    assert machine.handle(NoPlan(reason="too small"), 3.0) == [], "nobody is to leave"
    again = machine.handle(Observation(leaving=frozenset({"tokyo"})), 4.0)
    assert [i.devices for i in again if isinstance(i, MakePlan)] == [("oslo",)]


def test_a_run_that_ends_for_want_of_a_device_that_was_to_leave_says_so():
    machine = leaving("tokyo")
    machine.handle(DeviceLost(device="oslo", reason="silent"), 2.0)
    machine.handle(FromDevice("tokyo", Inventory(holdings=(held(0, 2, B),), epoch=1)), 2.0)
    *_, finish, note = machine.handle(NoPlan(reason="none", epoch=1), 3.0)
    assert isinstance(finish, FinishRun) and finish.outcome == "lost"
    assert note == Note("tokyo was asked to leave: the plan that could not be made was one without it")


def test_the_work_goes_on_while_a_device_starts_that_a_better_plan_wants():
    coordinator = running()
    assert coordinator.handle(DeviceOffered(device="lima")) == [MakePlan(("lima", "oslo", "tokyo"), must=False)]
    better = StateLayout(parts={"oslo": A, "lima": B})
    assert coordinator.handle(PlanMade(layout=better)) == [CallDevice("lima")]
    assert [i.item.step for i in report(coordinator, 0) if isinstance(i, OpenItem)] == [2], "nobody waits"
    assert coordinator.handle(DeviceJoined(device="lima")) == []
    assert not [i for i in report(coordinator, 1) if isinstance(i, OpenItem)], "what is leased is finished first"
    assert Order("lima", Pause(epoch=1)) in report(coordinator, 2)


def test_a_better_plan_is_forgotten_with_a_device_that_it_wants():
    coordinator = running()
    coordinator.handle(DeviceOffered(device="lima"))
    coordinator.handle(PlanMade(layout=StateLayout(parts={"oslo": A, "lima": B})))
    coordinator.handle(DeviceLost(device="lima", reason="it did not start"))
    assert coordinator.handle(DeviceJoined(device="lima")) == [MakePlan(("lima", "oslo", "tokyo"), must=False)]


def test_who_could_work_and_does_not_is_thought_of_when_a_plan_is_in_force():
    coordinator = running()
    coordinator.handle(DeviceOffered(device="lima"))
    coordinator.handle(DeviceLost(device="tokyo", reason="silent"))
    assert coordinator.handle(FromDevice("oslo", Inventory(holdings=(held(0, 0, A | B),), epoch=1))) == [
        MakePlan(("lima", "oslo"), waits=True)
    ]
    coordinator.handle(PlanMade(layout=StateLayout(parts={"oslo": A | B}), epoch=1))
    assert coordinator.handle(FromDevice("oslo", DeviceReady(epoch=1)))[-1] == MakePlan(("lima", "oslo"), must=False)
