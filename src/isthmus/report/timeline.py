"""The picture of a few steps: what every device computed, sent and received, predicted above measured.

    predicted   device 0  [F0][F1][F2]   [B0][F3]...     compute, with micro-batch numbers
                             ▄▄  ▄▄  ▄▄  ▄▄              send:    activations in the upper half, gradients in the lower
                                  ▄▄  ▄▄  ▄▄             receive: the same
                device 1  ...
    measured    device 0  ...

Both panels share one axis, whose zero is the start of the first step drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, MaxNLocator

from isthmus.errors import UserError
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
