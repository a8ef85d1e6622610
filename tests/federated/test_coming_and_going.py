"""The coordinator's machine with sites: executors with a client each, which are lost and come back."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    CommitRound,
    CoordinatorInstruction,
    DismissExecutor,
    ExecutorLost,
    FinishRounds,
    IgnoreSums,
    MergeSums,
    Notify,
    RoundRecord,
    Tick,
)
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
from isthmus.protocol.federated_rules import ExecutorChurn, RoundRules, Waiting
from isthmus.protocol.federated_throughput import ThroughputModel
from isthmus.protocol.machine import FromDevice

SITES = ("a", "b", "c")


class Sites:
    """The machine, and what to say to it."""

    def __init__(self, *, start: int = 3, wait_s: float = 5.0, **rules: object) -> None:
        options = {"rounds": 9, "needed": 3, "gathering": ExecutorChurn(start=start, wait_s=wait_s)} | rules
        self.diverged = 0
        """As many of the first sites have numbers that are not finite."""
        self.sizes = np.zeros(3, dtype=np.int64)
        self.machine = FederatedCoordinator(
            SITES,
            RoundRules(**options),
            self.sizes,
            lambda r: self.machine.here,
            ThroughputModel(3, window_rounds=5),
            clients={name: number for number, name in enumerate(SITES)},
        )
        self.machine.handle(Tick(now_s=0.0))

    def join(self, *names: str) -> list[CoordinatorInstruction]:
        out: list[CoordinatorInstruction] = []
        for name in names:
            out += self.machine.handle(FromDevice(name, ExecutorJoined(samples=10 * (SITES.index(name) + 1))))
        return out

    def lose(self, name: str) -> list[CoordinatorInstruction]:
        return self.machine.handle(ExecutorLost(executor=name, reason="gone"))

    def update(
        self, name: str, phase: PhaseId, *, good: bool = True, seconds: float = 1.0
    ) -> list[CoordinatorInstruction]:
        client = SITES.index(name)
        timed = (ClientTime(client, 10, seconds),) if good else ()
        refused = () if good else (RefusedUpdate(client, "bad", client < self.diverged),)
        return self.machine.handle(FromDevice(name, SumsSent(phase=phase, timed=timed, refused=refused)))

    def tick(self, now_s: float) -> list[CoordinatorInstruction]:
        return self.machine.handle(Tick(now_s=now_s))


def openings(out: list[CoordinatorInstruction]) -> dict[str, PhaseOpened]:
    return {i.executor: i.body for i in out if isinstance(i, Notify) and isinstance(i.body, PhaseOpened)}


def asked(out: list[CoordinatorInstruction]) -> dict[str, tuple[PhaseId, list[int]]]:
    return {name: (body.opening.phase, [t.client for t in body.tasks]) for name, body in openings(out).items()}


def committed(out: list[CoordinatorInstruction]) -> dict[str, list[int]]:
    (commit,) = (i for i in out if isinstance(i, CommitRound))
    return {name: [t.client for t in timed] for name, timed in commit.record.trained.items()}


def test_the_first_round_begins_when_enough_are_here() -> None:
    sites = Sites(start=2)
    assert sites.join("c") == []
    assert sites.tick(1000.0) == [], "people start machines"
    opened = asked(sites.join("a"))
    assert opened == {"a": (PhaseId(0), [0]), "c": (PhaseId(0), [2])}
    assert sites.sizes.tolist() == [10, 0, 30]


def test_who_is_lost_is_missing_and_used_again_from_the_next_turn_on() -> None:
    sites = Sites()
    sites.join(*SITES)
    assert sites.lose("b") == []
    assert sites.join("b") == [], "the open turn goes on without it"
    sites.update("a", PhaseId(0))
    out = sites.update("c", PhaseId(0))
    assert committed(out) == {"a": [0], "c": [2]}
    (commit,) = (i for i in out if isinstance(i, CommitRound))
    assert commit.record.missing == (1,)
    assert asked(out).keys() == {"a", "b", "c"}


def test_an_update_counts_once_and_a_late_one_nowhere() -> None:
    sites = Sites(deadline_s=10.0)
    sites.join(*SITES)
    assert sites.update("a", PhaseId(0)) == [MergeSums("a", PhaseId(0))]
    out = sites.update("a", PhaseId(0))
    assert out[0] == IgnoreSums("a", PhaseId(0)) and isinstance(out[1], DismissExecutor)
    sites.join("a")
    assert sites.update("b", PhaseId(0)) == [MergeSums("b", PhaseId(0))]
    out = sites.tick(10.0)
    assert Notify("c", PhaseDropped(phase=PhaseId(0))) in out
    assert committed(out) == {"a": [0], "b": [1]}
    assert sites.update("c", PhaseId(0)) == [IgnoreSums("c", PhaseId(0))]
    sites.update("b", PhaseId(1))
    sites.update("a", PhaseId(1))
    assert committed(sites.update("c", PhaseId(1))) == {"a": [0], "b": [1], "c": [2]}


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_not_believed(seconds: float) -> None:
    sites = Sites()
    sites.join(*SITES)
    out = sites.update("a", PhaseId(0), seconds=seconds)
    assert out[:2] == [IgnoreSums("a", PhaseId(0)), DismissExecutor("a", "reported a time that is none")]


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


def test_too_few_for_too_long_ends_the_run() -> None:
    sites = Sites(minimum=2, deadline_s=60.0)
    sites.join(*SITES)
    sites.lose("a")
    sites.lose("b")
    sites.lose("c")
    sites.tick(10.0)
    sites.join("b")
    assert sites.tick(59.0) == []
    finish = sites.tick(60.0)[-1]
    assert isinstance(finish, FinishRounds)
    assert (finish.outcome, finish.reason) == ("lost", "round 1: 1 executors were here for 60 s, expected 2")


def test_after_a_restart_the_least_number_is_enough() -> None:
    sites = Sites(first_round=4, minimum=1)
    assert sites.join("b") == []
    assert asked(sites.tick(5.0)) == {"b": (PhaseId(4), [1])}
    assert asked(sites.update("b", PhaseId(4))) == {"b": (PhaseId(5), [1])}


def test_a_site_is_told_why_its_update_is_refused() -> None:
    sites = Sites()
    sites.join(*SITES)
    assert sites.update("a", PhaseId(0)) == [MergeSums("a", PhaseId(0))]
    broadcast = Notify("b", UpdateRefused(phase=PhaseId(0), reason="bad"))
    assert sites.update("b", PhaseId(0), good=False) == [MergeSums("b", PhaseId(0)), broadcast]


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
    finish = out[-1]
    assert isinstance(finish, FinishRounds)
    assert finish.outcome == outcome
    assert finish.reason == (
        "round 1: 0 clients were in, expected at least 1, after 2 attempts; client 0: bad; client 1: bad; client 2: bad"
    )


def test_over_selection_closes_when_enough_are_in() -> None:
    sites = Sites(needed=2)
    sites.join(*SITES)
    sites.update("a", PhaseId(0))
    out = sites.update("b", PhaseId(0))
    (commit,) = (i for i in out if isinstance(i, CommitRound))
    assert (commit.record.closed_by, commit.record.missing) == ("quorum", (2,))


# Late updates that count (FedBuff)


def record(out: list[CoordinatorInstruction]) -> RoundRecord:
    (commit,) = (i for i in out if isinstance(i, CommitRound))
    return commit.record


def test_a_late_update_counts_in_the_round_in_which_it_comes() -> None:
    sites = Sites(staleness=2, quorum=0.6)
    sites.join(*SITES)
    sites.update("a", PhaseId(0))
    out = sites.update("b", PhaseId(0))
    assert record(out).closed_by == "quorum"
    assert not any(isinstance(i, Notify) and i.executor == "c" for i in out), "c goes on"
    assert asked(out).keys() == {"a", "b"}
    (opening,) = {(body.opening.clients, body.opening.samples) for body in openings(out).values()}
    assert opening == (3, 60), "its weight has room"
    assert sites.update("c", PhaseId(0)) == [MergeSums("c", PhaseId(0))]
    out = sites.update("a", PhaseId(1))
    assert committed(out) == {"c": [2], "a": [0]}
    assert record(out).stale == ((2, 1),)
    assert asked(out) == {"a": (PhaseId(2), [0]), "c": (PhaseId(2), [2])}, "b is late now"
    assert sites.update("c", PhaseId(0))[0] == IgnoreSums("c", PhaseId(0)), "never twice"


def test_who_is_too_late_is_asked_for_something_newer() -> None:
    sites = Sites(staleness=1, quorum=0.6)
    sites.join(*SITES)
    for round_ in range(2):
        sites.update("a", PhaseId(round_))
        out = sites.update("b", PhaseId(round_))
    assert Notify("c", PhaseDropped(phase=PhaseId(0))) in out
    assert asked(out)["c"] == (PhaseId(2), [2])
    assert sites.update("c", PhaseId(0)) == [IgnoreSums("c", PhaseId(0))]


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
