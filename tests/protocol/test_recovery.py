"""Which state counts, who has it, and what the coordinator does about a loss: instruction lists."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.programs.ports import Asked, Recorder
from tests.protocol.recorded import Recorded, ended, planning

from isthmus.protocol import Item, Lineage, RunSpec, StateHolding, StateLayout
from isthmus.protocol.device_session import StateInventory
from isthmus.protocol.recovery import recovery_step, state_donors
from isthmus.protocol.run_messages import (
    DeviceReady,
    GiveState,
    Inventory,
    ItemReported,
    OpenItem,
    Pause,
    PlaceWeights,
    RetireSnapshots,
    SnapshotCopied,
    StateMissing,
    TakeState,
)
from isthmus.protocol.run_ports import EpochStart, FinishRun, PipelinePort, PlanRequest
from isthmus.session.program import OutOfPhase
from isthmus.session.session import Observation

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


needed = st.dictionaries(st.sampled_from("xyz"), sets)
holding = st.dictionaries(st.sampled_from("xyzuv"), sets)


@given(needed, holding)
def test_each_part_that_a_device_lacks_comes_from_one_who_has_it(
    needs: dict[str, set[str]], holds: dict[str, set[str]]
):
    somewhere = set[str]().union(*holds.values())
    found = state_donors(needs, holds)
    for device, wanted in needs.items():
        donors = found.get(device, {})
        given_parts = [part for parts in donors.values() for part in parts]
        assert sorted(given_parts) == sorted(wanted & somewhere - holds.get(device, set()))
        assert all(parts and parts <= holds[donor] for donor, parts in donors.items())


@given(needed, holding, st.lists(st.integers(1, 9), min_size=6, max_size=6), st.lists(st.integers(1, 4), min_size=5))
def test_donors_end_nearly_as_soon_as_with_the_best_choice(
    needs: dict[str, set[str]], holds: dict[str, set[str]], sizes: list[int], speeds: list[int]
):
    """The best one by brute force: parts take a donor's time by their size and its speed."""
    size, slowness = dict(zip("abcdef", sizes, strict=True)), dict(zip("xyzuv", speeds, strict=False))
    found = state_donors(needs, holds, size, lambda donor, _: float(slowness[donor]))
    pairs = [(part, d) for d, wanted in sorted(needs.items()) for part in sorted(wanted - holds.get(d, set()))]
    choices = [[donor for donor, parts in holds.items() if part in parts] for part, _ in pairs]
    choices = [found_donors for found_donors in choices if found_donors][:6]
    pairs = [pair for pair in pairs if any(pair[0] in parts for parts in holds.values())]
    busy = dict.fromkeys(holds, 0.0)
    for donors in found.values():
        for donor, parts in donors.items():
            busy[donor] += sum(size[part] for part in parts) * slowness[donor]
    if len(pairs) > 6:
        return
    best = min(
        max(
            (sum(size[p] * slowness[d] for (p, _), d in zip(pairs, chosen, strict=True) if d == x) for x in holds),
            default=0,
        )
        for chosen in itertools.product(*choices)
    )
    assert max(busy.values(), default=0) <= 3 * best


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


def running(layout: StateLayout = TWO, **fields: int) -> Recorded:
    spec = RunSpec(**{"steps": 9, "micro_batches": 1, "micro_batch_size": 1, "lease_ahead": 2, **fields})
    coordinator = Recorded(layout.parts, spec, layout=layout)
    for device in layout.parts:
        coordinator.joined(device)
    for device in layout.parts:
        coordinator.takes(device, DeviceReady())
    return coordinator


def report(coordinator: Recorded, *items: int) -> list[Asked]:
    out: list[Asked] = []
    for item in items:
        for device in coordinator.devices:
            out += coordinator.tell(coordinator.takes, device, ItemReported(item=item, epoch=coordinator.epoch))
    return out


def leased(asked: list[Asked]) -> list[Item]:
    return [call[1].item for call in asked if isinstance(call[1], OpenItem)]


def test_a_snapshot_is_leased_and_acknowledged_when_all_copies_are_there():
    coordinator = running()
    opened = [item.kind for item in leased(report(coordinator, 0, 1))]
    assert opened == ["keep", "train"]
    report(coordinator, 2)
    assert coordinator.tell(coordinator.takes, "tokyo", SnapshotCopied(of="oslo", step=2)) == []
    assert coordinator.statistics().recovery_point == 0
    assert coordinator.tell(coordinator.takes, "oslo", SnapshotCopied(of="tokyo", step=2)) == [
        ("retire_snapshots", RetireSnapshots(step=2))
    ]
    assert coordinator.statistics().recovery_point == 2


