"""What the devices did in a run, as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from isthmus.trace import Span

JOINED_S = 0.05
"""Shorter gaps between two spans are not drawn."""


def draw(
    counted: Iterable[Span],
    spans: Sequence[Span],
    killed: Sequence[tuple[float, str]],
    away_s: float,
    end_s: float,
    path: Path,
) -> None:
    """A row for each device: when it computed what counts (blue), what was made again (orange), and when it was away
    (grey)."""
    names = sorted({span.device for span in spans})
    figure = Figure(figsize=(14, 0.4 * len(names) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    kept = list(counted)
    for row, name in enumerate(names):
        for shown, colour in ((spans, "tab:orange"), (kept, "tab:blue")):
            axes.broken_barh(_bars(shown, name), (row - 0.4, 0.8), color=colour, linewidth=0)
        away = [(at_s, min(away_s, end_s - at_s)) for at_s, device in killed if device == name]
        axes.broken_barh(away, (row - 0.4, 0.8), color="lightgrey", linewidth=0)
        for at_s, _ in away:
            axes.plot([at_s], [row], marker="x", color="black")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, end_s)
    axes.set_xlabel("seconds; x: its process was killed; orange: steps that were made again")
    figure.savefig(path, dpi=120)


def _bars(spans: Iterable[Span], device: str) -> list[tuple[float, float]]:
    """Start and length of each stretch of computing."""
    found: list[tuple[float, float]] = []
    for span in sorted((s for s in spans if s.device == device), key=lambda s: s.start_s):
        if found and span.start_s - sum(found[-1]) < JOINED_S:
            found[-1] = found[-1][0], max(sum(found[-1]), span.end_s) - found[-1][0]
        else:
            found.append((span.start_s, span.end_s - span.start_s))
    return found
