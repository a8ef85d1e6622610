"""The coordinator's machine with sites: executors with a client each, which are lost and come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isthmus.programs.merging import OpenMerge
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import RoundPort, Rounds, Waiting
from isthmus.protocol.federated_messages import (
    ClientTime,
    ExecutorJoined,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    RefusedUpdate,
    SumsSent,
    UpdateRefused,
)
from isthmus.protocol.federated_participation import Buffer, Participation
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.session.session import CLOSED, EXIT_S, Observation
from tests.federated.populations import Asking, commits, finish_of, orders
from tests.programs.ports import Asked, Recorder

SITES = ("a", "b", "c")


class Sites:
    """The machine, and what to say to it."""

    def __init__(self, *, start: int = 3, wait_s: float = 5.0, **rules: object) -> None:
        options = {"rounds": 9, "needed": 3, "gathering": ExecutorChurn(start=start, wait_s=wait_s)} | rules
        self.diverged = 0
        """As many of the first sites have numbers that are not finite."""
        self.sizes = np.zeros(3, dtype=np.int64)
        self.machine = Asking(
            SITES,
            RoundRules(**options),
            self.sizes,
            lambda r: self.machine.here,
            ThroughputModel(3, window_rounds=5),
            clients={name: number for number, name in enumerate(SITES)},
        )
        self.machine.after_tick(0.0)

    def join(self, *names: str) -> list[Asked]:
        out: list[Asked] = []
        for name in names:
            out += self.machine.after_report(name, ExecutorJoined(samples=10 * (SITES.index(name) + 1)))
        return out

    def lose(self, name: str) -> list[Asked]:
        return self.machine.after_loss(name, "gone")

    def update(self, name: str, phase: PhaseId, *, good: bool = True, seconds: float = 1.0) -> list[Asked]:
        client = SITES.index(name)
        timed = (ClientTime(client, int(self.sizes[client]), seconds),) if good else ()
        refused = () if good else (RefusedUpdate(client, "bad", client < self.diverged),)
        return self.machine.after_report(name, SumsSent(phase=phase, timed=timed, refused=refused))

    def tick(self, now_s: float) -> list[Asked]:
        return self.machine.after_tick(now_s)


class Watched(Sites):
    """A run of sites, and the lines that people read."""

    def __init__(self) -> None:
        super().__init__()
        self._recorder = Recorder(RoundPort)
        self.machine.port = self._recorder.port

    def looked_at(self, now_s: float, **seen: Any) -> None:
        self.machine.clock(now_s)
        self.machine.looked(Observation(**seen))

    def lines(self) -> list[str]:
        """Since the last call."""
        return [str(call[1]) for call in self._recorder.took() if call[0] == "note"]

    def lines_at(self, *times_s: float) -> list[str]:
        for now_s in times_s:
            self.looked_at(now_s)
        return self.lines()


def openings(out: list[Asked]) -> dict[str, PhaseOpened]:
    return dict(orders(out, PhaseOpened))


def asked(out: list[Asked]) -> dict[str, tuple[PhaseId, list[int]]]:
    return {name: (body.opening.phase, [t.client for t in body.tasks]) for name, body in openings(out).items()}


def committed(out: list[Asked]) -> dict[str, list[int]]:
    (record,) = commits(out)
    return {name: [t.client for t in timed] for name, timed in record.trained.items()}


def test_a_device_that_cannot_train_ends_no_run_while_another_is_on_its_way() -> None:
    rules = RoundRules(rounds=1, needed=2, gathering=ExecutorChurn(start=1, wait_s=5.0))
    machine = Asking((), rules, np.array([10, 20]), lambda r: np.arange(2), ThroughputModel(0, window_rounds=5))
    seen = Observation(offers=frozenset("ab"), starting=frozenset("ab"))
    machine.looked(seen)
    for device, ends in (("a", False), ("b", True)):
        machine.joined(device)
        machine.failed(device, "engine 'jax'", "user")
        machine.looked(seen)
        assert machine.over == ends
    assert machine.finish is not None and (machine.finish.outcome, machine.finish.reason) == ("failed", "engine 'jax'")


def test_the_first_round_begins_when_enough_are_here() -> None:
    sites = Sites(start=2)
    assert sites.join("c") == []
    assert sites.tick(1000.0) == [], "people start machines"
    opened = asked(sites.join("a"))
    assert opened == {"a": (PhaseId(0), [0]), "c": (PhaseId(0), [2])}
    assert sites.sizes.tolist() == [10, 0, 30]


def test_the_first_round_does_not_begin_with_fewer_than_make_one() -> None:
    sites = Sites(start=1, minimum=2)
    assert sites.join("c") == [] and sites.machine.waiting == Waiting(2, None)
    assert asked(sites.join("a")).keys() == {"a", "c"}


def test_who_is_lost_is_missing_and_used_again_from_the_next_turn_on() -> None:
    sites = Sites()
    sites.join(*SITES)
    assert sites.lose("b") == []
    assert sites.join("b") == [], "the open turn goes on without it"
    sites.update("a", PhaseId(0))
    out = sites.update("c", PhaseId(0))
    assert committed(out) == {"a": [0], "c": [2]}
    (record,) = commits(out)
    assert record.missing == (1,)
    assert asked(out).keys() == {"a", "b", "c"}


def test_an_update_counts_once_and_a_late_one_nowhere() -> None:
    sites = Sites(deadline_s=10.0)
    sites.join(*SITES)
    assert sites.update("a", PhaseId(0)) == [("merge", "a", PhaseId(0))]
    out = sites.update("a", PhaseId(0))
    assert out[0] == ("ignore", "a", PhaseId(0)) and out[1][0] == "dismiss"
    sites.join("a")
    assert sites.update("b", PhaseId(0)) == [("merge", "b", PhaseId(0))]
    out = sites.tick(10.0)
    assert ("notify", "c", PhaseDropped(phase=PhaseId(0))) in out
    assert committed(out) == {"a": [0], "b": [1]}
    assert sites.update("c", PhaseId(0)) == [("ignore", "c", PhaseId(0))]
    sites.update("b", PhaseId(1))
    sites.update("a", PhaseId(1))
    assert committed(sites.update("c", PhaseId(1))) == {"a": [0], "b": [1], "c": [2]}


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_not_believed(seconds: float) -> None:
    sites = Sites()
    sites.join(*SITES)
    out = sites.update("a", PhaseId(0), seconds=seconds)
    assert out[:2] == [("ignore", "a", PhaseId(0)), ("dismiss", "a", "reported a time that is none")]


def test_when_all_have_left_the_round_waits_for_the_least_number() -> None:
    sites = Sites(minimum=2, deadline_s=60.0)
    sites.join(*SITES)
    sites.update("a", PhaseId(0))
    sites.lose("a")
    sites.lose("b")
    assert asked(sites.lose("c")) == {}
    sites.tick(3.0)
    assert sites.join("b") == []
    assert sites.join("c") == [], "others may come within seconds"
    assert sites.tick(4.0) == []
    assert asked(sites.tick(5.0)) == {"b": (PhaseId(0, 1), [1]), "c": (PhaseId(0, 1), [2])}


def test_what_is_waited_for_and_until_when() -> None:
    sites = Sites(minimum=2, deadline_s=60.0, start=3)
    assert sites.machine.waiting == Waiting(3, None), "people start sites"
    sites.join(*SITES)
    assert sites.machine.waiting is None, "a round is open"
    sites.update("a", PhaseId(0))
    for name in SITES:
        sites.lose(name)
    assert sites.machine.waiting == Waiting(2, 60.0)
    sites.tick(3.0)
    sites.join("b")
    assert sites.machine.waiting == Waiting(2, 60.0)
    sites.join("c")
    assert sites.machine.waiting == Waiting(3, 5.0, goes_on=True)


def test_a_first_round_that_waits_without_an_end_says_what_begins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.session.session.FIRST_S", 0.1)
    run = Watched()
    run.join("a", "b")
    notes = run.lines_at(1.0, 100.0)
    assert any(
        "2 of 3 sites are here; the round begins with 3; for fewer, set federated.deployment.start" in n for n in notes
    ), notes


def test_sites_that_all_left_are_said_in_one_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one's reason was told when it left."""
    monkeypatch.setattr("isthmus.session.session.FIRST_S", 0.1)
    run = Watched()
    run.join(*SITES)
    for name in SITES:
        run.machine.disconnected(name)
    run.looked_at(0.0)
    assert {f"site {name} was lost: {CLOSED}" for name in SITES} <= set(run.lines())
    notes = run.lines_at(1.0, 700.0, 800.0)
    waits = [text for text in notes if text.startswith("waiting")]
    assert waits and all(text.startswith("waiting for sites that left: all 3 for ") for text in waits), notes
    assert all(len(text) < 120 and CLOSED not in text for text in waits)


