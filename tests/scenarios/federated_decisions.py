"""What a federated coordinator decided, event by event, so that a simulation and a run can be compared.

Left out are ticks and the host's own events without a consequence. Put in order is what arrives in any order: events of
one kind from several executors, and instructions of one kind to them. The plan that is made after a phase's messages
are sent stands behind the phase's opening: a quick executor may answer before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import ExecutorReport, PhaseOpened, TasksGranted, TasksReturned
from isthmus.session.session import Loss
from tests.programs.ports import Watched

Decision = tuple[str, str, list[str]]
"""The event, by whom, and what it led to."""


def _numbers(clients: Collection[int]) -> str:
    return ",".join(map(str, sorted(clients)))


def _committed(record: RoundRecord) -> str:
    words = [f"CommitRound {record.round} by {record.closed_by}"]
    words.append("of " + _numbers([t.client for timed in record.trained.values() for t in timed]))
    if record.missing:
        words.append(f"without {_numbers(record.missing)}")
    words += [f"{client} is {late} late" for client, late in record.stale]
    if record.stolen:
        words.append(f"{record.stolen} stolen")
    return " ".join(words)


def _order_words(executor: str, order: Any) -> str:
    match order:
        case PhaseOpened(opening=opening, tasks=tasks):
            phase, clients = opening.phase, [t.client for t in tasks]
            return f"PhaseOpened {phase.round}.{phase.attempt} {executor} {_numbers(clients)}".strip()
        case TasksGranted(tasks=tasks):
            return f"TasksGranted {executor} {_numbers([t.client for t in tasks])}"
        case _:
            return f"{type(order).__name__} {executor}"


def _words(asked: str, given: Sequence[Any]) -> list[str]:
    match asked:
        case "notify":
            return [_order_words(*given)]
        case "commit":
            return [_committed(given[0])]
        case "finished":
            return ["Halt", f"Finish {given[0].outcome}"]
        case "update_server":
            return ["UpdateServer"]
        case "merge" | "ignore":
            return [f"{asked.capitalize()}Sums {given[0]}"]
        case "dismiss":
            return [f"DismissExecutor {given[0]}"]
        case _:
            return []


class Recorded(Rounds):
    """The machine, which remembers what it decided."""

    def record(self) -> None:
        """From now on."""
        self._found: list[Decision] = []
        self._heard = threading.Condition()
        self._decisions: list[Decision] = []
        self._scheduler.plan = partial(self._planned, self._scheduler.plan)

    @property
    def port(self) -> Any:
        return self._watched

    @port.setter
    def port(self, port: Any) -> None:
        self._watched = Watched(port, self._told)

    def _told(self, asked: str, *given: Any) -> None:
        if words := _words(asked, given):
            self._decisions[-1][2].extend(words)

    def _planned(self, plan: Callable[..., Any], round_: int, *given: Any) -> Any:
        self._decisions[-1][2].append(f"PlanRound {round_}")
        found = plan(round_, *given)
        self._decisions.append(("RoundPlanned", "", []))
        return found

    def heard(self, device: str, body: ExecutorReport) -> None:
        self._decide(_name(body), device, partial(super().heard, device, body))

    def lost(self, loss: Loss) -> None:
        self._decide("ExecutorLost", loss.device, partial(super().lost, loss))

    def stop(self) -> None:
        self._decide("RunInterrupted", "", super().stop)

    def _tick(self) -> None:
        self._decide("Tick", "", super()._tick)

    def under_way(self) -> None:
        self._decide("PhaseUnderWay", "", super().under_way)

    def _decide(self, name: str, executor: str, act: Callable[[], None]) -> None:
        self._decisions.append((name, executor, []))
        act()
        with self._heard:
            for decision in self._decisions:
                if decision[2] or decision[0] not in ("Tick", "PhaseUnderWay", "RoundPlanned"):
                    place = self._opening() if decision[0] == "PhaseUnderWay" else len(self._found)
                    self._found.insert(place, decision)
            self._decisions.clear()
            self._heard.notify_all()

    def wait_for(self, words: str, limit_s: float) -> bool:
        """Until it has heard or told what begins with these words, or the run is over; False after `limit_s`."""
        with self._heard:
            return self._heard.wait_for(lambda: self._knows(words) or self._knows("Finish"), limit_s)

    def _opening(self) -> int:
        """The place behind the last phase's opening."""
        opened = [any(word.startswith("PhaseOpened") for word in words) for _, _, words in self._found]
        return len(opened) - opened[::-1].index(True)

    def _knows(self, words: str) -> bool:
        event, _, count = words.partition(" x")
        heard = [f"{name} {executor}" for name, executor, _ in self._found]
        told = [word for _, _, words in self._found for word in words]
        return sum(one.startswith(event) for one in heard + told) >= int(count or 1)

    def text(self) -> str:
        """A line for each decision: the event, by whom, and what it led to."""
        lines: list[str] = []
        for kind, group in groupby(self._found, key=lambda entry: entry[0]):
            events = list(group)
            whom = ",".join(sorted({executor for _, executor, _ in events if executor}))
            told = _in_order([word for _, _, words in events for word in words])
            lines.append(f"{kind} {whom}".strip() + (f": {'; '.join(told)}" if told else ""))
        return "\n".join(lines)


def _name(report: ExecutorReport) -> str:
    if isinstance(report, TasksReturned):
        return f"TasksReturned {_numbers([t.client for t in report.tasks])}".strip()
    return type(report).__name__


def _in_order(told: Sequence[str]) -> list[str]:
    """Instructions of one kind, by executor; what ends a round comes after what led to it."""
    found: list[str] = []
    for _, group in groupby(told, key=lambda words: words.split()[0]):
        found += sorted(group)
    return found
