"""What a machine decided, event by event, so that a simulation and a run can be compared.

Left out is what only time decides: ticks and failures of neighbours without a consequence of their own, plans that were
asked for and changed nothing, notes, and at which step a change of plan settles. Put in order is what arrives in any
order: events of one kind from several devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import groupby
from typing import Any
from unittest import mock

from isthmus.programs.pipeline import Pipeline
from isthmus.protocol.adaptation import PlanFigures
from isthmus.protocol.recovery import StateHolding, StateLayout
from isthmus.protocol.run_messages import DeviceReport
from isthmus.protocol.run_ports import PlanRequest
from isthmus.session.session import CLOSED, Observation
from isthmus.trace import Span
from tests.programs.ports import Asked, Watched

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
_LEFT_OUT = ("note", "accept_report", "open_item", "item_done", "commit_checkpoint", "retire_snapshots")
Observe = Callable[[str, str, Sequence[Asked]], None]
"""Gets each decision: what happened, by whom, and what was asked then."""


class _Recorded(Pipeline):
    """It tells what it decides."""

    def __init__(self, *given: Any, observe: Observe, **named: Any) -> None:
        super().__init__(*given, **named)
        self._observe = observe
        self._asked: list[Asked] = []

    @property
    def port(self) -> Any:
        return self._watched

    @port.setter
    def port(self, port: Any) -> None:
        self._watched = Watched(port, lambda *asked: self._asked.append(asked))

    def _record(self, name: str, device: str, act: Callable[[], None]) -> None:
        if self.over:
            return
        try:
            act()
        finally:
            asked, self._asked = self._asked, []
            self._observe(name, device, asked)

    def joined(self, device: str, holdings: Sequence[StateHolding] = ()) -> None:
        self._record("DeviceJoined", device, partial(super().joined, device, holdings))

    def heard(self, device: str, body: DeviceReport) -> None:
        self._record(type(body).__name__, device, partial(super().heard, device, body))

    def disconnected(self, device: str, reason: str = CLOSED) -> None:
        self._record("Disconnected", device, partial(super().disconnected, device, reason))

    def stop(self) -> None:
        self._record("StopRequested", "", super().stop)

    def planned(self, request: PlanRequest, layout: StateLayout, figures: PlanFigures | None = None) -> None:
        self._record("PlanMade", "", partial(super().planned, request, layout, figures))

    def no_plan(self, request: PlanRequest, reason: str) -> None:
        self._record("NoPlan", "", partial(super().no_plan, request, reason))

    def measured(self, step: int, spans: tuple[Span, ...]) -> None:
        self._record("StepMeasured", "", partial(super().measured, step, spans))

    def probed(self, source: str, target: str, bandwidth_bytes_per_s: float | None) -> None:
        self._record("LinkProbed", "", partial(super().probed, source, target, bandwidth_bytes_per_s))

    def looked(self, seen: Observation) -> None:
        self._record("Observation", "", partial(super().looked, seen))


@contextlib.contextmanager
def observed_by(observe: Observe) -> Generator[None]:
    """Inside, runs that are simulated and real ones tell what their machines decide."""
    made = partial(_Recorded, observe=observe)
    with (
        mock.patch("isthmus.simulator.run.Pipeline", made),
        mock.patch("isthmus.runtime.coordinator.run.Pipeline", made),
    ):
        yield


class Decisions:
    """`observe` goes to the machine."""

    def __init__(self, *, steps: bool = True) -> None:
        """`steps`: whether the step at which an epoch begins is no matter of time."""
        self._steps = steps
        self._found: list[tuple[str, str, tuple[str, ...]]] = []

    def observe(self, name: str, device: str, asked: Sequence[Asked]) -> None:
        told = tuple(self._words(*call) for call in asked if call[0] not in _LEFT_OUT)
        if told or name not in ("Observation", "StepMeasured"):
            self._found.append((_KINDS.get(name, name), device, told))

    def _words(self, asked: Any, *given: Any) -> str:
        name = asked.title().replace("_", "")
        match asked, *given:
            case "begin_epoch", start:
                where = f" step {start.step}" if self._steps else ""
                return (
                    f"{name} {start.epoch}{where} {'from the checkpoint' if start.from_checkpoint else 'from memory'}"
                )
            case "make_plan", request:
                return f"{name} {','.join(request.devices)} {request.must} {request.waits}"
            case "finish_run", finish:
                return f"{name} {finish.outcome}"
            case "order", device, body:
                return f"{type(body).__name__} {device}"
            case "reject_device", device, _, permanent:
                return f"{name} {device} {permanent}"
            case "assign_stage" | "disconnect" | "call_device" | "receive_state" | "release_device", device, *_:
                return f"{name} {device}"
            case _:
                return name

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
