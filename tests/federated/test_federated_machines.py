"""The coordinator by itself: what it asks, losses, closing rules."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from isthmus.programs.merging import Finish
from isthmus.protocol.federated_messages import (
    NONE,
    ClientTask,
    ClientTime,
    ExecutorDrained,
    ExecutorJoined,
    LinearFit,
    PhaseClosed,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    RefusedUpdate,
    SumsSent,
    TasksGranted,
    TasksRecalled,
    TasksReturned,
)
from isthmus.protocol.federated_planning import RoundRules
from isthmus.protocol.federated_scheduler import ClientScheduler, ThroughputModel
from tests.federated.populations import Asking, commits, finish_of, orders
from tests.programs.ports import Asked

TURN = PhaseId(0)
SIZES = np.array([40, 30, 20, 10])
EQUAL = LinearFit(1.0, 0.0)


def coordinator(executors: int = 2, keeps: bool = False, **rules: object) -> Asking:
    names = [f"e{k}" for k in range(executors)]
    options = {"rounds": 2, "needed": 4, "steals": False} | rules
    throughput = ThroughputModel(executors, window_rounds=5)
    states = np.full(len(SIZES), NONE, dtype=np.int32) if keeps else None
    return Asking(names, RoundRules(**options), SIZES, lambda r: np.arange(4), throughput, states=states)


def start(machine: Asking) -> dict[str, list[int]]:
    """Joins everybody; returns who trains whom."""
    out: list[Asked] = []
    for name in machine.executors:
        out += machine.after_report(name, ExecutorJoined())
    return clients_of(out)


def openings(out: list[Asked]) -> dict[str, PhaseOpened]:
    return dict(orders(out, PhaseOpened))


def clients_of(out: list[Asked]) -> dict[str, list[int]]:
    return {name: [t.client for t in body.tasks] for name, body in openings(out).items()}


def task_of(client: int) -> ClientTask:
    return ClientTask(client, int(SIZES[client]))


def summed(
    name: str, *clients: int, phase: PhaseId = TURN, states: Mapping[int, int] | None = None
) -> tuple[str, SumsSent]:
    timed = tuple(ClientTime(c, int(SIZES[c]), 1.0, (states or {}).get(c, NONE)) for c in clients)
    return name, SumsSent(phase=phase, timed=timed)


def test_a_round_goes_around() -> None:
    machine = coordinator()
    dealt = start(machine)
    assert sorted(itertools.chain(*dealt.values())) == [0, 1, 2, 3]
    assert machine.behind == (0, frozenset()), "all of them train"
    assert machine.after_report(*summed("e0", *dealt["e0"])) == [("merge", "e0", TURN)]
    assert machine.behind == (0, {"e1"})
    merge, absorb, *out = machine.after_report(*summed("e1", *dealt["e1"]))
    assert (merge, absorb) == (("merge", "e1", TURN), ("update_server", TURN, None))
    (record,) = commits(out)
    assert record.missing == ()
    assert len(openings(out)) == len(out[1:]) and {body.opening.phase for body in openings(out[1:]).values()} == {
        PhaseId(1)
    }
    again = clients_of(out)
    machine.after_report(*summed("e0", *again["e0"], phase=PhaseId(1)))
    assert machine.after_report(*summed("e1", *again["e1"], phase=PhaseId(1)))[-1] == ("finished", Finish("done"))


def test_a_second_pass_has_the_same_cohort() -> None:
    machine = coordinator(passes=2)
    dealt = start(machine)
    machine.after_report(*summed("e0", *dealt["e0"]))
    out = machine.after_report(*summed("e1", *dealt["e1"]))
    assert ("update_server", TURN, None) in out
    assert not commits(out)
    assert {body.opening.phase for body in openings(out).values()} == {PhaseId(0, 0, 1)}
    assert sorted(itertools.chain(*clients_of(out).values())) == [0, 1, 2, 3]


def test_a_round_of_two_passes_tells_of_both() -> None:
    machine = coordinator(passes=2)
    dealt = start(machine)
    bad, *good = dealt["e0"]
    refused = (RefusedUpdate(bad, "not finite"),)
    timed = tuple(ClientTime(c, int(SIZES[c]), 2.0) for c in good)
    machine.after_report("e0", SumsSent(phase=TURN, timed=timed, refused=refused))
    again = clients_of(machine.after_report(*summed("e1", *dealt["e1"])))
    lost = again["e1"].pop()
    machine.after_report(*summed("e0", *again["e0"], phase=PhaseId(0, 0, 1)))
    machine.after_report(*summed("e1", *again["e1"], phase=PhaseId(0, 0, 1)))
    (record,) = commits(machine.after_tick(600.0))
    assert record.refused == refused
    assert record.missing == (lost,)
    assert record.earlier_s == {"e0": 2.0 * len(good), "e1": float(len(dealt["e1"]))}


def test_clients_of_a_lost_executor_go_to_the_others_even_when_their_sums_are_in() -> None:
    machine = coordinator()
    dealt = start(machine)
    machine.after_report(*summed("e0", *dealt["e0"]))
    out = machine.after_loss("e1", "killed")
    ((executor, granted),) = orders(out, TasksGranted)
    assert (executor, len(out)) == ("e0", 1)
    assert sorted(t.client for t in granted.tasks) == sorted(dealt["e1"])
    assert commits(machine.after_report(*summed("e0", *dealt["e1"])))


def test_sums_that_were_in_when_the_executor_was_lost_count_once() -> None:
    machine = coordinator()
    dealt = start(machine)
    machine.after_report(*summed("e1", *dealt["e1"]))
    assert machine.after_loss("e1", "killed") == []
    out = machine.after_report(*summed("e0", *dealt["e0"]))
    (record,) = commits(out)
    assert sum(map(len, record.trained.values())) == 4


def test_sums_of_clients_that_were_not_given_are_ignored() -> None:
    machine = coordinator()
    dealt = start(machine)
    assert machine.after_report(*summed("e0", *dealt["e1"]))[0] == ("ignore", "e0", TURN)


def test_the_last_executor_lost_ends_the_run() -> None:
    machine = coordinator(executors=1)
    start(machine)
    finish = finish_of(machine.after_loss("e0", "killed"))
    assert finish.outcome == "lost"
    assert "killed" in finish.reason


def test_an_idle_executor_takes_what_another_has_not_begun() -> None:
    machine = coordinator(steals=True)
    dealt = start(machine)
    (asked,) = machine.after_report("e0", ExecutorDrained(phase=TURN))
    assert (asked[:2], type(asked[2])) == (("notify", "e1"), TasksRecalled)
    given = (task_of(dealt["e1"][-1]),)
    (granted,) = machine.after_report("e1", TasksReturned(phase=TURN, tasks=given))
    assert granted == ("notify", "e0", TasksGranted(phase=TURN, tasks=given, holds=True))
    # The one that e1 has left it must have begun: nobody is asked any more.
    assert machine.after_report("e0", ExecutorDrained(phase=TURN)) == [("notify", "e0", PhaseClosed(phase=TURN))]
    machine.after_report(*summed("e0", *dealt["e0"], given[0].client))
    assert machine.after_report("e1", ExecutorDrained(phase=TURN)) == [("notify", "e1", PhaseClosed(phase=TURN))]
    out = machine.after_report(*summed("e1", *dealt["e1"][:-1]))
    (record,) = commits(out)
    assert record.stolen == 1


@pytest.mark.parametrize(("seconds", "holds"), [(1e-4, False), (1.0, True)])
def test_a_turn_that_will_soon_be_over_is_not_held_open_for_thieves(seconds: float, holds: bool) -> None:
    machine = coordinator(steals=True, rounds=3)
    dealt = start(machine)
    out: list[Asked] = []
    for round_ in range(2):  # fewer of an executor's clients are not believed
        for name in machine.executors:
            timed = tuple(ClientTime(c, int(SIZES[c]), seconds) for c in dealt[name])
            out = machine.after_report(name, SumsSent(phase=PhaseId(round_), timed=timed))
        dealt = clients_of(out)
    assert [body.holds for body in openings(out).values()] == [holds] * len(machine.executors)
    assert [body.brief for body in openings(out).values()] == [not holds] * len(machine.executors)


def test_who_had_nothing_to_give_is_not_asked_again() -> None:
    machine = coordinator(executors=3, steals=True)
    assert start(machine)["e2"] == [2, 3]
    (asked,) = machine.after_report("e0", ExecutorDrained(phase=TURN))
    assert asked == ("notify", "e2", TasksRecalled(phase=TURN, own=EQUAL, thief=EQUAL))
    assert machine.after_report("e2", TasksReturned(phase=TURN, tasks=())) == [
        ("notify", "e0", PhaseClosed(phase=TURN))
    ]
    assert machine.after_report("e1", ExecutorDrained(phase=TURN)) == [("notify", "e1", PhaseClosed(phase=TURN))]


def test_an_executor_that_is_lost_before_all_have_joined_ends_the_run() -> None:
    machine = coordinator()
    machine.after_report("e0", ExecutorJoined())
    finish = finish_of(machine.after_loss("e1", "killed"))
    assert finish.outcome == "lost"


def test_what_a_victim_gives_back_for_a_lost_thief_is_not_lost() -> None:
    machine = coordinator(steals=True)
    dealt = start(machine)
    machine.after_report("e0", ExecutorDrained(phase=TURN))
    machine.after_loss("e0", "killed")
    last = task_of(dealt["e1"][-1])
    machine.after_report("e1", TasksReturned(phase=TURN, tasks=(last,)))
    out = machine.after_report("e1", ExecutorDrained(phase=TURN))
    assert out == [("notify", "e1", TasksGranted(phase=TURN, tasks=(last,), holds=True))]


@pytest.mark.parametrize("lie", ["samples", "state", "another's", "twice", "unasked"])
def test_only_what_was_given_and_asked_for_is_given_back(lie: str) -> None:
    """What is wrong with one task takes none of the others from those that are trained."""
    machine = coordinator(steals=True)
    dealt = start(machine)
    if lie != "unasked":
        machine.after_report("e0", ExecutorDrained(phase=TURN))
    good, last = map(task_of, dealt["e1"])
    other = task_of(dealt["e0"][0])
    wrong = {
        "samples": msgspec.structs.replace(last, samples=10**6),
        "state": msgspec.structs.replace(last, state=3),
        "another's": other,
        "twice": good,
    }
    tasks = (good, wrong.get(lie, last))
    dismissed, *out = machine.after_report("e1", TasksReturned(phase=TURN, tasks=tasks))
    assert dismissed == ("dismiss", "e1", "gave back clients that it was not given")
    granted = [task for _, order in orders(out, TasksGranted) for task in order.tasks]
    assert sorted(task.client for task in granted) == sorted(dealt["e1"])


def test_one_at_a_time() -> None:
    machine = coordinator(single=True)
    dealt = start(machine)
    assert all(len(clients) == 1 for clients in dealt.values())
    merge, *out = machine.after_report(*summed("e0", *dealt["e0"]))
    assert merge == ("merge", "e0", TURN)
    ((_, granted),) = orders(out, TasksGranted)
    assert (len(out), len(granted.tasks), granted.holds) == (1, 1, False)


def test_a_deadline_commits_who_is_in() -> None:
    machine = coordinator(deadline_s=10.0)
    dealt = start(machine)
    machine.after_report(*summed("e0", *dealt["e0"]))
    assert machine.after_tick(9.0) == []
    out = machine.after_tick(10.0)
    assert ("notify", "e1", PhaseDropped(phase=TURN)) in out
    (record,) = commits(out)
    assert record.closed_by == "deadline"
    assert sorted(record.missing) == sorted(dealt["e1"])
    assert machine.after_report(*summed("e1", *dealt["e1"])) == [("ignore", "e1", TURN)]


def test_a_late_executor_keeps_the_states_of_clients_that_are_in() -> None:
    machine = coordinator(deadline_s=10.0)
    dealt = start(machine)
    machine.after_report(*summed("e0", *dealt["e0"]))
    (granted,) = machine.after_loss("e1", "killed")
    assert granted[0] == "notify"
    out = machine.after_tick(10.0)
    assert ("notify", "e0", PhaseDropped(phase=TURN, kept=tuple(dealt["e0"]))) in out


def test_a_second_pass_that_fails_is_tried_again_alone() -> None:
    machine = coordinator(passes=2, deadline_s=10.0, minimum=4)
    dealt = start(machine)
    machine.after_report(*summed("e0", *dealt["e0"]))
    machine.after_report(*summed("e1", *dealt["e1"]))
    out = machine.after_tick(10.0)
    assert {body.opening.phase for body in openings(out).values()} == {PhaseId(0, 1, 1)}


def test_too_few_at_the_deadline_is_tried_again_and_then_fails() -> None:
    machine = coordinator(deadline_s=10.0, minimum=4, attempts=2)
    dealt = start(machine)
    machine.after_report(*summed("e0", *dealt["e0"]))
    out = machine.after_tick(10.0)
    assert {body.opening.phase for body in openings(out).values()} == {PhaseId(0, 1)}
    assert ("update_server", TURN, None) not in out
    finish = finish_of(machine.after_tick(20.0))
    assert "after 2 attempts" in finish.reason


@pytest.mark.parametrize(("diverged", "outcome"), [(0, "lost"), (3, "lost"), (4, "diverged")])
def test_clients_that_are_all_refused_are_not_trained_again(diverged: int, outcome: str) -> None:
    machine = coordinator(attempts=3)
    reports = [
        (
            name,
            SumsSent(
                phase=TURN,
                timed=(),
                refused=tuple(RefusedUpdate(client, "bad", client < diverged) for client in clients),
            ),
        )
        for name, clients in start(machine).items()
    ]
    finish = finish_of([machine.after_report(*report) for report in reports][-1])
    assert finish.outcome == outcome
    assert finish.reason.startswith("round 1: 0 clients were in, expected at least 1; client ")


def test_a_quorum_closes_the_round() -> None:
    machine = coordinator(quorum=0.5)
    dealt = start(machine)
    sizes = {name: len(clients) for name, clients in dealt.items()}
    first = max(sizes, key=lambda name: sizes[name])
    (record,) = commits(machine.after_report(*summed(first, *dealt[first])))
    assert record.closed_by == "quorum"


def test_a_refused_client_is_not_missing() -> None:
    machine = coordinator()
    dealt = start(machine)
    machine.after_report(*summed("e0", *dealt["e0"]))
    bad, *good = dealt["e1"]
    refused = (RefusedUpdate(bad, "not finite"),)
    timed = tuple(ClientTime(c, int(SIZES[c]), 1.0) for c in good)
    out = machine.after_report("e1", SumsSent(phase=TURN, timed=timed, refused=refused))
    (record,) = commits(out)
    assert record.refused == refused
    assert record.missing == ()


@pytest.mark.parametrize("passes", [1, 2])
def test_clients_go_on_from_the_states_that_were_reported(passes: int) -> None:
    machine = coordinator(keeps=True, passes=passes)
    dealt = start(machine)
    clients = sorted(itertools.chain(*dealt.values()))
    states = {client: 70 + client for client in clients[1:]}
    machine.after_report(*summed("e0", *dealt["e0"], states=states))
    assert machine.states is not None and set(machine.states) == {NONE}, "the pass is open"
    out = machine.after_report(*summed("e1", *dealt["e1"], states=states))
    broadcast = {t.client: t.state for body in openings(out).values() for t in body.tasks}
    assert broadcast == {clients[0]: NONE, **states}


def test_states_of_a_round_that_is_dropped_do_not_count() -> None:
    machine = coordinator(keeps=True, deadline_s=10.0, minimum=4)
    dealt = start(machine)
    machine.after_report(*summed("e0", *dealt["e0"], states=dict.fromkeys(range(4), 7)))
    out = machine.after_tick(10.0)
    assert {t.state for body in openings(out).values() for t in body.tasks} == {NONE}


def test_who_reports_a_state_that_is_none_is_dismissed() -> None:
    machine = coordinator(keeps=True)
    dealt = start(machine)
    out = machine.after_report(*summed("e0", *dealt["e0"], states=dict.fromkeys(range(4), -2)))
    assert ("dismiss", "e0", "reported a state that is none") in out


def test_executors_with_a_client_of_their_own_train_only_that() -> None:
    names = ["e0", "e1", "e2"]
    rules = RoundRules(rounds=1, needed=2)
    throughput, clients = ThroughputModel(3, window_rounds=5), {name: client for client, name in enumerate(names)}
    machine = Asking(names, rules, SIZES, lambda r: np.array([0, 2]), throughput, clients=clients)
    assert start(machine) == {"e0": [0], "e2": [2]}
    machine.after_loss("e0", "killed")
    (record,) = commits(machine.after_report(*summed("e2", 2)))
    assert record.missing == (0,)


def test_a_schedule_that_wasmade_by_sizes_says_nothing_of_seconds() -> None:
    throughput = ThroughputModel(1, window_rounds=5)
    sizes, everybody = np.array([4, 3, 2, 1]), np.arange(4)
    scheduler = ClientScheduler(["e0"], RoundRules(rounds=3), sizes, throughput, None, {})
    scheduler.plan(1, everybody, ["e0"])
    throughput.record(0, 0, [ClientTime(client, int(size), 0.1 * int(size)) for client, size in enumerate(sizes)])
    assert throughput.known and scheduler.assignment(1, everybody, ["e0"]).schedule is None, "it was made before"
    scheduler.plan(2, everybody, ["e0"])
    schedule = scheduler.assignment(2, everybody, ["e0"]).schedule
    assert schedule is not None and schedule.makespan_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rules", "broadcast"),
    [
        ({}, "all of 8, at least 1, deadline 600 s"),
        ({"quorum": 0.5, "staleness": 2}, "50% of 8, at least 1, deadline 600 s, late ones count for 2 rounds"),
        ({"poisson": True}, "all of those drawn, at least 1, deadline 600 s"),
        (
            {"at_work": 16, "staleness": 3, "minimum": 2},
            "the next 8 of 16 at work, at least 2, deadline 600 s, late ones count for 3 rounds",
        ),
    ],
)
def test_closing_rules_in_words(rules: dict[str, object], broadcast: str) -> None:
    assert RoundRules(**{"rounds": 2, "needed": 8} | rules).description == broadcast