@pytest.mark.parametrize(("ended_s", "cause"), [(3.0, "its process was killed by SIGKILL"), (None, CLOSED)])
def test_how_a_process_ended_is_waited_for_where_only_its_connection_closed(ended_s: float | None, cause: str) -> None:
    """On a machine that is busy the exit is heard of later; a process that runs on is lost in the end."""
    run = Watched()
    run.join("a")
    run.machine.disconnected("a")
    run.looked_at(0.0, starting=frozenset("a"))
    lines = run.lines()
    for now_s in (1.0, 2.0, 3.0, EXIT_S):
        assert not any("was lost" in line for line in lines)
        killed = {} if ended_s is None or now_s < ended_s else {"a": "its process was killed by SIGKILL"}
        run.looked_at(now_s, ended=killed, starting=frozenset("a") - killed.keys())
        lines = run.lines()
        if now_s == ended_s:
            break
    assert f"site a was lost: {cause}" in lines


def test_the_only_executor_that_had_clients_is_lost_and_the_round_begins_anew_with_another() -> None:
    """Its loss, the plan and whatever else is due come with one look at the clock."""
    asked = Recorder(RoundPort)
    rules = RoundRules(rounds=1, steals=False)
    run = Rounds("ab", rules, np.array([5]), lambda _: np.arange(1), ThroughputModel(2, window_rounds=5))
    run.port = asked.port
    run.looked(Observation())
    for name in "ab":
        run.joined(name)
        run.heard(name, ExecutorJoined())
    ((had, _),) = orders(asked.took(), PhaseOpened)
    run.disconnected(had, "gone")
    run.looked(Observation(ended={had: "killed"}))
    ((other, opened),) = orders(asked.took(), PhaseOpened)
    assert {had, other} == {"a", "b"} and opened.opening.phase == PhaseId(0, 1)


