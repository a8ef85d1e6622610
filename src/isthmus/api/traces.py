"""The trace of a run's sessions, in one file for a viewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus import api
from isthmus.api.folder import RunFolder
from isthmus.api.run_entries import run_entries, run_state
from isthmus.federated.evaluation import RoundLine
from isthmus.reading import read_json
from isthmus.report import ComparisonSummary, run_summary
from isthmus.report.replicas_table import ReplicasTraced
from isthmus.trace import Trace, write_perfetto


class SessionTraced(msgspec.Struct, frozen=True):
    """One session of a run in the file for the viewer."""

    folder: str
    first_step: int  # the first step that it could make, counted from 1
    last_step: int
    outcome: str  # empty where it works, or was killed
    start_s: float  # since the first session began

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.last_step}" if self.last_step >= self.first_step else "no step"
        return f"{self.folder}: {steps}, {self.outcome or 'killed or at work'}, from {self.start_s:.1f} s"


class Traced(NamedTuple):
    perfetto: Path  # for ui.perfetto.dev
    found: ComparisonSummary | list[RoundLine] | ReplicasTraced | None
    """How well the newest session was predicted: None where it was killed or made no step. Of a federated run its
    rounds, of decoupled replicas what each did."""
    notes: list[str]  # damage that was found while reading
    sessions: tuple[SessionTraced, ...] = ()  # those of a run that was resumed, in their order


def write_trace(run: Path) -> Traced:
    """A Perfetto trace of what was predicted and what was measured, in the run's folder. UserError for a run without
    one."""
    folder = RunFolder.existing(run)
    return api.programs.program_of(folder.any_job()).traced(folder)


def trace_sessions(
    folder: RunFolder, found: Callable[[RunFolder], ComparisonSummary | ReplicasTraced | None]
) -> Traced:
    """Write the sessions of a run one after another, each when it began; `found` is asked of the newest. UserError
    where no session left a trace."""
    sessions, told, traces, end_s, first_s = folder.traced_sessions(), list[SessionTraced](), list[Trace](), 0.0, 0.0
    for session in sessions:
        entries = run_entries(session.path)
        at = max((n for n, entry in enumerate(entries) if entry.kind == "began"), default=len(entries))
        began_s = entries[at].at_s if at < len(entries) else first_s
        first_s = first_s or began_s
        start_s, state = max(end_s, began_s - first_s), run_state(entries[at:])
        here = [later(trace, start_s) for trace in session.traces()]
        end_s = max((span.end_s for trace in here for span in trace.spans), default=start_s)
        traces += here
        first = entries[at].step + 1 if at < len(entries) else 1
        told.append(SessionTraced(str(session.path), first, state.done, state.outcome, start_s))
    write_perfetto(traces, folder.perfetto)
    return Traced(folder.perfetto, found(sessions[-1]), [], tuple(told) if len(told) > 1 else ())


def compared(session: RunFolder) -> ComparisonSummary | None:
    """Return how well a session of a pipeline was predicted; None where it left no prediction, or made no step."""
    if len(traces := session.traces()) < 2:
        return None
    predicted, measured = traces
    summary = run_summary(predicted, measured, session.periods())
    if summary is not None and session.summary.is_file():
        kept = read_json(session.summary, ComparisonSummary)
        summary = msgspec.structs.replace(summary, too_slow=kept.too_slow)
    return summary


def later(trace: Trace, seconds: float) -> Trace:
    """Return the trace as if it had begun so much later."""
    if not seconds:
        return trace
    replace = msgspec.structs.replace
    moved = (replace(span, start_s=span.start_s + seconds, end_s=span.end_s + seconds) for span in trace.spans)
    return replace(trace, spans=tuple(moved))
