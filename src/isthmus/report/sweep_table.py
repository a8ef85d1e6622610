"""Results of a sweep's runs, and their table: a row per point, with mean and deviation over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.console import RenderableType
from rich.text import Text

from isthmus.report.tables import new_table, titled
from isthmus.units import format_duration

RunOutcome = Literal["waiting", "interrupted", "failed", "done"]
SECONDS = "step"  # the one metric that is a time; the others are plain numbers


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    point: dict[str, object]  # its settings, the seed left out
    seed: int | None
    folder: str  # in the sweep's folder
    outcome: RunOutcome = "waiting"
    reason: str = ""  # the error of a failed run
    metrics: dict[str, float] = {}
    """Results of a run that is done: the newest loss, held-out loss and metrics, and the seconds of a step, as far as
    it has them."""


class Spread(msgspec.Struct, frozen=True):
    """A metric over the seeds of a point."""

    mean: float
    deviation: float | None  # deviation of a sample: over n - 1; None for a single run


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    point: dict[str, object]
    runs: int
    done: int
    metrics: dict[str, Spread]  # over the runs that are done


def sweep_rows(results: Sequence[RunResult]) -> list[SweepRow]:
    """In the order of their first runs."""
    rows: list[SweepRow] = []
    for number, first in enumerate(results):
        if any(first.point == before.point for before in results[:number]):
            continue
        runs = [result for result in results if result.point == first.point]
        done = [result for result in runs if result.outcome == "done"]
        names = dict.fromkeys(name for result in done for name in result.metrics)
        rows.append(
            SweepRow(
                point=first.point,
                runs=len(runs),
                done=len(done),
                metrics={name: _spread([r.metrics[name] for r in done if name in r.metrics]) for name in names},
            )
        )
    return rows


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def sweep_table(name: str, results: Sequence[RunResult]) -> RenderableType:
    """A column per setting and per metric."""
    rows = sweep_rows(results)
    settings = list(dict.fromkeys(key for row in rows for key in row.point))
    metrics = list(dict.fromkeys(key for row in rows for key in row.metrics))
    table = new_table((*settings, "runs", *metrics), ("runs", *metrics))
    for row in rows:
        counted = f"{row.done}" if row.done == row.runs else f"{row.done} of {row.runs}"
        cells = [str(row.point[key]) if key in row.point else "" for key in settings]
        table.add_row(*map(Text, [*cells, counted, *(_cell(key, row.metrics.get(key)) for key in metrics)]))
    failed = [result for result in results if result.outcome == "failed"]
    caption = "\n".join(f"{result.folder}: {result.reason}" for result in failed)
    return titled(f"sweep {name}: mean ± deviation over seeds", table, caption)


def _cell(metric: str, spread: Spread | None) -> str:
    if spread is None:
        return ""
    if metric == SECONDS:
        mean, deviation = format_duration(spread.mean), spread.deviation and format_duration(spread.deviation)
    else:
        mean, deviation = f"{spread.mean:.4f}", spread.deviation and f"{spread.deviation:.4f}"
    return mean if spread.deviation is None else f"{mean} ± {deviation or 0}"
