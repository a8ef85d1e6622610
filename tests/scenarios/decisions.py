"""What a machine decided, event by event, so that a simulation and a run can be compared.

Left out is what only time decides: ticks and failures of neighbours without a consequence of their own, plans that were
asked for and changed nothing, notes, and at which step a change of plan settles. Put in order is what arrives in any
order: events of one kind from several devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from isthmus.protocol.coordinator_events import (
    BeginEpoch,
    CommitCheckpoint,
    FinishRun,
    ItemDone,
    MakePlan,
    Order,
)
from isthmus.protocol.machine import kind_of
from isthmus.protocol.run_events import (
    AcceptReport,
    Note,
    Observation,
    RejectDevice,
    RunEvent,
    RunInstruction,
    StepMeasured,
)
from isthmus.protocol.run_messages import OpenItem, RetireSnapshots

Decision = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Events, by whom, and what they led to."""
_KINDS = {
    "ItemReported": "work goes on",
    "StateReceived": "work goes on",
    "StepMeasured": "work goes on",
    "Disconnected": "a device is missed",
    "DeviceFailed": "a device is missed",
}
"""Events of which the one or the other comes first."""
_WITHOUT_CONSEQUENCE = ("SnapshotCopied", "work goes on", "a device is missed", "PlanMade")
"""Kinds of events that matter by what they lead to alone."""
_LEFT_OUT = Note | AcceptReport | OpenItem | ItemDone | CommitCheckpoint | RetireSnapshots


class Decisions:
    """`observe` goes to the machine."""

    def __init__(self, *, steps: bool = True) -> None:
        """`steps`: whether the step at which an epoch begins is no matter of time."""
        self._steps = steps
        self._found: list[tuple[str, str, tuple[str, ...]]] = []

    def observe(self, now_s: float, event: RunEvent, instructions: Sequence[RunInstruction]) -> None:
        told = tuple(self._words(i) for i in instructions if not isinstance(i, _LEFT_OUT))
        name = kind_of(event).__name__
        if told or not isinstance(event, Observation | StepMeasured):
            self._found.append((_KINDS.get(name, name), getattr(event, "device", ""), told))

    def _words(self, instruction: RunInstruction) -> str:
        name, device = type(instruction).__name__, getattr(instruction, "device", "")
        match instruction:
            case BeginEpoch(epoch=epoch, step=step, from_checkpoint=from_checkpoint):
                where = f" step {step}" if self._steps else ""
                return f"{name} {epoch}{where} {'from the checkpoint' if from_checkpoint else 'from memory'}"
            case MakePlan(devices=devices, must=must, waits=waits):
                return f"{name} {','.join(devices)} {must} {waits}"
            case FinishRun(outcome=outcome):
                return f"{name} {outcome}"
            case Order(body=body):
                return f"{type(body).__name__} {device}"
            case RejectDevice(permanent=permanent):
                return f"{name} {device} {permanent}"
            case _:
                return f"{name} {device}".strip()

    def text(self) -> str:
        """A line for each decision: the event, by whom, and what it led to."""
        return "\n".join(
            f"{kind} {','.join(whom)}".strip() + (f": {'; '.join(told)}" if told else "")
            for kind, whom, told in self._sequence()
        )

    def _sequence(self) -> list[Decision]:
        """In canonical order."""
        found: list[Decision] = []
        for kind, group in groupby(_consequential(self._found), key=lambda entry: entry[0]):
            events = list(group)
            told = tuple(word for _, _, words in events for word in words)
            if kind in _WITHOUT_CONSEQUENCE and not told:
                continue
            whom = tuple(sorted({device for _, device, _ in events if device}))
            found.append((kind, () if kind == "work goes on" else whom, told))
        return _joined(found)


def _consequential(found: Sequence[tuple[str, str, tuple[str, ...]]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Without plans that need not be and that changed nothing."""
    kept, asked = list(found), -1
    for number, (kind, _, told) in enumerate(found):
        if any(word.startswith("MakePlan") and word.endswith("False False") for word in told):
            asked = number
        elif kind == "PlanMade":
            if not told and asked >= 0:
                name, device, words = kept[asked]
                kept[asked] = name, device, tuple(word for word in words if not word.endswith("False False"))
            asked = -1
    return kept


def _joined(found: Sequence[Decision]) -> list[Decision]:
    """Groups of one kind that only work parted."""
    joined: list[Decision] = []
    for kind, group in groupby(found, key=lambda entry: entry[0]):
        entries = list(group)
        whom = tuple(sorted({device for _, devices, _ in entries for device in devices}))
        joined.append((kind, whom, tuple(word for _, _, told in entries for word in told)))
    return joined
