"""A simulated run of any program: what is asked, and what is shown of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from rich.console import RenderableType

from isthmus.errors import PeerError, UserError
from isthmus.programs.merging import Finish
from isthmus.protocol.run_ports import FinishRun
from isthmus.simulator.options import Fault, WithoutEffect, fault_text, without_effect_document, without_effect_lines
from isthmus.simulator.queue import RunOfJob
from isthmus.trace import Trace
from isthmus.units import format_duration


class Simulating(NamedTuple):
    faults: tuple[Fault, ...] = ()
    steps: int | None = None  # of a pipeline: so many under its first plan, without faults; None: the whole run
    plan: Path | None = None  # a plan document to follow
    given: tuple[str, ...] = ()  # options that pipelines alone have


class Forecast(msgspec.Struct, frozen=True):
    """A simulated run, or some steps of one, as it is shown: a table, and lines for people."""

    @property
    def as_job(self) -> RunOfJob:
        """A whole run as one of a queue."""
        return RunOfJob(0.0)

    @property
    def exit_code(self) -> int:
        """Return the exit code that a real run would end with."""
        return PeerError.exit_code if self.as_job.reason else 0

    @property
    def trace(self) -> Trace:
        raise NotImplementedError

    def table(self) -> RenderableType | None: ...

    def lines(self) -> list[str]:
        return []

    def summary(self) -> dict[str, object]:
        """Return the summary as JSON has it. Times are seconds since the run's beginning."""
        return {}

    def draw(self, path: Path) -> None:
        """UserError where nothing can be drawn."""
        raise UserError(f"--picture {path}: draws a run with faults, expected --fault, --slow, --join or --leave")


MOST_LINES = 60  # of what happened, on a terminal; JSON has all


class EndedRun(Protocol):
    @property
    def finish(self) -> Finish | FinishRun: ...
    @property
    def seconds(self) -> float: ...
    @property
    def without_effect(self) -> WithoutEffect: ...


class StruckRun(Forecast, frozen=True, kw_only=True):
    """A whole run of a program, with faults: what happened, and how it ended."""

    run: EndedRun
    faults: tuple[Fault, ...] = ()
    undisturbed_s: float | None = None  # seconds of the same run without faults; None where nothing is compared

    def notes(self) -> Iterable[tuple[float, str]]:
        """Notes of the coordinator, by second of the run."""
        return ()

    @property
    def as_job(self) -> RunOfJob:
        return RunOfJob(self.run.seconds, self.run.finish.reason, without_effect=self.without_effect)

    @property
    def without_effect(self) -> WithoutEffect:
        """The faults that had no effect. `run` of a pipeline has more: spare devices, which join from the start."""
        return tuple(entry for entry in self.run.without_effect if entry[0] in self.faults)

    def timeline(self) -> list[tuple[float, str]]:
        """Return what happened, in words, by second of the run: its faults among its notes."""
        struck = [(fault.time_s, fault_text(fault)) for fault in self.faults if fault.time_s <= self.run.seconds]
        return sorted([*struck, *self.notes()], key=lambda entry: entry[0])

    def struck_lines(self) -> list[str]:
        """Return what happened as lines, and the faults without effect."""
        entries = self.timeline()
        more = len(entries) - MOST_LINES
        return [
            *(f"{time_s:8.1f} s  {text}" for time_s, text in entries[:MOST_LINES]),
            *([f"{more} more such lines: see --json"] if more > 0 else []),
            *without_effect_lines(self.without_effect),
        ]

    def concluded(self, done: str) -> str:
        """Return how the run ended, which has done so much."""
        if self.run.finish.outcome == "done" and self.undisturbed_s is not None:
            done += f"; without faults {format_duration(self.undisturbed_s)}"
        return f"{self.run.finish.outcome} after {done}. {self.run.finish.reason}".rstrip(" .") + "."

    def ended(self) -> dict[str, object]:
        """Return how it ended and what happened, as JSON has it. Times are seconds since the run's beginning."""
        return {
            "outcome": self.run.finish.outcome,
            "reason": self.run.finish.reason,
            "seconds": self.run.seconds,
            "undisturbed_s": self.undisturbed_s,
            "timeline": [{"time_s": time_s, "text": text} for time_s, text in self.timeline()],
            "without_effect": without_effect_document(self.without_effect),
        }
