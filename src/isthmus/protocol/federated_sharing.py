"""Clients that change hands while a turn is open: to idle executors, from lost ones. Changes the turn it is given."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.protocol.federated_dealing import Dealer
from isthmus.protocol.federated_events import Closed, Granted, Recalled, Task, Tell
from isthmus.protocol.federated_turn import OpenTurn


def grant(executor: str, tasks: tuple[Task, ...], opened: OpenTurn, *, holds: bool) -> Tell:
    opened.idle.pop(executor, None)
    opened.give(executor, tasks)
    return Tell(executor, Granted(turn=opened.turn, tasks=tasks, holds=holds))


def feed_idle(opened: OpenTurn, dealer: Dealer, *, holds: bool) -> list[Tell]:
    """Ask others for idle executors, or close these: nothing that has not begun is left."""
    out: list[Tell] = []
    asked_for = set(opened.recalls.values())
    for thief in [name for name in opened.idle if name not in asked_for]:
        if opened.spare:
            out.append(grant(thief, (opened.spare.pop(0),), opened, holds=holds))
        elif (victim := opened.victim(thief)) is not None:
            opened.recalls[victim] = thief
            recalled = Recalled(turn=opened.turn, own=dealer.line(victim), thief=dealer.line(thief))
            out.append(Tell(victim, recalled))
        elif not opened.recalls:
            del opened.idle[thief]
            out.append(Tell(thief, Closed(turn=opened.turn)))
    return out


def pass_on(tasks: tuple[Task, ...], thief: str | None, opened: OpenTurn, dealer: Dealer, *, holds: bool) -> list[Tell]:
    """What a victim gave back goes to whoever it was asked for, if that one is idle still."""
    out: list[Tell] = []
    if tasks and thief is not None and thief in opened.idle:
        opened.stolen += len(tasks)
        out.append(grant(thief, tasks, opened, holds=holds))
    else:
        opened.spare += tasks
    return [*out, *feed_idle(opened, dealer, holds=holds)]


def forget_executor(executor: str, opened: OpenTurn) -> list[Task]:
    """The clients that a lost executor held."""
    opened.recalls.pop(executor, None)  # whoever it was asked for is idle still
    for victim in [v for v, thief in opened.recalls.items() if thief == executor]:
        opened.recalls[victim] = ""  # what it gives back will be spare
    return opened.lose(executor)


def rehouse(
    tasks: Sequence[Task], names: Sequence[str], opened: OpenTurn, dealer: Dealer, *, holds: bool
) -> list[Tell]:
    """Clients of a lost executor, each to whom it ends soonest with. Whoever has sent its sums sends more."""
    load_s = {name: opened.load_s(name) for name in names}
    given: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda t: -t.samples):
        name = min(names, key=lambda n: load_s[n] + dealer.line(n).seconds(task.samples))
        load_s[name] += dealer.line(name).seconds(task.samples)
        given.setdefault(name, []).append(task)
    out = [grant(name, tuple(mine), opened, holds=holds) for name, mine in given.items()]
    return [*out, *feed_idle(opened, dealer, holds=holds)]
