"""The picture of a run with faults: steps over time, what struck it, and while it did not train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_LINE, _FAULT, _STOPPED = "#0072B2", "#D55E00", "#F0E442"  # Okabe and Ito's palette


def draw_faults(
    done_s: Sequence[tuple[float, int]],
    faults: Sequence[tuple[float, str]],
    stopped_s: Sequence[tuple[float, float]],
    path: Path,
    *,
    seconds: float,
) -> None:
    """`done_s`: when each step was done; `faults`: time and name; `stopped_s`: from when to when no device trained."""
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    times = [0.0, *(time_s for time_s, _ in done_s), seconds]
    steps = [0, *(step + 1 for _, step in done_s), done_s[-1][1] + 1 if done_s else 0]
    for number, (start_s, end_s) in enumerate(stopped_s):
        axes.axvspan(start_s, end_s, color=_STOPPED, alpha=0.5, label="not training" if not number else None)
    axes.step(times, steps, where="post", color=_LINE, label="steps done")
    top = max(steps, default=1) or 1
    for number, (time_s, name) in enumerate(faults):
        axes.axvline(time_s, color=_FAULT, linestyle="--", label="fault" if not number else None)
        axes.annotate(
            name, (time_s, top), xytext=(3, -3), textcoords="offset points", rotation=90, va="top", fontsize=7
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("steps")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
