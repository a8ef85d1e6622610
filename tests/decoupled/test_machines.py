"""When changes are merged, by the machine alone and with simulated replicas: nobody waits, and nothing counts twice."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import pytest
import torch

from isthmus.cost import Decoupled
from isthmus.errors import PeerError
from isthmus.plans import OuterOptimizer
from isthmus.programs.merger import Merger
from isthmus.programs.merging import Finish
from isthmus.protocol.decoupled_events import (
    NEVER,
    CollectChanges,
    Contributed,
    Delivery,
    FragmentGrowth,
    FragmentSent,
    LastStepMade,
    MergeChanges,
    ReplicaOrder,
    StepsMade,
    VersionTaken,
)
from isthmus.protocol.decoupled_replica import DecoupledReplica, ReplicaPort
from isthmus.protocol.run_messages import Halt
from isthmus.session.session import EXIT_S, GRACE_S, Observation
from isthmus.simulator import Fault, RecoveryTimes
from isthmus.simulator.merging import MergingSimulation, SimulatedReplicas
from isthmus.training.decoupled import MergedFragments, change_codec, delta_codec

from ..programs.ports import Asked, MergerRecorder, Recorder
from .small import NAMES, SIZES, STEP_S, replicas, rules


class Host:
    """Says the time, and returns what the merger asks."""

    def __init__(
        self,
        *,
        quorum: int = 2,
        samples: int | None = 1000,
        fragments: int = 1,
        calls: bool = False,
        final_s: float | None = None,
    ) -> None:
        wanted = rules(samples=samples, fragments=fragments, quorum=quorum)
        self.machine = Merger(wanted, "abc", calls=calls, final_s=final_s)
        self.port = MergerRecorder()
        self.machine.port = self.port.port
        self.now_s = 0.0
        self.steps: Counter[str] = Counter()

    def at(self, now_s: float) -> list[Asked]:
        self.now_s = now_s
        self.machine.clock(now_s)
        return self.port.took()

    def join(self, *names: str) -> None:
        for name in names:
            self.machine.joined(name)
            assert self.port.took()[-1] == ("send_all", name)

    def step(self, name: str, samples: int = 32) -> list[Asked]:
        self.steps[name] += 1
        return self.heard(name, StepsMade(steps=self.steps[name], samples=samples))

    def give(self, name: str, merge: int, samples: int = 32, *, last: bool = False) -> list[Asked]:
        body = Contributed(merge=merge, fragments=(0,), steps=self.steps[name], samples=(samples,), last=last)
        return self.heard(name, body)

    def ready(self, name: str) -> list[Asked]:
        return self.heard(name, LastStepMade())

    def heard(self, name: str, body: StepsMade | Contributed | LastStepMade) -> list[Asked]:
        self.machine.heard(name, body)
        return self.port.took()

    def lose(self, name: str) -> list[Asked]:
        """Its connection closes, and no process of it is known."""
        self.machine.disconnected(name)
        rejected, *found = self.look()
        assert rejected == ("reject", name, False)
        return found

    def release(self, name: str) -> list[Asked]:
        return self.look(leaving=frozenset({name}))

    def look(
        self,
        *,
        ended: Mapping[str, str] = {},
        starting: str = "",
        offers: str = "",
        leaving: frozenset[str] = frozenset(),
    ) -> list[Asked]:
        self.machine.looked(
            Observation(ended=ended, starting=frozenset(starting), offers=frozenset(offers), leaving=leaving)
        )
        return self.port.took()


def whom(found: list[Asked]) -> list[object]:
    """The replicas that are asked for a contribution."""
    return [one[1] for one in found if one[0] == "ask"]


def merged(found: list[Asked]) -> list[tuple[str, int, int]]:
    """Replica, number and samples of all contributions in the only fragment."""
    (merge,) = [one[1] for one in found if one[0] == "merge"]
    assert isinstance(merge, MergeChanges)
    return [(c.replica, c.number, c.samples) for c in merge.fragments[0].contributions]


def announced(host: Host) -> None:
    """Three replicas, and the first merge is due at second 1."""
    host.join("a", "b", "c")
    host.at(1.0)
    assert host.step("a") == []
    asked = host.step("b")
    assert whom(asked) == ["a", "b", "c"]


def test_a_merge_ends_when_all_that_made_a_step_have_given() -> None:
    host = Host()
    announced(host)
    assert host.give("b", 1, 40) == []
    assert merged(host.give("a", 1, 24)) == [("a", 1, 24), ("b", 1, 40)]
    assert host.machine.phase == "training"


def test_after_its_quorum_a_merge_waits_for_the_grace_and_no_longer() -> None:
    host = Host()
    announced(host)
    host.step("c")
    host.give("a", 1)
    host.give("b", 1)
    assert host.machine.due_s == pytest.approx(1.5)  # half of the second since the start
    assert host.at(1.4) == []
    assert merged(host.at(1.5)) == [("a", 1, 32), ("b", 1, 32)]


def test_what_comes_too_late_is_in_the_next_merge() -> None:
    host = Host()
    announced(host)
    host.step("c")
    host.give("a", 1)
    host.give("b", 1)
    host.at(1.5)
    assert host.give("c", 1, 8) == []
    assert host.machine.late == 1
    host.at(2.0)
    host.step("a")
    host.step("b")
    host.give("a", 2)
    assert merged(host.give("b", 2)) == [("a", 2, 32), ("b", 2, 32), ("c", 1, 8)]


def test_one_that_is_to_leave_gives_all_and_is_not_asked_again() -> None:
    host = Host()
    announced(host)
    host.give("a", 1)
    asked = CollectChanges(merge=1, fragments=(0,), last=True)
    assert host.release("b") == [("ask", "b", asked)]
    found = host.give("b", 1, 16, last=True)
    assert merged(found) == [("a", 1, 32), ("b", 1, 16)]
    assert found[-1] == ("let_go", "b")
    host.at(2.0)
    host.step("c")
    again = host.step("a")
    assert whom(again) == ["a", "c"]
    assert host.lose("b")[0] == ("note", "b has left")
    assert host.release("b") == []


def test_one_that_is_to_leave_ends_after_what_it_gives_of_all_and_not_after_what_was_on_its_way() -> None:
    host = Host(fragments=2)
    host.join("a", "b")
    host.at(1.0)
    asked = host.step("a")
    assert whom(asked) == ["a", "b"]
    host.step("b")
    host.release("b")
    assert ("let_go", "b") not in host.give("b", 1)
    host.step("b")
    last = Contributed(merge=1, fragments=(0, 1), steps=host.steps["b"], samples=(64, 64), last=True)
    assert host.heard("b", last)[-1] == ("let_go", "b")


def leaves_with_a_contribution() -> Host:
    """Replica b has given, and is asked to leave before a and c have."""
    host = Host(quorum=3)
    announced(host)
    host.step("c")
    assert host.give("b", 1) == []
    host.release("b")
    host.give("a", 1)
    assert host.give("c", 1) == []  # all have given, but b is about to give the same again
    return host


def test_what_one_gave_before_it_was_asked_to_leave_counts_once() -> None:
    host = leaves_with_a_contribution()
    host.step("b")
    found = host.give("b", 1, 64, last=True)
    assert merged(found) == [("a", 1, 32), ("b", 1, 64), ("c", 1, 32)] and found[-1] == ("let_go", "b")


def test_what_one_gave_counts_if_it_is_lost_before_it_has_left() -> None:
    assert merged(leaves_with_a_contribution().lose("b")) == [("a", 1, 32), ("b", 1, 32), ("c", 1, 32)]


def test_one_that_has_given_to_the_last_merge_is_not_asked_again_to_leave() -> None:
    host = Host(samples=64)
    announced(host)
    assert host.machine.phase == "closing" and host.give("a", 1, last=True) == []
    assert host.release("a") == [("let_go", "a")]


def test_one_that_is_to_leave_is_asked_once_on_each_connection() -> None:
    host = Host()
    assert host.release("b") == []  # it is not there yet
    host.join("a", "b")
    asked = [("ask", "b", CollectChanges(merge=0, fragments=(0,), last=True))]
    assert [host.release("b") for _ in range(2)] == [asked, []]
    host.lose("b")
    host.join("b")
    assert [host.release("b") for _ in range(2)] == [asked, []]


@pytest.mark.parametrize("what", ["lost", "ready"])
def test_replicas_that_are_back_after_all_were_lost_merge_after_their_next_step(what: str) -> None:
    host = Host(samples=None)
    host.join("a", "b")
    host.at(1.0)
    host.step("a")
    host.step("b")
    host.give("a", 1)
    host.step("a")
    host.step("a")  # enough for a second merge, while the first is open
    host.lose("a")
    host.lose("b")
    assert host.machine.phase == "waiting"
    host.join("a", "b")
    host.lose("b") if what == "lost" else host.ready("b")
    assert host.machine.phase == "training"
    assert whom(host.step("a"))
    assert merged(host.give("a", 2)) == [("a", 2, 32)]


def test_a_quorum_is_of_those_that_are_at_work() -> None:
    host = Host(quorum=3)
    announced(host)
    host.give("a", 1)
    assert host.at(1.5) == []  # b was at work when the merge was announced
    host.step("a")
    assert merged(host.at(3.5)) == [("a", 1, 32)]  # and shows no life since


def test_the_loss_of_the_last_that_a_merge_waits_for_ends_it() -> None:
    host = Host()
    announced(host)
    host.give("a", 1)
    assert merged(host.lose("b")) == [("a", 1, 32)]


def test_one_that_is_back_gives_again_what_was_not_merged() -> None:
    host = Host()
    announced(host)
    host.give("a", 1)
    host.lose("a")
    host.join("a")
    assert merged(host.give("b", 1)) == [("b", 1, 32)]


def test_without_a_replica_the_run_waits_and_then_ends() -> None:
    host = Host()
    host.join("a")
    host.lose("a")
    assert host.machine.phase == "waiting"
    assert host.at(61.0) == [("ended", "no replica came within 60 s")]
    assert host.machine.finish == Finish("lost", "no replica came within 60 s")


def test_how_a_process_ended_says_why_its_replica_is_lost_and_no_merge_waits_for_that() -> None:
    host = Host()
    announced(host)
    host.give("b", 1)
    host.machine.disconnected("a")
    rejected, merge = host.look(starting="a")
    assert rejected == ("reject", "a", False), "another connection of it is admitted"
    assert merged([merge]) == [("b", 1, 32)]
    assert host.machine.due_s is not None
    host.at(2.0)
    assert host.look(starting="a") == []
    killed = {"a": "its process was killed by SIGKILL"}
    lost = ("note", "a is lost: its process was killed by SIGKILL; the others go on")
    assert host.look(ended=killed) == [lost]
    assert host.look(ended=killed) == []


def test_one_whose_process_goes_on_may_come_back_before_its_loss_is_decided() -> None:
    host = Host()
    announced(host)
    host.machine.disconnected("a")
    host.look(starting="a")
    host.machine.joined("a")
    assert host.port.took() == [
        ("note", "a is lost: its connection closed; the others go on"),
        ("note", "a is back after 1 steps: it takes the current fragments and goes on"),
        ("send_all", "a"),
    ]
    host.at(1.0 + 2 * EXIT_S)
    assert host.look(starting="a") == [] and host.machine.present == ["a", "b", "c"]


def test_a_loss_that_is_not_decided_is_noted_at_the_end() -> None:
    host = Host(samples=None)
    host.join("a", "b")
    host.step("a", 8)
    host.machine.disconnected("b")
    host.look(starting="ab")
    host.ready("a")
    assert host.give("a", 1, 8)[1:] == [
        ("note", "b is lost: its connection closed; the others go on"),
        ("ended", ""),
    ]
    assert host.machine.over


def test_one_that_says_why_it_fails_is_lost_at_once_and_its_exit_is_not_noted() -> None:
    host = Host()
    announced(host)
    host.machine.failed("a", "no room", "user")
    assert host.machine.urgent
    lost = [("reject", "a", False), ("note", "a is lost: no room; the others go on")]
    assert host.look(starting="abc") == lost
    assert host.look(ended={"a": "its process ended with code 1"}) == []


def test_a_run_ends_when_every_process_has_ended_and_says_how() -> None:
    host, how = Host(), "its process ended with code 1"
    host.join("a")
    host.machine.failed("a", "no room", "device")
    host.look()
    ended = {"b": how, "c": how}
    host.at(1.0)
    assert host.look(ended=ended) == []  # one may have sent why
    host.at(1.0 + GRACE_S)
    assert host.look(ended=ended) == [
        ("note", f"b: {how}"),
        ("note", f"c: {how}"),
        ("ended", "every replica's process has ended"),
    ]
    assert host.machine.finish == Finish("lost", "every replica's process has ended")


def test_one_that_sends_what_it_cannot_have_is_rejected_for_good() -> None:
    host = Host()
    announced(host)
    host.port.inadmissible = "its change of fragment 0 is not finite"
    assert host.give("a", 1) == []
    assert host.look(starting="abc") == [
        ("reject", "a", True),
        ("note", "a is lost: its change of fragment 0 is not finite; the others go on"),
    ]
    host.machine.heard("b", StepsMade(steps=7, samples=32))
    assert host.look() == [
        ("reject", "b", True),
        ("note", "b is lost: reported 7 steps after 1, expected at most 2; the others go on"),
    ]
    assert [name for name, _ in host.port.counted] == ["a", "b"], "their steps before"


def test_changes_that_are_not_merged_are_in_no_later_merge_either() -> None:
    host = Host(fragments=2)
    host.join("a", "b", "c")
    host.at(1.0)
    host.step("a")
    host.step("b")
    for name in "ab":  # of both fragments, though one is asked for
        host.heard(name, Contributed(merge=1, fragments=(1,), steps=1, samples=(32,)))
    host.give("a", 1)
    host.port.refused = {"b": "too large"}
    first, *asked, second = host.give("b", 1)
    assert whom(asked) == ["a", "b", "c"]
    assert [merged([one]) for one in (first, second)] == [[("a", 1, 32), ("b", 1, 32)], [("a", 1, 32)]]
    assert host.look() == [("reject", "b", True), ("note", "b is lost: too large; the others go on")]


def test_replicas_receive_the_end_until_they_hang_up() -> None:
    host = Host(samples=None, final_s=60.0)
    closing(host)
    for name in "ab":
        host.give(name, 1, 8)
    found = host.heard("c", Contributed(merge=1, fragments=(), steps=0, samples=()))
    assert found[-1] == ("ended", "") and host.machine.phase == "ending"
    assert host.step("a") == [] and host.machine.stop() is None
    assert host.lose("a") == []
    host.machine.joined("a")  # it has received nothing
    assert host.port.took() == [("send_all", "a")]
    for name in "ab":
        host.lose(name)
    assert not host.machine.over
    assert host.machine.due_s == 60.0
    host.lose("c")
    assert host.machine.over and host.machine.finish == Finish("done")


def test_one_that_does_not_receive_the_end_holds_nobody_up_for_ever() -> None:
    host = Host(samples=None, final_s=60.0)
    closing(host)
    for name in "abc":
        host.heard(name, Contributed(merge=1, fragments=(), steps=host.steps[name], samples=()))
    host.at(100.0)
    assert host.machine.phase == "ending" or host.machine.over
    host.at(200.0)
    assert host.machine.over


def test_devices_of_a_fleet_are_called_when_they_are_there_and_later_where_they_failed() -> None:
    host, how = Host(calls=True), {"a": "its process ended with code 1"}
    host.machine.rules = msgspec.structs.replace(host.machine.rules, timeout_s=math.inf)
    called = [("note", "a is here, and is called to train"), ("call", "a")]
    assert host.look(offers="a") == called
    for pause_s in (30.0, 60.0):
        host.join("a")
        host.machine.disconnected("a")
        host.look(starting="a")
        failed_s = host.now_s + 1.0
        host.at(failed_s)
        (lost, alone) = host.look(ended=how)
        assert lost == ("note", "a is lost: its process ended with code 1; the others go on")
        assert str(alone[1]).startswith("no device is left")
        assert host.look(ended=how, offers="a") == []
        host.at(failed_s + pause_s - 0.1)
        assert host.look(ended=how, offers="a") == []
        host.at(failed_s + pause_s)
        assert host.look(ended=how, offers="a") == called


def test_a_device_that_is_to_leave_while_it_starts_leaves_when_it_has_come() -> None:
    host = Host(calls=True)
    host.look(offers="a")
    assert host.look(starting="a", leaving=frozenset("a")) == []
    host.join("a")
    assert host.look(starting="a") == [("ask", "a", CollectChanges(merge=0, fragments=(0,), last=True))]
    host.machine.disconnected("a")
    rejected, note, alone = host.look(starting="a")
    assert (rejected, note) == (("reject", "a", False), ("note", "a has left"))
    assert str(alone[1]).startswith("no device is left")


def test_a_device_that_left_and_is_offered_again_is_called_and_stays() -> None:
    """It was asked to leave in each of its lives, after one step."""
    host = Host(calls=True)
    called = host.look(offers="a")
    host.join("a")
    assert whom(host.release("a")) == ["a"]
    host.machine.disconnected("a")
    assert ("note", "a has left") in host.look()
    assert host.look(offers="a") == called
    host.join("a")
    assert host.look() == []


def closing(host: Host) -> None:
    """Three replicas that have made their last step, one after the other."""
    host.join("a", "b", "c")
    host.step("a", 8)
    host.step("b", 8)
    assert host.ready("a") == []
    assert host.ready("b") == []
    asked = host.ready("c")
    assert asked == [("ask", name, CollectChanges(merge=1, fragments=(0,), last=True)) for name in "abc"]


def test_a_run_without_a_number_of_samples_ends_when_all_are_ready() -> None:
    host = Host(samples=None)
    closing(host)
    assert host.give("a", 1, 8) == []
    nothing = Contributed(merge=1, fragments=(), steps=0, samples=())
    assert host.heard("c", nothing) == []  # it made no step, and answers all the same
    assert host.at(100.0) == []  # b has nothing else to do
    found = host.give("b", 1, 8)
    assert merged(found) == [("a", 1, 8), ("b", 1, 8)]
    assert found[-1] == ("ended", "")
    assert host.machine.finish == Finish("done")


def test_a_loss_ends_a_run_whose_others_are_ready() -> None:
    host = Host(samples=None)
    host.join("a", "b")
    host.step("a", 8)
    host.ready("a")
    assert ("ask", "a", CollectChanges(merge=1, fragments=(0,), last=True)) in host.lose("b")


def test_a_merge_to_which_nobody_gives_any_more_does_not_hold_up_the_end() -> None:
    host = Host(samples=None)
    host.join("a", "b")
    host.at(1.0)
    host.step("a")
    host.step("b")
    host.give("a", 1)
    host.give("b", 1)
    host.ready("a")
    host.at(2.0)
    host.step("b")
    assert host.step("b") == [("ask", name, CollectChanges(merge=2, fragments=(0,))) for name in "ab"]
    host.lose("b")  # a has nothing to give
    assert host.machine.due_s is not None
    assert host.at(host.machine.due_s) == [("ask", "a", CollectChanges(merge=3, fragments=(0,), last=True))]


@pytest.mark.parametrize("last", [False, True])
def test_a_merge_whose_replicas_are_all_lost_asks_those_that_came_since(last: bool) -> None:
    host = Host(quorum=1)
    host.join("a")
    assert whom(host.step("a", 1000 if last else 64)) == ["a"]
    host.join("b")
    asked = host.lose("a") + host.step("b", 64)
    assert [one[2] for one in asked if one[0] == "ask"] == [CollectChanges(merge=2, fragments=(0,), last=last)]
    assert merged(host.give("b", 2, 64)) == [("b", 2, 64)]


def test_one_that_is_ready_gives_at_once_until_the_last_merge() -> None:
    replica, port = DecoupledReplica(1, 4), Recorder(ReplicaPort)
    replica.port = port.port

    def ordered(order: ReplicaOrder | None) -> list[Asked]:
        replica.ordered(order)
        return port.took()

    first = FragmentSent(fragment=0, merge=0, whole=True, included=NEVER, first=True, samples=0)
    assert ordered(first) == [("take", first), ("train", 0)]
    replica.step_ended(4)
    replica.last_step_made()
    assert port.took() == [("say", StepsMade(steps=1, samples=4)), ("train", 4), ("say", LastStepMade())]
    asked = CollectChanges(merge=1, fragments=(0,))
    assert ordered(asked) == [("contribute", asked)]
    assert ordered(None) == []
    assert ordered(first) == [("take", first), ("say", LastStepMade())]  # on another connection
    asked = CollectChanges(merge=2, fragments=(0,), last=True)
    assert ordered(asked) == [("contribute", asked)]
    assert replica.phase == "ending"
    assert ordered(None) == [("stop",)] and ordered(first) == []


def test_a_slow_link_gets_the_newest_version_whole_and_an_end_first() -> None:
    delivery = Delivery(1)
    first = delivery.next()
    assert first == FragmentSent(fragment=0, merge=0, whole=True, included=NEVER, first=True, samples=0)
    delivery.publish(0, 1, 32, included=1)
    assert delivery.next() == FragmentSent(fragment=0, merge=1, whole=False, included=1, first=False, samples=32)
    delivery.publish(0, 2, 64)
    delivery.publish(0, 3, 96)
    delivery.ask(CollectChanges(merge=4, fragments=(0,)))
    assert delivery.next() == FragmentSent(fragment=0, merge=3, whole=True, included=1, first=False, samples=96)
    assert delivery.next() == CollectChanges(merge=4, fragments=(0,))
    delivery.publish(0, 4, 128)
    delivery.halt(Halt())
    assert delivery.next() == Halt()
    assert delivery.next() is None


def test_the_end_may_come_after_the_newest_version_and_comes_again_on_another_connection() -> None:
    delivery = Delivery(1)
    delivery.publish(0, 1, 32)
    delivery.halt(Halt(), newest_first=True)
    for _ in range(2):
        found = delivery.next()
        assert isinstance(found, FragmentSent)
        assert delivery.next() == Halt()
        assert delivery.next() is None
        delivery.restart()


def simulated(*faults: Fault, samples: int = 9600) -> SimulatedReplicas:
    return MergingSimulation(rules(samples=samples), replicas(), SIZES, faults).run()


def steps_between(run: SimulatedReplicas, begin_s: float, end_s: float) -> Counter[str]:
    return Counter(name for time_s, name, _ in run.steps if begin_s <= time_s < end_s)


def test_undisturbed_replicas_make_their_own_steps_and_all_of_them_count() -> None:
    run = simulated()
    full_speed = sum(4 / step_s for step_s in STEP_S)
    assert run.useful_samples >= 0.99 * full_speed * run.seconds
    assert steps_between(run, 10, 50) == dict(zip(NAMES, (100, 100, 200, 400), strict=True))


@pytest.mark.parametrize("kind", ["silent", "lost"])
@pytest.mark.parametrize("device", NAMES)
def test_one_that_is_away_costs_the_others_nothing(kind: str, device: str) -> None:
    fault = Fault(kind="silent" if kind == "silent" else "lost", device=device, time_s=20, lasts_s=50)
    run, undisturbed = simulated(fault), simulated()
    found, expected = (steps_between(one, 20, 70) for one in (run, undisturbed))
    del expected[device]
    found.pop(device, None)
    assert found == expected
    merges = [time_s for time_s, _ in run.merges]
    assert max(b - a for a, b in pairwise(merges)) < 2.5  # merges go on; it was less than 1


def test_what_a_stopped_replica_had_learned_counts_when_it_is_back() -> None:
    run = simulated(Fault(kind="silent", device="d", time_s=20, lasts_s=70))  # also its connection is given up
    done = sum(made.samples for _, _, made in run.steps)
    assert run.useful_samples >= done - 100
    assert [text for _, text in run.notes] == [
        "d is lost: silent for 60 s; the others go on",
        "d is back after 198 steps: it takes the current fragments and goes on",
    ]


def test_no_contribution_is_merged_twice() -> None:
    faults = [Fault(kind="silent", device=name, time_s=9 * n, lasts_s=62) for n, name in enumerate(NAMES)]
    run = simulated(*faults, Fault(kind="lost", device="c", time_s=30, lasts_s=3), samples=6000)
    numbers = [(f.fragment, c.replica, c.number) for _, m in run.merges for f in m.fragments for c in f.contributions]
    assert len(numbers) == len(set(numbers))
    assert run.useful_samples <= samples_made(run)


def samples_made(run: SimulatedReplicas) -> int:
    """Also in steps that were made without a connection: only the next one tells of them."""
    found, steps = 0, Counter[str]()
    for _, name, made in run.steps:
        found += made.samples * max(1, made.steps - steps[name])
        steps[name] = made.steps
    return found


class Compared:
    """What replicas think that all have trained on, beside what they have."""

    def __init__(self) -> None:
        self.done = 0
        self.found: list[tuple[int, int]] = []

    def step(self, replica: str, samples: int) -> float:
        self.found.append((samples, self.done))
        self.done += 4
        return 0.0

    def start(self, replica: str) -> None: ...
    def take(self, replica: str, sent: FragmentSent) -> None: ...
    def give(self, replica: str, fragment: int, number: int) -> None: ...
    def merge(self, merge: MergeChanges) -> None: ...


@pytest.mark.parametrize(("step_s", "before"), [((0.4,) * 4, 0), (STEP_S, 300)])
def test_between_merges_a_replica_counts_on_what_all_have_trained_on(step_s: tuple[float, ...], before: int) -> None:
    """To five batches of 16, though merges are eight apart, and late: the learning rate follows it. Replicas of other
    speeds learn them from the first two merges."""
    compared = Compared()
    seldom = msgspec.structs.replace(rules(samples=2000), merge_every=128)
    models = [dataclasses.replace(model, step_s=s) for model, s in zip(replicas(), step_s, strict=True)]
    MergingSimulation(seldom, models, SIZES, computing=compared).run()
    assert max(abs(known - done) for known, done in compared.found if done >= before) <= 5 * 16


def struck(*faults: Fault, save_samples: int = 0) -> SimulatedReplicas:
    """The merger is where a is."""
    return MergingSimulation(rules(), replicas(), SIZES, faults, merger="a", save_samples=save_samples).run()


@pytest.mark.parametrize("save_samples", [0, 640])
def test_a_coordinator_that_was_away_goes_on_from_its_newest_checkpoint(save_samples: int) -> None:
    quiet, found = struck(), struck(Fault(kind="coordinator", time_s=60, lasts_s=5), save_samples=save_samples)
    before = [(time_s, merge) for time_s, merge in quiet.merges if time_s < 60]
    kept = [(time_s, merge) for time_s, merge in found.merges if time_s < 60]
    assert kept == before[: len(kept)] and (len(kept) > len(before) - 20 if save_samples else not kept)
    assert [merge.merge for _, merge in found.merges] == list(range(1, len(found.merges) + 1))
    text = f"the coordinator was started again: it goes on after merge {len(kept)}"
    assert [note for note in found.notes if note[0] >= 60] == [(65.0, text)]
    lost_s = 60 - (kept[-1][0] if kept else 0.0) + 5 + RecoveryTimes().process_s
    assert found.finish == Finish("done") and found.seconds == pytest.approx(quiet.seconds + lost_s, abs=1.5)
    assert found.used == pytest.approx((found.seconds - lost_s) / found.seconds, abs=0.02)


def test_a_device_that_is_lost_or_stopped_while_the_coordinator_is_away_comes_when_it_can() -> None:
    away = Fault(kind="coordinator", time_s=20, lasts_s=10)
    lost = Fault(kind="lost", device="d", time_s=25, lasts_s=30)
    stopped = Fault(kind="silent", device="c", time_s=15, lasts_s=40)
    found = struck(away, lost, stopped, Fault(kind="lost", device="b", time_s=25), save_samples=640)
    first_s = {name: min(time_s for time_s, n, _ in found.steps if n == name and time_s > 20) for name in "acd"}
    assert 33 < first_s["a"] < 34 and 55 < first_s["c"] < 60 and 55 < first_s["d"] < 60
    assert not any(name == "b" and time_s > 20 for time_s, name, _ in found.steps)


@pytest.mark.parametrize(
    ("faults", "from_s"),
    [
        ((Fault(kind="join", device="d", time_s=18), Fault(kind="coordinator", time_s=20, lasts_s=10)), 30),
        (
            (
                Fault(kind="join", device="d", time_s=18),
                Fault(kind="link", device="a", other="d", time_s=20, lasts_s=10),
            ),
            30,
        ),
        (
            (
                Fault(kind="coordinator", time_s=20, lasts_s=10),
                Fault(kind="link", device="a", other="d", time_s=25, lasts_s=30),
            ),
            55,
        ),
    ],
)
def test_a_process_that_finds_no_way_to_the_coordinator_at_first_connects_when_there_is_one(
    faults: tuple[Fault, ...], from_s: float
) -> None:
    """It had started meanwhile, and was never connected before."""
    first_s = min(time_s for time_s, name, _ in struck(*faults).steps if name == "d" and time_s > 20)
    assert from_s < first_s < from_s + 5


def test_messages_of_a_replica_wait_for_its_link() -> None:
    found = struck(Fault(kind="link", device="a", other="d", time_s=10, lasts_s=30))
    assert found.finish == Finish("done") and not found.notes
    assert not any(name == "d" and 10.1 < time_s < 40 for time_s, name, _ in found.steps)
    others, expected = steps_between(found, 10, 40), steps_between(struck(), 10, 40)
    assert all(abs(others[name] - expected[name]) <= 1 for name in "abc")
    made = [made.steps for time_s, name, made in found.steps if name == "d" and time_s >= 40]
    assert made[0] < 101 and made == list(range(made[0], made[-1] + 1)), "it trained on, and all steps are reported"


def test_where_no_message_of_a_replica_passes_for_longer_than_the_timeout_it_connects_again() -> None:
    found = struck(Fault(kind="link", device="a", other="d", time_s=10, lasts_s=100))
    lost, back = found.notes
    assert lost == (70.0, "d is lost: silent for 60 s; the others go on")
    assert back[0] >= 110 and back[1].startswith("d is back after 98 steps")
    made = [made.steps for time_s, name, made in found.steps if name == "d" and time_s > 70]
    assert made[0] > 1000, "it trained on"


def test_a_link_over_which_nothing_is_sent_costs_nothing() -> None:
    fault = Fault(kind="link", device="b", other="d", time_s=10, lasts_s=100)
    found = struck(fault)
    assert found.without_effect == ((fault, "nothing was to pass meanwhile"),)
    assert dataclasses.replace(found, without_effect=()) == struck()


def refused(host: Host, name: str, body: StepsMade | Contributed) -> str:
    with pytest.raises(PeerError) as caught:
        host.machine.check(name, body)
    return str(caught.value)


def test_figures_are_bounded_by_what_a_replica_can_have_done() -> None:
    host = Host()
    host.machine.rules = msgspec.structs.replace(host.machine.rules, step_samples=32)
    host.join("a", "b")
    assert "at most 1" in refused(host, "a", StepsMade(steps=10**15, samples=32))
    assert "at most 32" in refused(host, "a", StepsMade(steps=1, samples=33))
    host.at(1.0)
    host.step("a")
    host.step("b")
    assert "expected at most 2" in refused(host, "a", StepsMade(steps=3, samples=32))
    assert "expected at least 2" in refused(host, "a", StepsMade(steps=1, samples=32))

    def given(**changed: object) -> Contributed:
        fields = {"merge": 1, "fragments": (0,), "steps": 1, "samples": (32,)}
        return Contributed(**(fields | changed))  # pyright: ignore[reportArgumentType]

    assert "of 33 samples, expected at most 32" in refused(host, "a", given(samples=(33,)))
    assert "merge 2, expected at most 1" in refused(host, "a", given(merge=2))
    assert "expected some of 1" in refused(host, "a", given(fragments=(0, 0), samples=(32, 32)))
    host.machine.check("a", given())
    host.give("a", 1)
    host.give("b", 1)
    assert "it is merged already" in refused(host, "a", given())


def test_versions_that_a_replica_names_are_of_the_run() -> None:
    host = Host()
    announced(host)

    def given(*taken: VersionTaken, before: int = 0) -> Contributed:
        return Contributed(merge=1, fragments=(0,), steps=1, samples=(32,), taken=taken, taken_before=before)

    host.machine.check("a", given(VersionTaken(0, 0, 0), before=2))
    for taken in (VersionTaken(1, 0, 0), VersionTaken(0, 2, 0), VersionTaken(0, 0, 2)):
        assert "expected one of 1 fragments, at most version 1 and 1 steps" in refused(host, "a", given(taken))
    assert "took 4 versions, expected at most 3" in refused(host, "a", given(VersionTaken(0, 0, 0), before=3))


@pytest.mark.parametrize("steps", [1, 2])
def test_one_that_began_anew_gives_what_it_makes_since(steps: int) -> None:
    """One that had made as many steps as it reports first has begun anew, too."""
    host = Host()
    host.machine.rules = msgspec.structs.replace(host.machine.rules, step_samples=32)
    announced(host)
    if steps == 2:
        host.step("a")
    host.give("a", 1)
    host.give("b", 1)
    host.lose("a")
    host.join("a")
    host.steps["a"] = 0
    host.step("a")
    host.machine.check("a", Contributed(merge=1, fragments=(0,), steps=1, samples=(32,)))
    host.step("a")
    host.machine.check("a", Contributed(merge=1, fragments=(0,), steps=2, samples=(64,)))


def test_one_that_was_away_may_have_trained_on_at_no_more_than_eight_times_the_fastest_pace() -> None:
    host = Host(samples=None)
    host.join("a")
    for second in (1.0, 2.0):
        host.at(second)
        host.step("a")
    host.lose("a")
    host.at(12.0)
    host.join("a")
    host.machine.check("a", StepsMade(steps=12, samples=32))
    assert "expected at most 83" in refused(host, "a", StepsMade(steps=84, samples=32))


def grown(weights: float, merges: Sequence[Mapping[str, tuple[float, int]]]) -> list[dict[str, float]]:
    """Whose changes are not merged, by merge: all changes point the same way, so that sizes add up."""
    growth, found = FragmentGrowth(weights), list[dict[str, float]]()
    for changes in merges:
        found.append(growth.unlike_others(weights, changes))
        kept = {name: change for name, change in changes.items() if name not in found[-1]}
        total = sum(samples for _, samples in kept.values())
        weights += sum(size * samples for size, samples in kept.values()) / max(1, total)
    return found


def test_changes_that_together_make_the_weights_too_large_name_whose_they_are() -> None:
    honest = {"a": (0.02, 32), "b": (0.04, 64)}
    merges = grown(0.5, [honest, *[honest | {"c": (3.0, 32)}] * 20])
    (left_out,) = [number for number, found in enumerate(merges) if found and "c" in found][:1]
    one_merge = (0.02 * 32 + 0.04 * 64 + 3.0 * 32) / 128  # beyond 10 in the 13th: 0.535 + 12 x 0.775 = 9.84
    assert left_out == 1 + math.ceil((10 - 0.535) / one_merge) - 1 == 13
    assert merges[left_out] == {"c": pytest.approx((3.0 / 32) / (0.02 / 32))}
    assert not any(merges[:left_out])
    assert grown(0.5, [honest | {"c": (99.0, 32)}]) == [{"c": pytest.approx(99.0 / 0.02)}], (
        "at once, where one is enough"
    )
    two = grown(0.5, [honest | {"c": (99.0, 32), "d": (50.0, 32)}])
    assert two == [{"c": pytest.approx(99.0 / 0.02), "d": pytest.approx(50.0 / 0.02)}]


@pytest.mark.parametrize("first", [0.0, 20.0])
def test_weights_that_all_make_large_are_nobodys_fault(first: float) -> None:
    """Of a model that needs large weights, or a rate at which all diverge. A fast replica moves further in a merge."""
    all_alike = [{"slow": (5.0 * factor, 4), "fast": (40.0 * factor, 32)} for factor in (1, 2, 40)] * 10
    assert not any(grown(first, all_alike))
    assert not any(grown(first, [{"alone": (99.0, 4)}] * 10))
    assert not any(grown(10 * first, [{"a": (first, 4), "b": (9.9 * first, 4)}])), "weights begin large"


def test_one_that_moves_where_others_do_not_is_named() -> None:
    """As where the learning rate begins at 0."""
    still = {"a": (0.0, 4), "b": (0.0, 4)}
    assert grown(1.0, [{**still, "wrong": (50.0, 4)}]) == [{"wrong": math.inf}]
    assert grown(1.0, [still]) == [{}]


def test_a_change_that_no_replica_can_have_made_is_not_merged() -> None:
    plain = Decoupled(codec="none")
    merged = MergedFragments([torch.ones(4)], OuterOptimizer(rate=0.7, momentum=0.9), change_codec(plain))
    for value in (3e38, -101.0):
        payload = delta_codec(plain).encode(torch.full((4,), value), "fragment 0")
        with pytest.raises(PeerError, match=r"fragment 0 has a root mean square of .*, above 100"):
            merged.unpacked(0, payload, delta_codec(plain))
    payload = delta_codec(plain).encode(torch.full((4,), 99.0), "fragment 0")
    assert merged.unpacked(0, payload, delta_codec(plain)) is not None


def test_a_replica_that_the_end_reached_during_a_step_is_over_when_the_step_ends() -> None:
    """It was stopped meanwhile: what was asked before the end is of no use any more."""
    replica, port = DecoupledReplica(1, 4), Recorder(ReplicaPort)
    replica.port = port.port
    replica.ordered(FragmentSent(fragment=0, merge=0, whole=True, included=NEVER, samples=0, first=True))
    port.took()
    for order in (CollectChanges(merge=1, fragments=(0,), last=True), Halt()):
        replica.ordered(order)
    assert port.took() == [("stop",)]
    replica.step_ended(4)
    assert replica.over and port.took() == []