def test_too_few_for_too_long_ends_the_run() -> None:
    sites = Sites(minimum=2, deadline_s=60.0)
    sites.join(*SITES)
    sites.lose("a")
    sites.lose("b")
    sites.lose("c")
    sites.tick(10.0)
    sites.join("b")
    assert sites.tick(59.0) == []
    finish = finish_of(sites.tick(60.0))
    assert (finish.outcome, finish.reason) == ("lost", "round 1: 1 site was here for 60 s, expected 2")


def test_after_a_restart_the_least_number_is_enough() -> None:
    sites = Sites(first_round=4, minimum=1)
    assert sites.join("b") == []
    assert asked(sites.tick(5.0)) == {"b": (PhaseId(4), [1])}
    assert asked(sites.update("b", PhaseId(4))) == {"b": (PhaseId(5), [1])}


def test_a_site_is_told_why_its_update_is_refused() -> None:
    sites = Sites()
    sites.join(*SITES)
    assert sites.update("a", PhaseId(0)) == [("merge", "a", PhaseId(0))]
    broadcast = ("notify", "b", UpdateRefused(phase=PhaseId(0), reason="bad"))
    assert sites.update("b", PhaseId(0), good=False) == [("merge", "b", PhaseId(0)), broadcast]


def test_before_another_attempt_sites_that_are_away_are_waited_for() -> None:
    sites = Sites(first_round=4)
    assert sites.join("b") == []
    assert asked(sites.tick(5.0)) == {"b": (PhaseId(4), [1])}
    assert asked(sites.update("b", PhaseId(4), good=False)) == {}
    assert sites.join("a") == []
    assert asked(sites.tick(9.0)) == {}
    assert asked(sites.tick(10.0)) == {"a": (PhaseId(4, 1), [0]), "b": (PhaseId(4, 1), [1])}


