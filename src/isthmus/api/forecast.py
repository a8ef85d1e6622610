"""A simulated run of any program: what is asked, and what is shown of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from rich.console import RenderableType

from isthmus.errors import PeerError, UserError
from isthmus.programs.merging import Finish
from isthmus.protocol.run_ports import FinishRun
from isthmus.simulator.options import Fault
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
        return RunOfJob(self.run.seconds, self.run.finish.reason)

    def timeline(self) -> list[tuple[float, str]]:
        """Return what happened, in words, by second of the run: its faults among its notes."""
        struck = [(fault.time_s, fault_text(fault)) for fault in self.faults if fault.time_s <= self.run.seconds]
        return sorted([*struck, *self.notes()], key=lambda entry: entry[0])

    def struck_lines(self) -> list[str]:
        """Return what happened as lines, and the faults that came too late."""
        entries, too_late = self.timeline(), [fault_text(f) for f in self.faults if f.time_s > self.run.seconds]
        more = len(entries) - MOST_LINES
        return [
            *(f"{time_s:8.1f} s  {text}" for time_s, text in entries[:MOST_LINES]),
            *([f"{more} more such lines: see --json"] if more > 0 else []),
            *([f"after the end of the run, so without effect: {'; '.join(too_late)}"] if too_late else []),
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
            "without_effect": [fault_text(fault) for fault in self.faults if fault.time_s > self.run.seconds],
        }


def fault_text(fault: Fault) -> str:
    lasts = f" for {format_duration(fault.lasts_s)}" if math.isfinite(fault.lasts_s) else ""
    match fault.kind:
        case "lost":
            return f"{fault.device}: its process dies" + (f"; it could work again after{lasts[4:]}" if lasts else "")
        case "silent":
            return f"{fault.device} is silent{lasts}"
        case "link":
            return f"nothing passes between {fault.device} and {fault.other}{lasts}"
        case "coordinator":
            return f"the coordinator is away{lasts}"
        case "slow":
            return f"{fault.device}: computing takes {fault.factor:g} times as long"
        case "join":
            return f"{fault.device} could join"
        case "leave":
            return f"{fault.device} is to leave"
