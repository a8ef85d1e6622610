"""A simulated run of any program: what is asked, and what is shown of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import RenderableType

from isthmus.errors import PeerError, UserError
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


def happened(faults: Sequence[Fault], seconds: float, notes: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return what happened in a run of so many seconds, in words, by second of the run: its faults among its notes."""
    struck = [(fault.time_s, fault_text(fault)) for fault in faults if fault.time_s <= seconds]
    return sorted([*struck, *notes], key=lambda entry: entry[0])


def happened_lines(entries: Iterable[tuple[float, str]], faults: Sequence[Fault], seconds: float) -> list[str]:
    """Return them as lines, and the faults that came too late."""
    too_late = [fault_text(fault) for fault in faults if fault.time_s > seconds]
    after = [f"after the end of the run, so without effect: {'; '.join(too_late)}"] if too_late else []
    return [*(f"{time_s:8.1f} s  {text}" for time_s, text in entries), *after]


def concluded(outcome: str, reason: str, done: str, undisturbed_s: float | None) -> str:
    """Return how a run ended that has done so much."""
    if outcome == "done" and undisturbed_s is not None:
        done += f"; without faults {format_duration(undisturbed_s)}"
    return f"{outcome} after {done}. {reason}".rstrip(" .") + "."


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