@pytest.mark.parametrize(("diverged", "outcome"), [(0, "lost"), (2, "lost"), (3, "diverged")])
def test_updates_that_are_all_refused_are_tried_again_and_then_end_the_run(diverged: int, outcome: str) -> None:
    sites = Sites(attempts=2)
    sites.diverged = diverged
    sites.join(*SITES)
    sites.update("a", PhaseId(0), good=False)
    sites.update("b", PhaseId(0), good=False)
    out = sites.update("c", PhaseId(0), good=False)
    assert {phase for phase, _ in asked(out).values()} == {PhaseId(0, 1)}
    for name in SITES:
        out = sites.update(name, PhaseId(0, 1), good=False)
    finish = finish_of(out)
    assert finish.outcome == outcome
    assert finish.reason == (
        "round 1: 0 clients were in, expected at least 1, after 2 attempts; client 0: bad; client 1: bad; client 2: bad"
    )


def test_over_selection_closes_when_enough_are_in() -> None:
    sites = Sites(needed=2)
    sites.join(*SITES)
    sites.update("a", PhaseId(0))
    out = sites.update("b", PhaseId(0))
    (record,) = commits(out)
    assert (record.closed_by, record.missing) == ("quorum", (2,))


@pytest.mark.parametrize(
    ("quorum", "needed", "enough"),
    [(0.5, 5, 3), (0.67, 3, 3), (0.6, 3, 2), (0.1, 30, 3), (0.07, 100, 7), (0.29, 100, 29), (1.0, 7, 7), (1e-6, 4, 1)],
)
def test_a_quorum_is_the_smallest_number_that_is_such_a_share(quorum: float, needed: int, enough: int) -> None:
    assert RoundRules(rounds=1, quorum=quorum).enough(needed) == enough
    rules = Participation(clients=needed, quorum=quorum, staleness=1)
    assert rules.expected(200) == Buffer(rules, np.full(200, 5), 0).size == enough


def test_a_quorum_is_a_share_of_the_clients_needed_whoever_is_behind() -> None:
    sites = Sites(quorum=0.6)
    sites.join(*SITES)
    for round_ in range(5):
        assert sites.update("a", PhaseId(round_)) == [("merge", "a", PhaseId(round_))]
        assert committed(sites.update("b", PhaseId(round_))) == {"a": [0], "b": [1]}


def test_a_quorum_is_a_share_of_the_clients_needed_whoever_is_away() -> None:
    sites = Sites(quorum=0.6, start=2)
    sites.join("a", "b")
    assert sites.update("a", PhaseId(0)) == [("merge", "a", PhaseId(0))]
    assert committed(sites.update("b", PhaseId(0))) == {"a": [0], "b": [1]}


def test_a_second_pass_takes_no_share_of_the_first_ones_share() -> None:
    sites = Sites(quorum=0.6, passes=2)
    sites.join(*SITES)
    sites.update("a", PhaseId(0))
    assert asked(sites.update("b", PhaseId(0))).keys() == {"a", "b"}
    assert sites.update("a", PhaseId(0, 0, 1)) == [("merge", "a", PhaseId(0, 0, 1))]
    assert committed(sites.update("b", PhaseId(0, 0, 1))) == {"a": [0], "b": [1]}


def test_a_quorum_of_a_poisson_draw_is_of_those_drawn() -> None:
    sites = Sites(quorum=0.6, poisson=True, needed=1000)
    sites.join(*SITES)
    assert sites.update("a", PhaseId(0)) == [("merge", "a", PhaseId(0))]
    assert committed(sites.update("b", PhaseId(0))) == {"a": [0], "b": [1]}