def test_a_loss_from_beginning_to_end():
    coordinator = running()
    report(coordinator, 0, 1, 2)
    assert coordinator.tell(coordinator.loses, "tokyo", "silent") == [
        ("disconnect", "tokyo"),
        ("order", "oslo", Pause(epoch=1)),
    ]
    assert coordinator.tell(coordinator.takes, "oslo", ItemReported(item=3, epoch=0)) == [], "of an epoch that is over"
    holdings = (held(0, 2, A | B), held(0, 3, A))
    assert coordinator.tell(coordinator.takes, "oslo", Inventory(holdings=holdings, epoch=1)) == [
        planning("oslo", waits=True)
    ]
    out = coordinator.tell(coordinator.gets, 1, StateLayout(parts={"oslo": A | B}))
    assert out[0] == ("begin_epoch", EpochStart(1, 2, coordinator.statistics().leased, False))
    assert out[1:] == [("assign_stage", "oslo"), ("order", "oslo", PlaceWeights(own=A | B, epoch=1))]
    first, *_ = leased(coordinator.tell(coordinator.takes, "oslo", DeviceReady(epoch=1)))
    assert (first.kind, first.step) == ("train", 2)


def test_what_a_device_lacks_another_one_gives_it():
    coordinator = running()
    coordinator.loses("tokyo", "silent")
    coordinator.joined("lima")
    ((asked, _),) = coordinator.tell(coordinator.takes, "oslo", Inventory(holdings=(held(0, 0, A | B),), epoch=1))
    assert asked == "make_plan"
    layout = StateLayout(parts={"oslo": A, "lima": B})
    out = coordinator.tell(coordinator.gets, 1, layout)
    assert out[1:] == [
        ("order", "oslo", GiveState(step=0, receivers={"lima": B}, epoch=1)),
        ("assign_stage", "oslo"),
        ("order", "oslo", PlaceWeights(own=A, epoch=1)),
        ("assign_stage", "lima"),
        ("order", "lima", PlaceWeights(donors={"oslo": B}, epoch=1)),
    ]
    assert coordinator.awaited == {"oslo", "lima"}


def placing(*holders: str) -> Recorded:
    """Oslo's stage needs b, which these devices hold."""
    coordinator = running(StateLayout(parts={"oslo": A, **dict.fromkeys(("tokyo", *holders), B)}))
    coordinator.loses("tokyo", "silent")
    coordinator.takes("oslo", Inventory(holdings=(held(0, 0, A),), epoch=1))
    for holder in holders:
        coordinator.takes(holder, Inventory(holdings=(held(0, 0, B),), epoch=1))
    coordinator.gets(1, StateLayout(parts={"oslo": A | B}))
    return coordinator


def test_a_donor_that_does_not_give_is_replaced_by_another_holder():
    coordinator = placing("lima", "rome")
    missing = StateMissing(donor="lima", parts=B, reason="device 'lima': closed", epoch=1)
    assert coordinator.tell(coordinator.takes, "oslo", missing) == [
        ("order", "rome", GiveState(step=0, receivers={"oslo": B}, epoch=1)),
        ("order", "oslo", TakeState(donors={"rome": B}, epoch=1)),
    ]
    for lie in (missing, StateMissing(donor="rome", parts=A, reason="", epoch=1)):
        with pytest.raises(OutOfPhase, match="was not to give it"):
            coordinator.takes("oslo", lie)


def test_where_no_other_device_holds_a_part_the_link_counts_as_broken():
    coordinator = placing("lima")
    missing = StateMissing(donor="lima", parts=B, reason="device 'lima': closed", epoch=1)
    assert coordinator.tell(coordinator.takes, "oslo", missing) == []
    coordinator.clock(5.0)
    assert coordinator.suspects
    coordinator.looked(Observation())
    coordinator.clock(9.0)
    coordinator.looked(Observation())
    assert coordinator.phase == "holding" and "oslo" not in coordinator.connected


def test_a_loss_in_the_middle_of_a_recovery_begins_it_again():
    coordinator = running(StateLayout(parts={"oslo": A, "tokyo": B, "lima": frozenset({"c"})}))
    coordinator.loses("tokyo", "silent")
    coordinator.takes("oslo", Inventory(holdings=(), epoch=1))
    assert coordinator.tell(coordinator.loses, "lima", "silent") == [
        ("disconnect", "lima"),
        ("order", "oslo", Pause(epoch=2)),
    ]
    assert coordinator.tell(coordinator.takes, "oslo", Inventory(holdings=(), epoch=1)) == []
    assert coordinator.tell(coordinator.takes, "oslo", Inventory(holdings=(), epoch=2)) == [
        planning("oslo", waits=True)
    ]
    told = coordinator.tell(coordinator.gets_none, 2, "it does not fit")[-1]
    assert told == ended("lost", "device 'lima' was lost: silent; no plan for what is left: it does not fit")


