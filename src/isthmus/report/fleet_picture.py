"""The picture of a plan on its fleet: every link's bandwidth, who runs which stage, and the slowest links in use.

               to:  stage 0  1  2  | left out
    from  stage 0     .  [#]  .        a cell: the link from row to column, darker is faster
                1    [#]  .  [#]       [#] framed: the plan sends something there in every micro-batch
                2     .  [#]  .        numbered: the slowest of these, listed below with what they carry

Devices stand in the order of the plan, so that neighbours in the pipeline are neighbours here; unused ones come last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from isthmus.fleet import Fleet
from isthmus.plans import Plan
from isthmus.report.summary import UsedLink, link_uses_of
from isthmus.report.timeline import FAINT, INK, Look, save, write
from isthmus.units import format_bandwidth, format_duration, format_size

MOST_MARKED = 5
MOST_HARDWARE = 3
MOST_WRITTEN = 10  # devices up to which each cell holds its figures

_FRAME, _SLOW = "#111111", "#D55E00"
_HEAT = LinearSegmentedColormap.from_list("heat", ["#F7F4EC", "#C9D3DC", "#8AA4BC", "#4D6F93", "#1D3C66"])
_DPI = 160


class _FleetShape(NamedTuple):
    """Inches."""

    cell: float
    side: float
    names: float
    width: float
    height: float


def draw_plan(plan: Plan, fleet: Fleet, path: Path) -> None:
    """Write a PNG. UserError when the plan names a device that is not in the fleet; OSError where the disk refuses."""
    slots, undrawn = slots_of(plan, fleet)
    uses = link_uses_of(plan, fleet, {slot.device: number for number, slot in enumerate(slots)})
    slowest = sorted(uses, key=lambda use: -use.seconds)[:MOST_MARKED]
    hardware = _hardware(plan, fleet)
    shape = _shape(slots, len(slowest))
    if hardware:
        shape = shape._replace(height=shape.height + 0.2)
    figure = Figure(figsize=(shape.width, shape.height), dpi=_DPI)
    FigureCanvasAgg(figure)
    bottom = 0.6 + 0.2 * len(slowest)
    axes = figure.add_axes(
        (shape.names / shape.width, bottom / shape.height, shape.side / shape.width, shape.side / shape.height)
    )
    matrix, norm = _matrix(fleet, slots)
    axes.imshow(matrix, cmap=_HEAT, norm=norm, interpolation="nearest", zorder=1)
    _frame(axes, uses, slowest, shape)
    if len(slots) <= MOST_WRITTEN:
        _write_cells(axes, fleet, slots, norm, shape)
    _draw_slots(axes, slots, shape)
    if np.isfinite(matrix).any():
        _draw_bar(figure, norm, shape, bottom)
    _draw_words(figure, plan, shape, undrawn, [(use, slots) for use in slowest])
    if hardware:
        _draw_faint(figure, 0.12 / shape.width, 1 - 0.54 / shape.height, hardware, "top", 8.5)
    save(figure, path)


def _shape(slots: Sequence[PictureSlot], marked: int) -> _FleetShape:
    count = len(slots)
    cell = 0.92 if count <= 4 else 0.8 if count <= MOST_WRITTEN else max(0.115, min(0.42, 9.0 / count))
    side = cell * count
    names = 0.55 + 0.075 * max(len(_short(slot.device)) for slot in slots)
    return _FleetShape(cell, side, names, max(6.4, names + side + 1.5), side + names + 1.2 + 0.2 * marked)


def _matrix(fleet: Fleet, slots: Sequence[PictureSlot]) -> tuple[NDArray[np.float64], LogNorm]:
    """[source, target] bits per second; NaN where source is target."""
    matrix = np.full((len(slots), len(slots)), np.nan)
    for i, a in enumerate(slots):
        for j, b in enumerate(slots):
            if i != j:
                matrix[i, j] = 8 * fleet.link(a.device, b.device).bandwidth_bytes_per_s
    low, high = (np.nanmin(matrix), np.nanmax(matrix)) if len(slots) > 1 else (1.0, 1.0)
    # One bandwidth only is drawn in the middle of the scale.
    return matrix, LogNorm(low / 2, high * 2) if low == high else LogNorm(low, high)


def _frame(axes: Axes, uses: Sequence[UsedLink], slowest: Sequence[UsedLink], shape: _FleetShape) -> None:
    thin = min(1.8, max(0.8, 5 * shape.cell))
    frames = [_inside(use) for use in uses if use not in slowest]
    halo = [withStroke(linewidth=thin + 1.4, foreground="white")]  # or it is lost on the darkest cells
    axes.add_collection(
        PatchCollection(frames, facecolor="none", edgecolor=_FRAME, linewidth=thin, zorder=4, path_effects=halo)
    )
    for rank, use in enumerate(slowest, 1):
        frame = _inside(use)
        frame.set(facecolor="none", edgecolor=_SLOW, linewidth=1.6 * thin, zorder=5, path_effects=halo)
        axes.add_patch(frame)
        circle: Look = {"facecolor": "white", "edgecolor": _SLOW, "linewidth": 0.8}
        look: Look = {"fontweight": "bold", "color": INK, "zorder": 6}
        if shape.cell >= 0.25:
            look["bbox"] = {"boxstyle": "circle,pad=0.15", **circle}
            write(axes, str(rank), (use.target - 0.5, use.source - 0.5), (3, -3), "left top", 8, **look)
        else:  # the number stands beside a small cell, on the side away from the diagonal
            side = 9 if use.target > use.source else -9
            look |= {"bbox": {"boxstyle": "circle,pad=0.12", **circle}, "annotation_clip": False}
            write(axes, str(rank), (use.target, use.source), (side, side), "center center", 8, **look)


def _inside(use: UsedLink) -> Rectangle:
    """A frame within the cell, so that neighbours do not share a side."""
    return Rectangle((use.target - 0.44, use.source - 0.44), 0.88, 0.88)


def _write_cells(axes: Axes, fleet: Fleet, slots: Sequence[PictureSlot], norm: LogNorm, shape: _FleetShape) -> None:
    for i, a in enumerate(slots):
        for j, b in enumerate(slots):
            if i != j:
                link = fleet.link(a.device, b.device)
                text = f"{format_bandwidth(link.bandwidth_bytes_per_s)}\n{format_duration(link.latency_s)}"
                ground = to_rgb(_HEAT(norm(8 * link.bandwidth_bytes_per_s)))
                axes.text(
                    j,
                    i + 0.12,
                    text,
                    ha="center",
                    va="center",
                    fontsize=6.5 if shape.cell < 0.9 else 7.5,
                    color=_ink_on(ground),
                    zorder=3,
                    linespacing=1.35,
                )


def _ink_on(ground: str | tuple[float, float, float]) -> str:
    red, green, blue = to_rgb(ground)
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else INK


def _draw_slots(axes: Axes, slots: Sequence[PictureSlot], shape: _FleetShape) -> None:
    """Names and stage colours along the left and above; every name where there is room for it."""
    count, strip = len(slots), 0.2 / shape.cell
    gap = 0.05 / shape.cell
    size = min(9.0, max(4.5, 52 * shape.cell))
    for k, slot in enumerate(slots):
        for corner, width, height in (
            ((-0.5 - gap - strip, k - 0.5), strip, 1.0),
            ((k - 0.5, -0.5 - gap - strip), 1.0, strip),
        ):
            axes.add_patch(
                Rectangle(corner, width, height, facecolor=slot.colour, edgecolor="white", linewidth=0.5, clip_on=False)
            )
        if slot.label and shape.cell >= 0.2:
            middle = -0.5 - gap - strip / 2
            small = min(8.0, size)
            for x, y in ((middle, k), (k, middle)):
                axes.text(x, y, slot.label, ha="center", va="center", size=small, color=_ink_on(slot.colour))
        away = -0.5 - 2 * gap - strip
        colour = INK if slot.label else FAINT
        for x, y, across, along, turned in ((away, k, "right", "center", 0), (k, away, "center", "bottom", 90)):
            place: Look = {"ha": across, "va": along, "rotation": turned}
            axes.text(x, y, _short(slot.device), fontsize=size, color=colour, parse_math=False, **place)
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(count - 0.5, -0.5)
    axes.xaxis.set_major_locator(NullLocator())
    axes.yaxis.set_major_locator(NullLocator())
    for spine in axes.spines.values():
        spine.set_color(FAINT)
        spine.set_linewidth(0.6)
    axes.set_facecolor("white")


def _draw_bar(figure: Figure, norm: LogNorm, shape: _FleetShape, bottom: float) -> None:
    tall = max(1.2, min(shape.side, 4.0))
    axes = figure.add_axes(
        (
            (shape.names + shape.side + 0.25) / shape.width,
            (bottom + shape.side - tall) / shape.height,
            0.16 / shape.width,
            tall / shape.height,
        )
    )
    bar = figure.colorbar(ScalarMappable(norm, _HEAT), cax=axes)
    bar.outline.set_linewidth(0.5)  # type: ignore[operator]
    low, high = norm.vmin or 1.0, norm.vmax or 1.0
    wide = high / low > 20
    axes.yaxis.set_major_locator(LogLocator(10) if wide else FixedLocator(list(np.geomspace(low, high, 4))))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda bits, _: format_bandwidth(bits / 8)))
    axes.tick_params(labelsize=7.5, colors=FAINT)
    axes.set_title("bandwidth", fontsize=8, color=FAINT, loc="left")


def _draw_words(
    figure: Figure,
    plan: Plan,
    shape: _FleetShape,
    undrawn: int,
    slowest: Sequence[tuple[UsedLink, Sequence[PictureSlot]]],
) -> None:
    left, top = 0.12 / shape.width, 1 - 0.1 / shape.height
    title = f"{plan.model} on {plan.fleet}: a step of {format_duration(plan.predicted.expected_s)}"
    figure.text(left, top, title, ha="left", va="top", fontsize=11, fontweight="bold", color=INK, parse_math=False)
    devices = (
        f"{len(plan.used)} devices in {len(plan.replicas)} replicas"
        if len(plan.replicas) > 1
        else ("one stage" if len(plan.devices) == 1 else f"{len(plan.devices)} stages")
    )
    lines = f"planner {plan.planner}, {devices}; {plan.predicted.bottleneck} sets the period"
    if any(stage.recompute for replica in plan.replicas for stage in replica.stages):
        lines += f"; {RECOMPUTES}: computes its forward twice"
    if undrawn:
        lines += f"; {undrawn} devices not drawn"
    _draw_faint(figure, left, 1 - 0.34 / shape.height, lines, "top", 8.5)
    figure.text(
        left,
        (0.3 + 0.2 * len(slowest)) / shape.height,
        "Links from row to column; framed: used by the plan" + ("; the slowest of these:" if slowest else ""),
        ha="left",
        va="center",
        fontsize=8.5,
        color=INK,
    )
    for rank, (use, slots) in enumerate(slowest):
        text = (
            f"{rank + 1}  {slots[use.source].device} to {slots[use.target].device}: {format_size(use.size_bytes)} of "
            f"{use.what} in {format_duration(use.seconds)}"
        )
        _draw_faint(figure, left, (0.22 + 0.2 * (len(slowest) - 1 - rank)) / shape.height, text, "center", 8)


def _draw_faint(figure: Figure, x: float, y: float, text: str, along: str, size: float) -> None:
    figure.text(x, y, text, ha="left", va=along, fontsize=size, color=FAINT, parse_math=False)


def _hardware(plan: Plan, fleet: Fleet) -> str:
    """Name the hardware of the plan's devices, the most frequent first; empty where the fleet names none."""
    # In brackets stands which one of a machine's it is.
    found = Counter(fleet.device(name).hardware.partition(" (")[0] for name in plan.used)
    known = [f"{count} x {name}" for name, count in found.most_common() if name]
    return "on " + ", ".join(known[:MOST_HARDWARE]) + (", ..." if len(known) > MOST_HARDWARE else "") if known else ""


