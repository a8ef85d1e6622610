"""Whoever works for an earlier turn still is waited for in no later one: rounds close by who can be in them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import (
    ClientTask,
    ClientTime,
    ExecutorDrained,
    LinearFit,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    PhaseSetup,
    RefusedUpdate,
    SumsSent,
)
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.protocol.run_messages import Halt
from isthmus.runtime.federated.executor import Executor
from isthmus.runtime.messages.federated import FromExecutor, SummedValues, ToExecutor
from isthmus.runtime.transport.reconnection import OpenConnection
from isthmus.simulator.rounds import FederatedCosts
from isthmus_testing.virtual_runs import simulate_federated

QUICK_S, SLOW_S, DEADLINE_S = 0.01, 7.8, 1.0


class Played:
    """A simulated run to its end."""

    def __init__(
        self,
        names: str,
        train_s: Callable[[str, PhaseId], float],
        *,
        sites: bool = True,
        clients: int = 0,
        **rules: object,
    ) -> None:
        """An executor for each letter of `names`: a site with a client of its own, or one that may train each of the
        run's `clients`."""
        count = len(names) if sites else clients
        self.trained: list[tuple[str, PhaseId]] = []
        self.machine = Rounds(
            names,
            RoundRules(needed=count, gathering=ExecutorChurn(start=len(names), wait_s=1.0) if sites else None, **rules),
            np.zeros(count, dtype=np.int64) if sites else np.arange(1, count + 1),
            lambda _: self.machine.here if sites else np.arange(count),
            ThroughputModel(len(names), window_rounds=5),
            clients={name: number for number, name in enumerate(names)} if sites else None,
        )

        def factor(executor: int, phase: PhaseId) -> float:
            self.trained.append((names[executor], phase))
            return train_s(names[executor], phase)

        costs = FederatedCosts(
            lines=(LinearFit(0.0, 1.0),) * len(names),
            latency_s=0.001,
            factor=factor,
            sites=(10,) * len(names) if sites else (),
        )
        found = simulate_federated(self.machine, costs)
        self.records: list[RoundRecord] = [one.record for one in found]
        self.seconds = sum(one.seconds for one in found)


def slow_once(name: str, phase: PhaseId) -> float:
    return SLOW_S if (name, phase) == ("b", PhaseId(0)) else QUICK_S


@pytest.mark.parametrize("staleness", [0, 3, 20])
@pytest.mark.parametrize("quorum", [1.0, 0.9])
def test_one_late_site_costs_one_deadline(staleness: int, quorum: float) -> None:
    run = Played("abc", slow_once, rounds=8, deadline_s=DEADLINE_S, staleness=staleness, quorum=quorum)
    waited = [record.round for record in run.records if record.closed_by == "deadline"]
    if quorum < 1 and staleness:  # its update may be one of those that make the quorum
        return
    assert waited == [0]
    assert run.seconds < 2 * DEADLINE_S


def test_passes_of_a_round_are_turns_like_others() -> None:
    run = Played("abc", slow_once, rounds=8, deadline_s=DEADLINE_S, passes=2)
    assert [record.closed_by for record in run.records].count("deadline") == 0, "the second pass has who was in"
    assert run.seconds < 2 * DEADLINE_S


def test_an_executor_that_is_behind_holds_up_no_other() -> None:
    run = Played("abc", slow_once, rounds=8, deadline_s=DEADLINE_S, sites=False, clients=9)
    assert run.seconds < 2 * DEADLINE_S
    assert all(record.missing for record in run.records[:1])


def test_who_is_late_takes_part_as_soon_as_it_can() -> None:
    def train_s(name: str, phase: PhaseId) -> float:
        return 1.2 if (name, phase.round) == ("b", 0) else 0.3 if name == "b" else 0.4

    run = Played("abc", train_s, rounds=4, deadline_s=DEADLINE_S)
    assert [record.missing for record in run.records] == [(1,), (), (), ()], "it had time enough in the second"


def test_a_round_that_lacks_its_least_number_waits() -> None:
    run = Played("ab", slow_once, rounds=3, deadline_s=DEADLINE_S, minimum=2, attempts=20)
    assert len(run.records) == 3
    assert all(record.missing == () for record in run.records)
    assert SLOW_S < run.seconds < SLOW_S + 2 * DEADLINE_S


def test_what_was_asked_meanwhile_is_not_made_up_for() -> None:
    run = Played("abc", slow_once, rounds=8, deadline_s=DEADLINE_S, minimum=3, attempts=50)
    first = [phase for name, phase in run.trained if (name, phase.round) == ("b", 0)]
    assert [phase.attempt for phase in first] == [0, 7], "of the attempts between it was asked for each"


class Sites:
    """A client trainer whose clients train until they are let go."""

    def __init__(self) -> None:
        self.trained: list[int] = []
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.partial = self

    def open(self, *_: object) -> None: ...
    def expect(self, *_: object) -> None: ...
    def forget(self, *_: object) -> None: ...
    def clear(self) -> None: ...
    def hand_over(self) -> None: ...

    def tensors(self) -> dict[str, object]:
        return {}

    weights = tensors

    def train(self, tasks: tuple[ClientTask, ...]) -> tuple[tuple[ClientTime, ...], tuple[RefusedUpdate, ...]]:
        self.trained.append(tasks[0].client)
        self.begun.release()
        self.may_end.acquire()
        return (ClientTime(tasks[0].client, tasks[0].samples, 0.0),), ()


class Wire:
    """A connection's two ends."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.asked = threading.Semaphore(0)

    def receive(self, guard: object, idle_s: float) -> tuple[object, list[object]]:
        self.asked.release()
        return self.inbox.get(), []

    def put(self, message: object, tensors: object = ()) -> None:
        self.outbox.put(message)

    def flush(self) -> None: ...


def test_a_device_does_not_train_for_turns_that_are_over() -> None:
    site, wire = Sites(), Wire()
    connection: Any = OpenConnection(wire, wire, "run", 60.0)  # pyright: ignore[reportArgumentType]
    executor = Executor(site, connection, 1)  # pyright: ignore[reportArgumentType]
    running = threading.Thread(target=executor.run, daemon=True)
    running.start()
    for round_ in range(4):
        opened = PhaseOpened(
            opening=PhaseSetup(phase=PhaseId(round_), clients=1, samples=3), tasks=(ClientTask(round_, 3),)
        )
        wire.inbox.put(ToExecutor(run="run", body=opened))
        if round_ == 0:
            site.begun.acquire()
        if round_ < 3:
            wire.inbox.put(ToExecutor(run="run", body=PhaseDropped(phase=PhaseId(round_))))
    for _ in range(8):  # the seven messages are dealt with when it asks for the next
        wire.asked.acquire()
    site.may_end.release()
    site.may_end.release()
    said = [wire.outbox.get() for _ in range(4)]
    assert all(isinstance(message, FromExecutor) for message in said)
    assert [m.body for m in said[:3]] == [ExecutorDrained(phase=PhaseId(round_)) for round_ in range(3)]
    assert isinstance(said[3].body, SumsSent) and said[3].body.phase == PhaseId(3)
    assert isinstance(said[3].values, SummedValues)
    assert site.trained == [0, 3]
    wire.inbox.put(ToExecutor(run="run", body=Halt()))
    running.join(60)
    assert not running.is_alive()