def test_who_leaves_waits_until_the_others_hold_its_part():
    coordinator = running()
    assert coordinator.tell(coordinator.leaving, "tokyo") == [planning("oslo", must=True)]
    assert coordinator.tell(coordinator.gets, 0, StateLayout(parts={"oslo": A | B})) == []
    assert not leased(report(coordinator, 0)), "nothing more is leased"
    assert report(coordinator, 1)[1:] == [("order", "oslo", Pause(epoch=1)), ("order", "tokyo", Pause(epoch=1))]
    coordinator.takes("oslo", Inventory(holdings=(held(0, 2, A),), epoch=1))
    out = coordinator.tell(coordinator.takes, "tokyo", Inventory(holdings=(held(0, 2, B),), epoch=1))
    assert out == [
        ("begin_epoch", EpochStart(1, 2, 2, False)),
        ("order", "tokyo", GiveState(step=2, receivers={"oslo": B}, epoch=1)),
        ("assign_stage", "oslo"),
        ("order", "oslo", PlaceWeights(own=A, donors={"tokyo": B}, epoch=1)),
    ]
    assert coordinator.tell(coordinator.takes, "oslo", DeviceReady(epoch=1))[-1] == ("release_device", "tokyo")


def leaving(*devices: str) -> tuple[Recorded, Recorder]:
    """A run of two devices, which were asked to leave."""
    machine, port = running(), Recorder(PipelinePort)
    machine.port = port.port
    for device in ("oslo", "tokyo"):
        machine.joined(device, ())
    machine.clock(1.0)
    machine.looked(Observation(leaving=frozenset(devices)))
    return machine, port


def test_who_cannot_leave_stays_and_it_is_said():
    machine, port = leaving("oslo", "tokyo")
    stays = "was asked to leave and stays: no plan could be made without it: too small; ask again to try again"
    port.took()
    machine.clock(2.0)
    machine.gets_none(0, "too small")
    assert port.took() == [("note", f"oslo {stays}"), ("note", f"tokyo {stays}")]
    machine.clock(3.0)
    machine.gets_none(0, "too small")
    assert port.took() == [], "nobody is to leave"
    machine.clock(4.0)
    machine.looked(Observation(leaving=frozenset({"tokyo"})))
    assert [asked.devices for _, asked in port.took() if isinstance(asked, PlanRequest)] == [("oslo",)]


def test_a_run_that_ends_for_want_of_a_device_that_was_to_leave_says_so():
    machine, port = leaving("tokyo")
    machine.loses("oslo", "silent")
    machine.clock(2.0)
    machine.takes("tokyo", Inventory(holdings=(held(0, 2, B),), epoch=1))
    machine.clock(3.0)
    machine.gets_none(1, "none")
    *_, (_, finish), note = port.took()
    assert isinstance(finish, FinishRun) and finish.outcome == "lost"
    assert note == ("note", "tokyo was asked to leave: the plan that could not be made was one without it")


def test_each_lost_device_is_rejected_with_its_reason():
    devices = ("lima", "oslo", "tokyo")
    machine, port = running(StateLayout(parts=dict.fromkeys(devices, A))), Recorder(PipelinePort)
    machine.port = port.port
    for device in devices:
        machine.joined(device, ())
    machine.disconnected("oslo", "silent for 9 s")
    machine.disconnected("tokyo", "it hung up")
    for now_s in (1.0, 2.0, 2.1, 3.2):
        machine.clock(now_s)
        machine.looked(Observation())
    assert [call for call in port.took() if call[0] == "reject_device"] == [
        ("reject_device", "oslo", "device 'oslo' was lost: silent for 9 s", False),
        ("reject_device", "tokyo", "device 'tokyo' was lost: it hung up", False),
    ], "also of the second one, which nobody is told of in a line"


def test_the_work_goes_on_while_a_device_starts_that_a_better_plan_wants():
    coordinator = running()
    assert coordinator.tell(coordinator.offered, "lima") == [planning("lima", "oslo", "tokyo", must=False)]
    better = StateLayout(parts={"oslo": A, "lima": B})
    assert coordinator.tell(coordinator.gets, 0, better) == [("call_device", "lima")]
    assert [item.step for item in leased(report(coordinator, 0))] == [2], "nobody waits"
    assert coordinator.tell(coordinator.joined, "lima") == []
    assert not leased(report(coordinator, 1)), "what is leased is finished first"
    assert ("order", "lima", Pause(epoch=1)) in report(coordinator, 2)


def test_a_better_plan_is_forgotten_with_a_device_that_it_wants():
    coordinator = running()
    coordinator.offered("lima")
    coordinator.gets(0, StateLayout(parts={"oslo": A, "lima": B}))
    coordinator.loses("lima", "it did not start")
    assert coordinator.tell(coordinator.joined, "lima") == [planning("lima", "oslo", "tokyo", must=False)]


def test_who_could_work_and_does_not_is_thought_of_when_a_plan_is_in_force():
    coordinator = running()
    coordinator.offered("lima")
    coordinator.loses("tokyo", "silent")
    assert coordinator.tell(coordinator.takes, "oslo", Inventory(holdings=(held(0, 0, A | B),), epoch=1)) == [
        planning("lima", "oslo", waits=True)
    ]
    coordinator.gets(1, StateLayout(parts={"oslo": A | B}))
    assert coordinator.tell(coordinator.takes, "oslo", DeviceReady(epoch=1))[-1] == planning("lima", "oslo", must=False)
