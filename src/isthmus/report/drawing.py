"""The common parts of pictures: ink, axes, and text beside a point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, FAINT = "#222222", "#666666"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's palette
Look = dict[str, Any]  # options that matplotlib takes
OF_ROWS = ("axes fraction", "data")  # coordinates: a place across the axes, at a height in data


def figure_of(width: float, height: float, dpi: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def style(axes: Axes) -> None:
    axes.tick_params(colors=FAINT, labelsize=9)
    axes.grid(color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def write(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], align: str, size: float, **more: Any
) -> None:
    """Write it `offset` points from a point, its `align` ("left bottom") there."""
    across, along = align.split()
    look: Look = {"color": FAINT, "textcoords": "offset points", **more}
    axes.annotate(text, at, offset, ha=across, va=along, fontsize=size, **look)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", metadata={"Software": "isthmus"})