def _short(device: str) -> str:
    return device if len(device) <= 22 else f"{device[:21]}…"


MOST_DEVICES = 96
"""Beyond this a cell would be smaller than a frame: the devices in use are drawn first, and the rest is counted."""
RECOMPUTES = "*"  # behind the number of a stage that runs its forward twice
_IDLE = "#D9D9D9"
_STAGES = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00")
"""Okabe and Ito's; beyond them, stages are shades from light to dark."""


class PictureSlot(NamedTuple):
    """A device on both axes."""

    device: str
    label: str
    colour: str


def slots_of(plan: Plan, fleet: Fleet) -> tuple[list[PictureSlot], int]:
    """The devices drawn, and how many are not."""
    found: dict[str, PictureSlot] = {}
    for number, replica in enumerate(plan.replicas):
        colours = _stage_colours(len(replica.stages))
        for index, stage in zip(replica.stage_of, replica.workers, strict=True):
            label = str(index) if len(plan.replicas) == 1 else f"{number}.{index}"
            label += RECOMPUTES if stage.recompute else ""
            before = found.get(fleet.device(stage.device).name)
            if before is not None:  # a device of two stages has the colour of the first
                label = f"{before.label}+{label}"
            found[stage.device] = PictureSlot(stage.device, label, before.colour if before else colours[index])
    idle = [PictureSlot(name, "", _IDLE) for name in fleet.names if name not in found]
    slots = [*found.values(), *idle]
    return slots[:MOST_DEVICES], max(0, len(slots) - MOST_DEVICES)


def _stage_colours(count: int) -> list[str]:
    if count <= len(_STAGES):
        return list(_STAGES[:count])
    shades = LinearSegmentedColormap.from_list("stages", ["#F0E442", "#E69F00", "#CC79A7", "#0072B2", "#003B4F"])
    return ["#{:02x}{:02x}{:02x}".format(*(round(255 * c) for c in shades(k / (count - 1))[:3])) for k in range(count)]
