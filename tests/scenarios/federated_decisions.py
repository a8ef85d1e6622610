"""What a federated coordinator decided, event by event, so that a simulation and a run can be compared.

Left out are ticks and the host's own events without a consequence. Put in order is what arrives in any order: events of
one kind from several executors, and instructions of one kind to them. The plan that is made after a phase's messages
are sent stands behind the phase's opening: a quick executor may answer before.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from itertools import groupby

from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    CommitRound,
    CoordinatorEvent,
    CoordinatorInstruction,
    ExecutorLost,
    FinishRounds,
    Notify,
    PhaseUnderWay,
    PlanRound,
    RoundPlanned,
    RoundRecord,
    Tick,
)
from isthmus.protocol.federated_messages import PhaseOpened, TasksGranted, TasksReturned
from isthmus.protocol.machine import FromDevice, kind_of


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


def _words(instruction: CoordinatorInstruction) -> str:
    match instruction:
        case Notify(executor=executor, body=PhaseOpened(opening=opening, tasks=tasks)):
            phase, clients = opening.phase, [t.client for t in tasks]
            return f"PhaseOpened {phase.round}.{phase.attempt} {executor} {_numbers(clients)}".strip()
        case Notify(executor=executor, body=TasksGranted(tasks=tasks)):
            return f"TasksGranted {executor} {_numbers([t.client for t in tasks])}"
        case Notify(executor=executor, body=body):
            return f"{type(body).__name__} {executor}"
        case PlanRound(round=round_):
            return f"PlanRound {round_}"
        case CommitRound(record=record):
            return _committed(record)
        case FinishRounds(outcome=outcome):
            return f"FinishRounds {outcome}"
        case _:
            return f"{type(instruction).__name__} {getattr(instruction, 'executor', '')}".strip()


class Recorded(FederatedCoordinator):
    """The machine, which remembers what it decided."""

    def record(self) -> None:
        """From now on."""
        self._found: list[tuple[str, str, tuple[str, ...]]] = []
        self._heard = threading.Condition()

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorInstruction]:
        out = super().handle(event)
        told = tuple(_words(i) for i in out)
        with self._heard:
            if told or not isinstance(event, Tick | PhaseUnderWay | RoundPlanned):
                place = self._opening() if isinstance(event, PhaseUnderWay) else len(self._found)
                self._found.insert(place, (_name(event), _executor(event), told))
            self._heard.notify_all()
        return out

    def wait_for(self, words: str, limit_s: float) -> bool:
        """Until it has heard or told what begins with these words, or the run is over; False after `limit_s`."""
        with self._heard:
            return self._heard.wait_for(lambda: self._knows(words) or self._knows("FinishRounds"), limit_s)

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


def _name(event: CoordinatorEvent) -> str:
    if isinstance(event, FromDevice) and isinstance(event.body, TasksReturned):
        return f"TasksReturned {_numbers([t.client for t in event.body.tasks])}".strip()
    return kind_of(event).__name__


def _executor(event: CoordinatorEvent) -> str:
    if isinstance(event, FromDevice):
        return event.device
    return event.executor if isinstance(event, ExecutorLost) else ""


def _in_order(told: Sequence[str]) -> list[str]:
    """Instructions of one kind, by executor; what ends a round comes after what led to it."""
    found: list[str] = []
    for _, group in groupby(told, key=lambda words: words.split()[0]):
        found += sorted(group)
    return found
