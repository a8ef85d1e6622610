"""The events of a pipeline's run, a line each in its folder, written as they happen, for the watchers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.documents import read_lines
from isthmus.plans import PlanPeriod

ENTRIES = "events.jsonl"
SPANS = "spans.jsonl"
"""The spans so far, of a run that works or was killed: its end writes them into `trace.jsonl`."""


class RunEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened. `at_s` is in seconds since 1970, by the coordinator's clock."""

    at_s: float
    kind: Literal["began", "planned", "step", "heldout", "lost", "left", "joined", "back", "saved", "note", "ended"]
    """`back`: the run goes on after `step`, and later steps are void."""
    step: int = -1
    """Steps done; -1 where it does not matter."""
    device: str = ""
    text: str = ""
    """The outcome in `ended`: done, interrupted, lost, diverged or failed."""
    steps: int = 0
    """The job's steps, in `began`."""
    loss: float | None = None
    metrics: Mapping[str, float | None] = {}
    """The metrics in `heldout`."""
    per_s: float | None = None
    """Tokens per second in `step`, or samples where the data are no text."""
    unit: str = ""
    """The unit of `per_s`."""
    busy: Mapping[str, float] = {}
    """The share of the step that each device computed, 0 to 1."""
    sent: tuple[tuple[str, str, int], ...] = ()
    """Source, target and tensor bytes of the step."""
    sent_bytes: int = 0
    """Bytes of the session so far."""
    spans: int = 0
    """How many spans the session had by then."""
    period: PlanPeriod | None = None
    """The plan in `planned`."""


def run_entries(run: Path) -> list[RunEntry]:
    """In their order; none of a run whose version wrote none. A last line that is not whole is passed over."""
    return read_lines(run / ENTRIES, RunEntry)
