"""Pictures of evaluations: loss and metrics by round or step; and of a federated run, who trained when, and the
executors' fitted times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from isthmus.federated.evaluation import ClientFigures, Evaluation, RoundLine
from isthmus.report.timeline import COLOURS, INK, figure_of, save, style

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
