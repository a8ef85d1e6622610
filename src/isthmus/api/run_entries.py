"""The events of a run, a line each in its folder, written as they happen, for the watchers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.callbacks.events import Unit
from isthmus.documents import read_lines
from isthmus.plans import PlanPeriod
from isthmus.run_files import LOSSES, LinesFile


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    step: int  # optimizer steps done
    loss: float | None  # None for one that is not a number: JSON has no word for it
    split: str = "train"
    metrics: dict[str, float | None] = {}  # the job's metrics on held-out samples; None for one that counted nothing


def losses_file(run: Path) -> LinesFile[LossPoint]:
    return LinesFile(run / LOSSES, LossPoint, "losses")


ENTRIES = "events.jsonl"
SPANS = "spans.jsonl"  # the spans so far, of a run that works or was killed: its end writes them into `trace.jsonl`
Kind = Literal["began", "planned", "step", "heldout", "lost", "left", "joined", "back", "saved", "note", "ended"]


class RunEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened. `at_s` is in seconds since 1970, by the coordinator's clock."""

    at_s: float
    kind: Kind  # `back`: the run goes on after `step`, and later steps are void
    step: int = -1  # steps or rounds done; -1 where it does not matter
    device: str = ""
    text: str = ""  # the outcome in `ended`: done, stopped, interrupted, lost, diverged or failed
    steps: int = 0  # the job's steps or rounds, in `began`
    counts: Unit = "step"  # the thing that is counted, in `began`
    loss: float | None = None
    metrics: Mapping[str, float | None] = {}  # the metrics in `heldout`
    figures: Mapping[str, float] = {}  # the numbers of a step, as `isthmus.figures` declares them
    busy: Mapping[str, float] = {}  # the share of the step that each device or executor computed, 0 to 1
    sent: tuple[tuple[str, str, int], ...] = ()  # source, target and tensor bytes of the step
    spans: int = 0  # how many spans the session had by then
    period: PlanPeriod | None = None  # the plan in `planned`


def run_entries(run: Path) -> list[RunEntry]:
    """In their order. A last line that is not whole is passed over. None where no session has begun."""
    return read_lines(run / ENTRIES, RunEntry)


class RunState(msgspec.Struct, frozen=True):
    done: int = 0
    steps: int = 0  # steps of the whole run
    unit: Unit = "step"
    loss: float | None = None  # the newest of the training loss, or else on held-out samples
    outcome: str = ""  # the outcome of the newest session; empty where it works, or was killed
    planned: bool = False  # whether a plan was in force


def run_state(entries: list[RunEntry]) -> RunState:
    state, heldout = RunState(), None
    for entry in entries:
        match entry.kind:
            case "began":
                state = RunState(max(0, entry.step), entry.steps, entry.counts, state.loss, planned=state.planned)
            case "planned":
                state = msgspec.structs.replace(state, planned=True)
            case "step":
                loss = entry.loss if entry.loss is not None else state.loss
                state = msgspec.structs.replace(state, done=entry.step, loss=loss)
            case "back":
                state = msgspec.structs.replace(state, done=entry.step)
            case "heldout":
                heldout = entry.loss
            case "ended":
                state = msgspec.structs.replace(state, outcome=entry.text)
            case _:
                pass
    return state if state.loss is not None else msgspec.structs.replace(state, loss=heldout)
