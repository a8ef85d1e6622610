"""Pictures of runs: a few steps, losses, evaluations, rounds, and what faults did. The one of a few steps has what each
device computed, sent and received, predicted above measured.

    predicted   device 0  [F0][F1][F2]   [B0][F3]...     compute, with micro-batch numbers
                             ▄▄  ▄▄  ▄▄  ▄▄              send:    activations in the upper half, gradients in the lower
                                  ▄▄  ▄▄  ▄▄             receive: the same
                device 1  ...
    measured    device 0  ...

Its panels share one axis, whose zero is the start of the first step drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.federated.evaluation import ClientFigures, Evaluation, RoundLine
from isthmus.report.summary import prediction_error
from isthmus.trace import Span, Trace, steady_step_s, step_bounds

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


# Okabe and Ito's palette, which the common forms of colour blindness keep apart; by lightness too, for a grey print.
FORWARD, BACKWARD, WEIGHTS = "#56B4E9", "#E69F00", "#F0E442"
EVALUATION, UPDATE, OTHER = "#009E73", "#CC79A7", "#8C8C8C"
_COMPUTE_COLOURS = {"F": FORWARD, "B": BACKWARD, "W": WEIGHTS, "E": EVALUATION, "update": UPDATE}
_TRANSFER_COLOURS = {"forward": FORWARD, "backward": BACKWARD}
_LEGEND = (
    ("forward / activations", FORWARD),
    ("backward / gradients", BACKWARD),
    ("weight gradients", WEIGHTS),
    ("evaluation", EVALUATION),
    ("update", UPDATE),
    ("other", OTHER),
)

# Of a device's row of height 1, downwards: (top, height). What is left over separates it from the next.
_COMPUTE = (0.05, 0.47)
_SEND = (0.555, 0.155)
_RECEIVE = (0.745, 0.155)

_DPI = 200
_MARGIN = 8.0  # points between the figure's edge and its text
_GAP = 8.0  # points between two texts of one line
_BOLD = 1.15  # how much wider a text is in bold, at most
_NOTES = 3  # at most, and how many more there are
_GROUND = "#F1F1F1"


class _Window(NamedTuple):
    """The part of a trace that is drawn: its spans, moved so that the first step starts at zero."""

    title: str
    starts_s: tuple[float, ...]  # start of each step drawn, and last the end of the last
    step: int
    end_s: float
    spans: tuple[Span, ...]
    origin_s: float


class _Bar(NamedTuple):
    """In seconds across and in rows down."""

    left: float
    top: float
    width: float
    height: float


class _TimelineShape(NamedTuple):
    """Sizes in inches, from the number of devices and panels."""

    width: float
    left: float
    right: float
    top: float
    bottom: float
    between: float
    row: float

    @property
    def plot_width(self) -> float:
        return self.width - self.left - self.right


def draw_timeline(
    predicted: Trace | None, measured: Trace, path: Path, steps: int = 2, notes: Sequence[str] = ()
) -> None:
    """Write a PNG of `steps` typical consecutive steps of `measured`, below the same of `predicted` if there is one,
    and `notes` at the foot.

    A shorter trace is drawn as far as it goes. UserError when `steps` is below 1 or a trace holds no complete step.
    """
    if steps < 1:
        raise UserError(f"timeline: steps: got {steps}, expected at least 1")
    traces = [trace for trace in (predicted, measured) if trace is not None]
    windows = [_window(trace, steps) for trace in traces]
    devices = _devices(traces)
    shape = _shape(devices, windows)
    if len(notes) > _NOTES + 1:
        notes = [*notes[:_NOTES], f"... and {len(notes) - _NOTES} more"]
    shape = shape._replace(bottom=shape.bottom + 0.18 * len(notes))
    height = shape.top + shape.bottom + len(windows) * len(devices) * shape.row + (len(windows) - 1) * shape.between
    figure = Figure(figsize=(shape.width, height), dpi=_DPI)
    FigureCanvasAgg(figure)
    end_s = max(window.end_s for window in windows)
    number_size = _number_size(windows, shape.plot_width * 72 / end_s, shape)
    for number, window in enumerate(windows):
        above = shape.top + number * (len(devices) * shape.row + shape.between)
        bottom = 1 - (above + len(devices) * shape.row) / height
        axes = figure.add_axes(
            (shape.left / shape.width, bottom, shape.plot_width / shape.width, len(devices) * shape.row / height)
        )
        _draw_panel(axes, window, devices, end_s, shape, number_size)
        _draw_axis(axes, window is windows[-1], end_s)
    _draw_heading(figure, predicted, measured, shape, height, windows)
    for line, text in enumerate(reversed(notes)):
        place = _MARGIN / 72 / shape.width, (0.06 + 0.18 * line) / height
        figure.text(*place, text, ha="left", va="bottom", fontsize=8, color=INK)
    save(figure, path)


def _window(trace: Trace, steps: int) -> _Window:
    """The consecutive steps whose total time is nearest to the typical one; never the first step if there are more."""
    typical_s, bounds = steady_step_s(trace), step_bounds(trace)
    runs = [first for first in bounds if all(first + i in bounds for i in range(steps))]
    if not runs:
        return _window(trace, steps - 1)
    later = [first for first in runs if first != min(bounds)] or runs
    first = min(later, key=lambda k: abs(bounds[k + steps - 1][1] - bounds[k][0] - steps * typical_s))
    origin = bounds[first][0]
    starts = (0.0, *(bounds[first + i][1] - origin for i in range(steps)))
    own = range(first, first + steps)
    # The tails of these steps stay, wherever they end; of other work (evaluations, say) only what runs in between.
    chosen = tuple(
        span for span in trace.spans if span.end_s > origin and (span.step in own or span.start_s < origin + starts[-1])
    )
    end = max(starts[-1], *(span.end_s - origin for span in chosen if span.step in own))
    title = "predicted (simulator)" if trace.source == "simulator" else "measured (real run)"
    return _Window(title, starts, first, end, chosen, origin)


def _devices(traces: Iterable[Trace]) -> list[str]:
    """Devices with compute spans, in the order in which the pipeline first reaches them."""
    first: dict[str, float] = {}
    for trace in traces:
        for span in trace.spans:
            if span.track == "compute":
                first[span.device] = min(span.start_s, first.get(span.device, math.inf))
        if first:
            break  # the prediction has no skew between clocks
    for trace in traces:
        for span in trace.spans:
            first.setdefault(span.device, math.inf)
    return sorted(first, key=first.__getitem__)


def _shape(devices: list[str], windows: list[_Window]) -> _TimelineShape:
    tasklets = sum(1 for s in windows[0].spans if s.device == devices[0] and s.track == "compute")
    name = max(_text_width_in(_short(device), 9) for device in devices)
    return _TimelineShape(
        width=min(18.0, max(11.0, 2.5 + name + 0.24 * tasklets)),
        left=0.2 + name + 0.42,
        right=0.62,
        top=0.98,
        bottom=0.55,
        between=0.42,
        row=0.62 if len(devices) <= 6 else 0.44,
    )


def _draw_panel(
    axes: Axes, window: _Window, devices: list[str], end_s: float, shape: _TimelineShape, number_size: float
) -> None:
    points_per_s = shape.plot_width * 72 / end_s
    bars: dict[str, list[_Bar]] = {_GROUND: []}
    for row, device in enumerate(devices):
        bars[_GROUND] += [_Bar(0, row + top, end_s, height) for top, height in (_COMPUTE, _SEND, _RECEIVE)]
        busy_s = 0.0
        for span in window.spans:
            if span.device != device or (colour := _colour(span)) is None:
                continue
            top, height = _lane(span)
            # A transfer of no time would leave no mark at all.
            length = max(span.end_s - span.start_s, 0.5 / points_per_s)
            bar = _Bar(span.start_s - window.origin_s, row + top, length, height)
            bars.setdefault(colour, []).append(bar)
            if span.track == "compute":
                busy_s += span.end_s - span.start_s
                if bar.left >= 0 and _fits(span, number_size, points_per_s):
                    middle = bar.left + bar.width / 2, bar.top + bar.height / 2
                    place: Look = {"ha": "center", "va": "center_baseline", "zorder": 3, "clip_on": True}
                    axes.text(*middle, str(span.micro_batch), color=INK, fontsize=number_size, **place)
        _draw_names(axes, row, device, busy_s / window.end_s, shape)
    for colour, group in bars.items():
        _draw_bars(axes, colour, group, points_per_s)
    axes.set_xlim(0, end_s)
    axes.set_ylim(len(devices), 0)
    _draw_steps(axes, window, shape, points_per_s)


def _draw_bars(axes: Axes, colour: str, bars: list[_Bar], points_per_s: float) -> None:
    """One collection per colour: a figure may hold tens of thousands of bars."""
    corners = [((x, y), (x, y + h), (x + w, y + h), (x + w, y)) for x, y, w, h in bars]
    # A thin edge parts neighbours, but must not eat a bar that is hardly wider than itself.
    edges = [0.0 if colour == _GROUND else min(0.6, bar.width * points_per_s / 6) for bar in bars]
    axes.add_collection(
        PolyCollection(
            corners, facecolors=colour, edgecolors="white", linewidths=edges, zorder=0 if colour == _GROUND else 2
        )
    )


def _draw_steps(axes: Axes, window: _Window, shape: _TimelineShape, points_per_s: float) -> None:
    """Labels over their steps, moved to the right where they would touch what is written before them."""
    for start in window.starts_s:
        axes.axvline(start, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=4)
    taken = _MARGIN - shape.left * 72 + _text_width_in(window.title, 10) * 72 * _BOLD
    for number, (start, end) in enumerate(pairwise(window.starts_s)):
        label = f"step {window.step + number}: {_time(end - start)}"
        width = _text_width_in(label, 8) * 72
        left = max((start + end) / 2 * points_per_s - width / 2, taken + _GAP)
        if left + width > shape.plot_width * 72:  # steps that are short beside their tails: no room for all labels
            break
        write(axes, label, (0, 1), (left, 3), "left bottom", 8, xycoords="axes fraction")
        taken = left + width
    bold = {"xycoords": "axes fraction", "fontweight": "bold", "color": INK}
    write(axes, window.title, (0, 1), (_MARGIN - shape.left * 72, 4), "left bottom", 10, **bold)
    write(axes, "busy", (1, 1), (5, 3), "left bottom", 8, xycoords="axes fraction")


def _lane(span: Span) -> tuple[float, float]:
    """Top and height in the device's row. Activations fill the upper half of a transfer lane and gradients the lower:
    a device in the middle of the pipeline sends both at once."""
    if span.track == "compute":
        return _COMPUTE
    top, height = _SEND if span.track == "send" else _RECEIVE
    if span.name == "forward":
        return top, height / 2
    if span.name == "backward":
        return top + height / 2, height / 2
    return top, height


def _number_size(windows: list[_Window], points_per_s: float, shape: _TimelineShape) -> float:
    """One font size for all micro-batch numbers: the largest at which nine bars in ten hold theirs."""
    numbered = [span for w in windows for span in w.spans if span.track == "compute" and span.micro_batch >= 0]
    tallest = shape.row * _COMPUTE[1] * 72 * 0.75
    for size in (8.0, 7.0, 6.0):
        fitting = sum(_fits(span, size, points_per_s) for span in numbered)
        if size <= tallest and fitting >= 0.9 * len(numbered):
            return size
    return 5.0


def _fits(span: Span, size: float, points_per_s: float) -> bool:
    # Every digit counts as wide as a 0, so that bars of one length are all numbered or all not.
    width = _text_width_in("0" * len(str(span.micro_batch)), size) * 72 + 1
    return span.micro_batch >= 0 and width <= (span.end_s - span.start_s) * points_per_s


def _draw_names(axes: Axes, row: int, device: str, busy: float, shape: _TimelineShape) -> None:
    middle = row + 0.5
    of_row = {"xycoords": OF_ROWS, "annotation_clip": False}
    if shape.row >= 0.5:
        for (top, height), label in ((_SEND, "send"), (_RECEIVE, "receive")):
            write(axes, label, (0, row + top + height / 2), (-4, 0), "right center", 6, **of_row)
        middle = row + _COMPUTE[0] + _COMPUTE[1] / 2
    left = (_MARGIN - shape.left * 72, 0)
    write(axes, _short(device), (0, middle), left, "left center", 9, color=INK, parse_math=False, **of_row)
    write(axes, f"{busy:.0%}", (1, middle), (5, 0), "left center", 8, **of_row)


def _draw_axis(axes: Axes, labelled: bool, end_s: float) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=8, colors=FAINT, labelbottom=labelled)
    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 2.5, 5, 10]))
    factor, unit = (1e3, "ms") if end_s < 2 else (1, "s")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * factor:g}"))
    axes.grid(axis="x", color="white", linewidth=0.8)
    axes.set_axisbelow(True)
    if labelled:
        axes.set_xlabel(f"time since the start of the first step drawn ({unit})", fontsize=9, color=INK)


def _draw_heading(
    figure: Figure,
    predicted: Trace | None,
    measured: Trace,
    shape: _TimelineShape,
    height: float,
    windows: list[_Window],
) -> None:
    step_s = steady_step_s(measured)
    title = f"Step time: measured {_time(step_s)}"
    if predicted is not None:
        expected_s = steady_step_s(predicted)
        error = prediction_error(expected_s, step_s)
        title = f"Step time: predicted {_time(expected_s)}, measured {_time(step_s)} (prediction error {error:+.1%})"
    left = _MARGIN / 72 / shape.width
    top = 1 - _MARGIN / 72 / height
    figure.text(left, top, title, ha="left", va="top", fontsize=13, fontweight="bold", color=INK)
    drawn = {_colour(span) for window in windows for span in window.spans}
    entries = [Patch(color=colour, label=label) for label, colour in _LEGEND if colour in drawn]
    figure.legend(
        handles=entries,
        loc="upper left",
        bbox_to_anchor=(left, 1 - 0.45 / height),
        ncols=len(entries),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        handleheight=1.0,
        columnspacing=1.6,
        borderaxespad=0,
        borderpad=0,
    )


def _colour(span: Span) -> str | None:
    if span.track not in ("compute", "send", "receive"):
        return None
    return (_COMPUTE_COLOURS if span.track == "compute" else _TRANSFER_COLOURS).get(span.name, OTHER)


@cache
def _text_width_in(text: str, size: float) -> float:
    # Without "$", which would be read as mathematics and is as wide as an "S".
    return TextPath((0, 0), text.replace("$", "S"), size=size).get_extents().width / 72


def _short(device: str) -> str:
    return device if len(device) <= 24 else f"{device[:23]}\u2026"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"


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


MOST_EXECUTORS = 24
MOST_SITES = 10  # clients or sites that have a line of their own
MOST_EDGED = 100  # clients of an executor that are drawn with a gap between them


def draw_evaluations(evaluations: Sequence[tuple[int, Evaluation]], path: Path, *, axis: str = "round") -> bool:
    """The loss and each metric over rounds or steps, on held-out samples and of clients on their own data, whichever
    was taken, one below the other; False where none was."""
    found = [(at, {"loss": e.loss, **e.metrics}, e.clients) for at, e in evaluations]
    shown: list[tuple[str, list[tuple[int, float]], list[tuple[int, ClientFigures]]]] = []
    for name in dict.fromkeys(["loss", *(n for _, held, clients in found for n in (*held, *clients))]):
        points = [(at, value) for at, held, _ in found if (value := held.get(name)) is not None]
        each = [(at, clients[name]) for at, _, clients in found if name in clients]
        if points or each:
            shown.append((name, points, each))
    if not shown:
        return False
    figure, first = _figure(height=1.2 + 3.0 * len(shown))
    first.remove()
    for place, (name, points, each) in enumerate(shown):
        axes = figure.add_subplot(len(shown), 1, place + 1)
        style(axes)
        _draw_metric(axes, name, points, each)
        if place == 0:
            _legend_above(axes)
    figure.axes[-1].set_xlabel(axis, color=INK)
    save(figure, path)
    return True


def _draw_metric(
    axes: Axes, name: str, points: Sequence[tuple[int, float]], each: Sequence[tuple[int, ClientFigures]]
) -> None:
    if points:
        dot = "o" if len(points) == 1 else ""
        axes.plot(*zip(*points, strict=True), color=COLOURS[0], linewidth=1.8, marker=dot, label="held-out samples")
    if each:
        numbers = [number for number, _ in each]
        mean = np.array([c.mean for _, c in each])
        spread = np.array([c.deviation for _, c in each])
        low, high, label = mean - spread, mean + spread, "one standard deviation"
        axes.fill_between(numbers, low, high, color=COLOURS[2], alpha=0.15, linewidth=0, label=label)
        axes.plot(numbers, mean, color=COLOURS[2], linewidth=1.4, label="mean of clients, each on its own data")
        worst = [c.worst_decile for _, c in each]
        axes.plot(numbers, worst, color=COLOURS[1], linewidth=1.4, label="mean of the worst tenth of clients")
        names = sorted({who for _, c in each for who in c.each})
        for number, who in enumerate(names if len(names) <= MOST_SITES else ()):
            own = [(at, c.each[who]) for at, c in each if who in c.each]
            said = f"client {who}" if who.isdigit() else who
            style, colour = (":", "-.")[number // len(COLOURS)], COLOURS[number % len(COLOURS)]
            axes.plot(*zip(*own, strict=True), color=colour, linewidth=0.8, linestyle=style, label=said)
    axes.set_ylabel(name, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if name.endswith("accuracy"):
        axes.set_ylim(-0.02, 1.02)  # lines at 0 and 1 are seen
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def draw_round_timeline(line: RoundLine, path: Path) -> None:
    """One round: the clients of each executor one after another, as long as they took; the planned end dashed."""
    names = sorted(line.record.trained, key=lambda name: (len(name), name))[:MOST_EXECUTORS]
    figure, axes = _figure(height=1.6 + 0.32 * len(names))
    for row, name in enumerate(names):
        seconds = np.array([timed.seconds for timed in line.record.trained[name]])
        bars = list(zip(np.cumsum(seconds) - seconds, seconds, strict=True))
        edge = 0.4 if len(bars) <= MOST_EDGED else 0.0  # of many, edges would be all that is seen
        axes.broken_barh(
            bars, (row - 0.35, 0.7), facecolors=(COLOURS[0], COLOURS[5]), edgecolor="white", linewidth=edge
        )
    if line.record.predicted_s is not None:
        axes.axvline(line.record.predicted_s, color=INK, linewidth=1, linestyle=(0, (5, 3)), label="planned")
        _legend_above(axes)
    axes.set_yticks(range(len(names)), labels=names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)
    of = f", {len(names)} of {len(line.record.trained)} executors" if len(names) < len(line.record.trained) else ""
    last = ", last pass" if line.record.earlier_s else ""
    axes.set_xlabel(f"seconds of training in round {line.record.round + 1}{last}{of}", color=INK)
    save(figure, path)


def draw_throughput(lines: Sequence[RoundLine], path: Path) -> bool:
    """Every client's time over its samples, by executor, and the lines that the last round was planned with."""
    planned = [line for line in lines if line.record.lines]
    if not planned:
        return False
    last = planned[-1]
    figure, axes = _figure()
    names = sorted(last.record.lines, key=lambda name: (len(name), name))[: len(COLOURS)]
    for name, colour in zip(names, COLOURS, strict=False):
        points = [(t.samples, t.seconds) for line in planned[-20:] for t in line.record.trained.get(name, ())]
        if not points:
            continue
        samples, seconds = np.array(points, dtype=float).T
        axes.scatter(samples, seconds, s=9, alpha=0.35, color=colour, linewidth=0)
        ends = np.array([0.0, samples.max()])
        fitted = last.record.lines[name]
        axes.plot(ends, fitted.fixed_s + fitted.seconds_per_sample * ends, color=colour, linewidth=1.6, label=name)
    axes.set_xlabel("samples of a client", color=INK)
    axes.set_ylabel("seconds", color=INK)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
    return True


def _legend_above(axes: Axes) -> None:
    """Where nothing is drawn."""
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


def _figure(height: float = 4.5) -> tuple[Figure, Axes]:
    figure, axes = figure_of(7.5, height, dpi=160)
    style(axes)
    return figure, axes
