"""Clients that change hands while a phase is open: to idle executors, from lost ones. Changes the phase it is given."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.protocol.federated_messages import (
    ClientTask,
    ExecutorOrder,
    PhaseClosed,
    TasksGranted,
    TasksRecalled,
)
from isthmus.protocol.federated_phase import OpenPhase
from isthmus.protocol.federated_scheduler import ClientScheduler

Order = tuple[str, ExecutorOrder]
"""An executor's name and an order for it."""


def grant_tasks(executor: str, tasks: tuple[ClientTask, ...], opened: OpenPhase, *, holds: bool) -> Order:
    opened.idle.pop(executor, None)
    opened.give(executor, tasks)
    return executor, TasksGranted(phase=opened.phase, tasks=tasks, holds=holds)


def assign_idle(opened: OpenPhase, scheduler: ClientScheduler, *, holds: bool) -> list[Order]:
    """Ask others for idle executors, or close these: nothing that has not begun is left."""
    out: list[Order] = []
    asked_for = set(opened.recalls.values())
    for thief in [name for name in opened.idle if name not in asked_for]:
        if opened.unassigned:
            out.append(grant_tasks(thief, (opened.unassigned.pop(0),), opened, holds=holds))
        elif (victim := opened.victim(thief)) is not None:
            opened.recalls[victim] = thief
            recalled = TasksRecalled(
                phase=opened.phase, own=scheduler.line(victim), thief=scheduler.line_of_thief(thief, victim)
            )
            out.append((victim, recalled))
        elif not opened.recalls:
            del opened.idle[thief]
            out.append((thief, PhaseClosed(phase=opened.phase)))
    return out


def assign_returned(
    tasks: tuple[ClientTask, ...], thief: str | None, opened: OpenPhase, scheduler: ClientScheduler, *, holds: bool
) -> list[Order]:
    """The clients that a victim gave back go to the thief, if the thief is still idle."""
    out: list[Order] = []
    if tasks and thief is not None and thief in opened.idle:
        opened.stolen += len(tasks)
        out.append(grant_tasks(thief, tasks, opened, holds=holds))
    else:
        opened.unassigned += tasks
    return [*out, *assign_idle(opened, scheduler, holds=holds)]


def forget_executor(executor: str, opened: OpenPhase) -> list[ClientTask]:
    """The clients that a lost executor held."""
    opened.recalls.pop(executor, None)  # the thief is still idle
    for victim in [v for v, thief in opened.recalls.items() if thief == executor]:
        opened.recalls[victim] = ""  # the clients that it gives back are unassigned
    return opened.lose(executor)


def reassign(
    tasks: Sequence[ClientTask], names: Sequence[str], opened: OpenPhase, scheduler: ClientScheduler, *, holds: bool
) -> list[Order]:
    """Assign each client of a lost executor to the executor that finishes it first. An executor that has already sent
    its sums sends sums again."""
    load_s = {name: opened.load_s(name) for name in names}
    given: dict[str, list[ClientTask]] = {}
    for task in sorted(tasks, key=lambda t: -t.samples):
        ends_s = {n: load_s[n] + _seconds(task, n, scheduler) for n in names}
        name = min(names, key=ends_s.__getitem__)
        load_s[name] = ends_s[name]
        given.setdefault(name, []).append(task)
    out = [grant_tasks(name, tuple(mine), opened, holds=holds) for name, mine in given.items()]
    return [*out, *assign_idle(opened, scheduler, holds=holds)]


def _seconds(task: ClientTask, executor: str, scheduler: ClientScheduler) -> float:
    """With the move of the client's state, where it must move."""
    return scheduler.line(executor).seconds(task.samples) + scheduler.move_s(task.client, executor)
