"""Pictures of plans and runs. Matplotlib is imported when one is drawn: it takes half a second of a core."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.fleet import Fleet
from isthmus.plans import Plan
from isthmus.trace import Trace


def draw_plan(plan: Plan, fleet: Fleet, path: Path) -> None:
    """`fleet_picture.draw_plan`: the plan on the fleet's latencies."""
    importlib.import_module("isthmus.report.fleet_picture").draw_plan(plan, fleet, path)


def draw_loss(
    points: Sequence[tuple[int, float]],
    heldout: Sequence[tuple[int, float]],
    path: Path,
    unit: str = "nats per token",
    references: Mapping[str, float] = {},
) -> None:
    """`run_pictures.draw_loss`: training loss and held-out loss, both (step, loss), over the steps."""
    importlib.import_module("isthmus.report.run_pictures").draw_loss(points, heldout, path, unit, references)


def draw_faults(
    done_s: Sequence[tuple[float, int]],
    faults: Sequence[tuple[float, str]],
    stopped_s: Sequence[tuple[float, float]],
    path: Path,
    *,
    seconds: float,
) -> None:
    """`run_pictures.draw_faults`: a run's steps over time, what struck it, and while it did not train."""
    module = importlib.import_module("isthmus.report.run_pictures")
    module.draw_faults(done_s, faults, stopped_s, path, seconds=seconds)


def draw_timeline(
    predicted: Trace | None, measured: Trace, path: Path, steps: int = 2, notes: Sequence[str] = ()
) -> None:
    """`timeline.draw_timeline`: typical steps of `measured`, below the same of `predicted` if there is one."""
    importlib.import_module("isthmus.report.timeline").draw_timeline(predicted, measured, path, steps, notes)
