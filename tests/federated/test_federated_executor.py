"""The executor's policy by itself: what it asks for, and when."""

from __future__ import annotations

import pytest

from isthmus.protocol.federated_executor import ExecutorPort, FederatedExecutor
from isthmus.protocol.federated_messages import (
    ClientTask,
    ClientTime,
    ExecutorDrained,
    ExecutorOrder,
    LinearFit,
    PhaseClosed,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    PhaseSetup,
    SumsSent,
    TasksGranted,
    TasksRecalled,
    TasksReturned,
)
from isthmus.protocol.run_messages import Halt
from isthmus.session.program import OutOfPhase
from tests.programs.ports import Asked, Recorder

TURN = PhaseId(0)
EQUAL = LinearFit(1.0, 0.0)
RECALLED = TasksRecalled(phase=TURN, own=EQUAL, thief=EQUAL)


def opening(*sizes: int) -> PhaseSetup:
    return PhaseSetup(phase=TURN, clients=len(sizes), samples=sum(sizes))


def times(*clients: int) -> tuple[ClientTime, ...]:
    return tuple(ClientTime(client, 1, 1.0) for client in clients)


class Executor:
    """A policy, and what it asks: each method returns what it asked because of it."""

    def __init__(self, clients_per_vmap: int = 1) -> None:
        self.port = Recorder(ExecutorPort)
        self.policy = FederatedExecutor(self.port.port, clients_per_vmap)

    def ordered(self, order: ExecutorOrder | Halt) -> list[Asked]:
        self.policy.ordered(order)
        return self.port.took()

    def opened(self, *sizes: int, holds: bool = False) -> list[Asked]:
        tasks = tuple(ClientTask(client, size) for client, size in enumerate(sizes))
        return self.ordered(PhaseOpened(opening=opening(*sizes), tasks=tasks, holds=holds))

    def trained(self, *clients: int) -> list[Asked]:
        self.policy.trained(TURN, times(*clients))
        return self.port.took()


def test_an_executor_trains_its_list_and_sends_once() -> None:
    executor = Executor()
    assert executor.opened(3, 2) == [("begin", opening(3, 2)), ("train", TURN, (ClientTask(0, 3),))]
    assert executor.trained(0) == [("train", TURN, (ClientTask(1, 2),))]
    assert executor.trained(1) == [("send_sums", SumsSent(phase=TURN, timed=times(0, 1)))]


def test_an_executor_that_holds_waits_to_be_closed() -> None:
    executor = Executor()
    drained = [("answer", ExecutorDrained(phase=TURN))]
    executor.opened(3, holds=True)
    assert executor.trained(0) == drained
    granted = TasksGranted(phase=TURN, tasks=(ClientTask(5, 1),), holds=True)
    assert executor.ordered(granted) == [("train", TURN, (ClientTask(5, 1),))]
    assert executor.trained(5) == drained
    assert executor.ordered(PhaseClosed(phase=TURN)) == [("send_sums", SumsSent(phase=TURN, timed=times(0, 5)))]


@pytest.mark.parametrize(
    ("own", "thief", "given"),
    [(EQUAL, EQUAL, [3, 4]), (EQUAL, LinearFit(100.0, 0.0), []), (EQUAL, LinearFit(0.1, 0.0), [1, 2, 3, 4])],
)
def test_what_has_not_begun_is_shared_by_speed(own: LinearFit, thief: LinearFit, given: list[int]) -> None:
    executor = Executor()
    executor.opened(9, 4, 4, 4, 4, holds=True)
    returned = TasksReturned(phase=TURN, tasks=tuple(ClientTask(client, 4) for client in given))
    assert executor.ordered(TasksRecalled(phase=TURN, own=own, thief=thief)) == [("answer", returned)]
    assert [task.client for task in executor.policy.upcoming] == [c for c in (1, 2, 3, 4) if c not in given]


def test_equal_clients_are_trained_together() -> None:
    executor = Executor(clients_per_vmap=2)
    assert executor.opened(4, 4, 4, 3)[1] == ("train", TURN, (ClientTask(0, 4), ClientTask(1, 4)))
    assert executor.trained(0, 1) == [("train", TURN, (ClientTask(2, 4),))]


def test_a_dropped_turn_is_forgotten_and_its_answers_are_stale() -> None:
    executor = Executor()
    executor.opened(3, 2)
    assert executor.ordered(PhaseDropped(phase=TURN, kept=(7,))) == [("forget", TURN, (7,))]
    assert executor.trained(0) == [("answer", ExecutorDrained(phase=TURN))], "now it is free for another turn"
    assert executor.ordered(RECALLED) == [("answer", TasksReturned(phase=TURN, tasks=()))]
    assert executor.policy.stale == 2


def test_clients_that_it_did_not_give_are_its_hosts_fault() -> None:
    executor = Executor()
    executor.opened(holds=True)
    with pytest.raises(OutOfPhase):
        executor.trained(0)
    assert not executor.port.asked


def test_an_executor_that_was_halted_drops_everything() -> None:
    executor = Executor()
    executor.opened(3, 2)
    assert executor.ordered(Halt()) == [("stop",)]
    assert executor.policy.over
    assert not executor.opened(3) and not executor.ordered(RECALLED) and not executor.trained(0)
