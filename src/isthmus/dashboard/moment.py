"""A run as it was at a moment: after so many of its entries."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.api.run_entries import RunEntry
from isthmus.plans import PlanPeriod

RECENT_STEPS = 8  # over which links are measured


class Moment:
    def __init__(self, entries: Sequence[RunEntry]) -> None:
        self.period: PlanPeriod | None = None
        self.last = self.heldout = RunEntry(at_s=0.0, kind="step")
        self.step, self.plans, self.ended = 0, 0, ""
        self.rows: list[int] = [0]  # rows of the trace after each of the last steps of this plan
        self._gone: dict[str, str] = {}  # devices that are lost or have left
        self._paused = False
        for entry in entries:
            self._take(entry)

    def _take(self, entry: RunEntry) -> None:
        match entry.kind:
            case "began":
                self._gone, self._paused, self.ended, self.step, self.rows = {}, False, "", entry.step, [0]
            case "planned":
                self.period, self.plans, self.rows = entry.period, self.plans + 1, [entry.spans]
            case "step":
                self.last, self.step, self._paused = entry, entry.step, False
                self.rows = [*self.rows[-RECENT_STEPS:], entry.spans]
            case "heldout":
                self.heldout = entry
            case "lost" | "left":
                self._gone[entry.device] = entry.kind
                self._paused |= entry.kind == "lost"
            case "joined":
                self._gone.pop(entry.device, None)
            case "back":
                self.step, self.rows = entry.step, [entry.spans]
            case "ended":
                self.ended = entry.text
            case _:
                pass

    def state(self, device: str) -> str:
        """Return a device's state: lost, left, unused, done, paused or working."""
        if device in self._gone:
            return self._gone[device]
        if self.period is None or device not in self.period.plan.used:
            return "unused"
        return "done" if self.ended else "paused" if self._paused else "working"
