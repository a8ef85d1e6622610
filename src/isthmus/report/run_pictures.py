"""Pictures of runs: the loss, every step thin, their running mean thick, held-out values on top; and of a run with
faults, steps over time, what struck it, and while it did not train."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.report.timeline import COLOURS, FAINT, INK, OF_ROWS, Look, figure_of, save, style, write

_TRAIN, _HELD_OUT = COLOURS[:2]
_LOG_RANGE = 20.0  # from this ratio of largest to smallest loss on, a linear axis would flatten the end of the run


def draw_loss(
    points: Sequence[tuple[int, float]],
    heldout: Sequence[tuple[int, float]],
    path: Path,
    unit: str = "nats per token",
    references: Mapping[str, float] = {},
) -> None:
    """Write a PNG of training loss and held-out loss, both (step, loss), over the steps.

    `references` are drawn as dashed lines with their names, such as a data set's unigram entropy. The axis is
    logarithmic when the losses span a factor of 20 or more and are all above zero. Losses that are not finite are
    left out. UserError when there is no other.
    """
    train, held = _finite(points), _finite(heldout)
    losses = np.concatenate([train[:, 1], held[:, 1]])
    if not losses.size:
        raise UserError("loss: got no finite loss to draw, expected at least one")
    figure, axes = figure_of(7.5, 4.5, dpi=200)
    _draw_train(axes, train)
    if len(held):
        dots: Look = {"marker": "o", "markersize": 5, "markeredgecolor": "white"}
        axes.plot(held[:, 0], held[:, 1], color=_HELD_OUT, linewidth=1.2, label="held out", zorder=4, **dots)
        look: Look = {"color": _HELD_OUT, "fontweight": "bold", "zorder": 5}
        write(axes, f"{held[-1, 1]:.3g}", (held[-1, 0], held[-1, 1]), (0, 7), "right bottom", 9, **look)
    drawn = {name: value for name, value in references.items() if math.isfinite(value)}
    everything = np.concatenate([losses, np.array(list(drawn.values()), dtype=float)])
    _draw_references(axes, drawn)
    _draw_axes(axes, everything, unit)
    save(figure, path)


def smoothed(losses: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred mean over `window` values, which lags nowhere, as a trailing mean would."""
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    index = np.arange(len(losses))
    # At the start, where losses fall fast, as many values on both sides as there are on the left. At the end, where
    # they hardly fall, all on the left count: the last mean is the one that is read, and must not be one step's noise.
    reach = np.minimum(window // 2, index)
    low, high = index - reach, np.minimum(index + reach, len(losses) - 1)
    return (sums[high + 1] - sums[low]) / (high + 1 - low)


def _finite(points: Sequence[tuple[int, float]]) -> NDArray[np.float64]:
    """Return the finite points in the order of steps, shape (points, 2)."""
    array = np.array(sorted(points), dtype=float).reshape(-1, 2)
    return array[np.isfinite(array[:, 1])]


def _draw_train(axes: Axes, train: NDArray[np.float64]) -> None:
    window = max(1, len(train) // 40) | 1
    if window < 3:
        axes.plot(train[:, 0], train[:, 1], color=_TRAIN, linewidth=1.6, label="training" if len(train) else None)
        return
    axes.plot(train[:, 0], train[:, 1], color=_TRAIN, linewidth=0.5, alpha=0.35, label="training, each step")
    label = f"training, mean of {window} steps"
    axes.plot(train[:, 0], smoothed(train[:, 1], window), color=_TRAIN, linewidth=1.8, label=label, zorder=3)


def _draw_references(axes: Axes, references: Mapping[str, float]) -> None:
    for name, value in references.items():
        axes.axhline(value, color=FAINT, linewidth=1, linestyle=(0, (5, 3)), zorder=1)
        text = f"{name} {value:.3g}"
        write(axes, text, (1, value), (-4, 2), "right bottom", 8, xycoords=OF_ROWS, parse_math=False)


def _draw_axes(axes: Axes, losses: NDArray[np.float64], unit: str) -> None:
    low, high = float(losses.min()), float(losses.max())
    if low > 0 and high / low >= _LOG_RANGE:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(f"loss ({unit})", color=INK, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10], integer=True))
    style(axes)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.margins(x=0.02)
    axes.legend(facecolor="white", edgecolor="none", framealpha=0.9, fontsize=9, loc="upper right")


_LINE, _FAULT, _STOPPED = *COLOURS[:2], "#F0E442"


def draw_faults(
    done_s: Sequence[tuple[float, int]],
    faults: Sequence[tuple[float, str]],
    stopped_s: Sequence[tuple[float, float]],
    path: Path,
    *,
    seconds: float,
) -> None:
    """`done_s`: when each step was done; `faults`: time and name; `stopped_s`: from when to when no device trained."""
    figure, axes = figure_of(8.0, 4.0, dpi=150)
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
    figure.savefig(path)