def test_who_cannot_come_is_not_waited_for() -> None:
    """Three of three are needed, and one is still in a round that its deadline closed."""
    sites = Sites(quorum=0.67, deadline_s=10.0)
    sites.join(*SITES)
    sites.update("a", PhaseId(0))
    assert sites.update("b", PhaseId(0)) == [("merge", "b", PhaseId(0))]
    assert record(sites.tick(10.0)).closed_by == "deadline"
    assert sites.update("a", PhaseId(1)) == [("merge", "a", PhaseId(1))]
    out = sites.update("b", PhaseId(1))
    assert committed(out) == {"a": [0], "b": [1]} and record(out).closed_by == "behind"


@pytest.mark.parametrize(
    ("outstanding", "done", "enough", "behind", "why"),
    [
        (0, 3, 3, 0, "all"),
        (0, 2, 2, 0, "all"),  # one is away, and was not asked
        (1, 2, 2, 1, "quorum"),
        (3, 1, 3, 3, "behind"),
        (1, 2, 3, 1, "behind"),
        (1, 0, 3, 1, None),
        (2, 1, 3, 1, None),
    ],
)
def test_a_round_below_its_quorum_is_not_recorded_as_one_of_all(
    outstanding: int, done: int, enough: int, behind: int, why: str | None
) -> None:
    class Opened(OpenMerge):
        outstanding = property(lambda _: outstanding)

    opened = Opened(opened_s=1.0, done=done, enough=enough, deadline_s=10.0)
    assert opened.why_over(2.0, behind=behind) == why
    assert opened.why_over(11.0, behind=behind) == (why or "deadline")


# Late updates that count (FedBuff)


def record(out: list[Asked]) -> RoundRecord:
    (record,) = commits(out)
    return record


def test_a_late_update_counts_in_the_round_in_which_it_comes() -> None:
    sites = Sites(staleness=2, quorum=0.6)
    sites.join(*SITES)
    sites.update("a", PhaseId(0))
    out = sites.update("b", PhaseId(0))
    assert record(out).closed_by == "quorum"
    assert not any(call[:2] == ("notify", "c") for call in out), "c goes on"
    assert asked(out).keys() == {"a", "b"}
    (opening,) = {(body.opening.clients, body.opening.samples) for body in openings(out).values()}
    assert opening == (3, 60), "its weight has room"
    assert sites.update("c", PhaseId(0)) == [("merge", "c", PhaseId(0))]
    out = sites.update("a", PhaseId(1))
    assert committed(out) == {"c": [2], "a": [0]}
    assert record(out).stale == ((2, 1),)
    assert asked(out) == {"a": (PhaseId(2), [0]), "c": (PhaseId(2), [2])}, "b is late now"
    assert sites.update("c", PhaseId(0))[0] == ("ignore", "c", PhaseId(0)), "never twice"


def test_who_is_too_late_is_asked_for_something_newer() -> None:
    sites = Sites(staleness=1, quorum=0.6)
    sites.join(*SITES)
    for round_ in range(2):
        sites.update("a", PhaseId(round_))
        out = sites.update("b", PhaseId(round_))
    assert ("notify", "c", PhaseDropped(phase=PhaseId(0))) in out
    assert asked(out)["c"] == (PhaseId(2), [2])
    assert sites.update("c", PhaseId(0)) == [("ignore", "c", PhaseId(0))]


def test_a_late_site_that_is_lost_is_waited_for_no_longer() -> None:
    sites = Sites(staleness=5, quorum=0.6, needed=3)
    sites.join(*SITES)
    sites.update("a", PhaseId(0))
    sites.update("b", PhaseId(0))
    sites.update("a", PhaseId(1))
    sites.lose("c")
    out = sites.update("b", PhaseId(1))
    assert committed(out) == {"a": [0], "b": [1]}
    assert asked(sites.join("c")) == {}


def test_a_round_waits_for_late_ones_when_all_others_are_in() -> None:
    sites = Sites(staleness=5, quorum=0.3, minimum=1)
    sites.join(*SITES)
    out = sites.update("a", PhaseId(0))
    assert asked(out).keys() == {"a"}
    out = sites.update("a", PhaseId(1))
    assert asked(out).keys() == {"a"}
    out = sites.update("b", PhaseId(0))
    assert record(out).stale == ((1, 2),)
