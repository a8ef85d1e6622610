"""Plans side by side: of several planners, under changes of a job or a fleet, and with the boundaries and codecs that a
loss budget leaves; and the results of a sweep's runs: a row per point, with mean and deviation over its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from rich.console import RenderableType
from rich.text import Text

from isthmus.expected_loss import more_steps
from isthmus.fleet import Fleet
from isthmus.plans import Objective, Plan, Replica
from isthmus.report.tables import asked, new_table, titled
from isthmus.units import format_duration, format_share, format_size


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that is left on a device while a plan runs."""

    device: str
    free_bytes: int
    share: float  # share of the device's memory, 0 to 1; below 0 where the plan does not fit


class ComparedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One planner's row. Of a planner that refused, all but its name, its reason and its time are None."""

    planner: str
    plan_s: float  # time that planning took
    interrupted: bool = False  # whether it was ended early, with its best plan till then
    refused: str | None = None
    step_s: float | None = None  # closed form
    simulated_step_s: float | None = None
    price_per_1000_steps: float | None = None  # devices and egress, in the fleet's unit, for steps as long as simulated
    lower_bound_s: float | None = None
    lower_bound_per_1000_steps: float | None = None  # bound of the price, where that was minimised
    question: str | None = None  # the plans over which the bound is one
    exact: bool = False  # whether some plan attains the bound
    gap: float | None = None
    headroom: Headroom | None = None  # headroom of the device that has the least left, as a share
    devices: int | None = None
    replicas: int | None = None
    micro_batches: int | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Rows in the order of their simulated step, or of their price where that is minimised; the refusals last."""

    model: str
    fleet: str
    batch: int
    objective: Objective = "time"
    rows: tuple[ComparedPlan, ...]
    not_asked: tuple[str, ...] = ()  # planners that have no row, for planning was interrupted


def least_headroom(plan: Plan, fleet: Fleet) -> Headroom:
    """UserError for a plan on a device that is not in the fleet."""
    found: list[Headroom] = []
    for replica in plan.replicas:
        for device in dict.fromkeys(stage.device for stage in replica.stages):
            room = fleet.device(device).memory_bytes
            free = room - sum(stage.memory.total for stage in replica.stages if stage.device == device)
            found.append(Headroom(device=device, free_bytes=free, share=free / room))
    return min(found, key=lambda headroom: headroom.share)


def ranked(rows: Sequence[ComparedPlan], objective: Objective = "time") -> tuple[ComparedPlan, ...]:
    """The fastest, or the cheapest, first; of equals, the one that was planned sooner."""

    def key(row: ComparedPlan) -> tuple[bool, float, float, float]:
        price = (row.price_per_1000_steps or 0.0) if objective == "cost" else 0.0
        return row.simulated_step_s is None, price, row.simulated_step_s or 0.0, row.plan_s

    return tuple(sorted(rows, key=key))


def compared_table(comparison: Comparison) -> RenderableType:
    """A row for each planner, in the order of the comparison."""
    numbers = (
        "formula",
        "simulated",
        "price of\n1,000 steps",
        "lower bound\n[1]",
        "gap",
        "time to\nplan",
        "memory\nleft",
        "micro-\nbatches",
        "devices",
    )
    table = new_table(("planner", *numbers), numbers)
    for row in comparison.rows:
        if row.refused is None:
            table.add_row(*(Text(cell) for cell in _planner_cells(row)))
    title = f"{comparison.model} on {comparison.fleet}: batches of {comparison.batch}"
    refusals = [f"{row.planner} made no plan: {row.refused}" for row in comparison.rows if row.refused is not None]
    refusals += [f"{row.planner} was interrupted: its best till then" for row in comparison.rows if row.interrupted]
    if comparison.not_asked:
        refusals.append(f"without a row, for planning was interrupted: {', '.join(comparison.not_asked)}")
    caption = "step times by the formula and by the simulator; price: devices for steps as simulated, and egress; "
    caption += "memory left: least of all devices, as a share of its own"
    return titled(title, table, "\n".join([*refusals, *_bounds(comparison), caption]))


def _bounds(comparison: Comparison) -> Iterator[str]:
    """Yield the question that each planner's bound answers; all planners of one problem are held against the same."""
    planners: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.refused is None:
            planners.setdefault(row.question or "", []).append(row.planner)
    for question, names in planners.items():
        who = "all planners" if len(planners) == 1 else ", ".join(names)
        if not question:
            yield f"[1] of {who}: no bound"
            continue
        priced = "; per 1,000 steps" if comparison.objective == "cost" else ""
        exact = any(row.exact for row in comparison.rows if row.question == question)
        reached = "A plan reaches it. " if exact else ""
        yield f"[1] of {who}: {asked(question)}{priced}. {reached}gap: how far a plan is above it"


def _planner_cells(row: ComparedPlan) -> tuple[str, ...]:
    price, headroom = row.price_per_1000_steps, row.headroom
    devices = f"{row.devices}" if row.replicas == 1 else f"{row.devices} in {row.replicas}"
    return (
        row.planner,
        _duration(row.step_s),
        _duration(row.simulated_step_s),
        f"{price:.4g}" if price else "-",
        _bound(row),
        "-" if row.gap is None else f"{row.gap:.2%}",
        format_duration(row.plan_s),
        "-" if headroom is None else f"{headroom.share:.0%}, {format_size(headroom.free_bytes)}\non {headroom.device}",
        "-" if row.micro_batches is None else f"{row.micro_batches}",
        devices,
    )


def _bound(row: ComparedPlan) -> str:
    bound = row.lower_bound_per_1000_steps
    return _duration(row.lower_bound_s) if bound is None else f"{bound:.4g}"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


class WhatIfRow(msgspec.Struct, frozen=True, kw_only=True):
    """The plan under one change. Where there is none, its figures are None."""

    change: str  # as `--what-if` takes it; empty for the job as it is
    what: str  # in words
    refused: str | None = None  # why there is no plan
    step_s: float | None = None  # as simulated
    samples_per_s: float | None = None
    price_per_1000_samples: float | None = None
    """Devices and egress, in the unit of the fleet's prices; None where nothing has a price."""
    devices: int | None = None  # how many the plan uses
    bought_per_hour: float = 0.0
    """Price per hour of the devices that the change adds, less that of those that it removes."""
    gained_per_price: float | None = None
    """Samples per second gained for each unit of money per hour; None where the change buys nothing with a price."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The job as it is, then the changes in the order in which they were asked for."""

    model: str
    fleet: str
    rows: tuple[WhatIfRow, ...]
    left_out: int = 0  # changes that were not planned, since planning was interrupted

    @property
    def best_purchase(self) -> WhatIfRow | None:
        """The purchase that gains the most samples per second for its price; None where none gains any."""
        paying = [row for row in self.rows if row.gained_per_price is not None and row.gained_per_price > 0]
        return max(paying, key=lambda row: row.gained_per_price or 0.0, default=None)


def what_if_table(found: WhatIf) -> RenderableType:
    """A row for each change that has a plan, the fastest first; the others below, each with its reason."""
    now = found.rows[0]
    numbers = ["step", "samples/s", "against\ntoday", "devices"]
    priced = any(row.price_per_1000_samples is not None for row in found.rows)
    bought = any(row.gained_per_price is not None for row in found.rows)
    numbers += ["price of 1,000\nsamples"] * priced + ["samples/s per\nprice per hour"] * bought
    table = new_table(("change", *numbers, "--what-if"), numbers)
    for row in sorted(found.rows, key=lambda row: -(row.samples_per_s or 0.0)):
        if row.refused is None:
            cells = [*_change_cells(row, now), *[_number(row.price_per_1000_samples)] * priced]
            cells += [_number(row.gained_per_price)] * bought
            table.add_row(Text(row.what, "bold" if row is now else ""), *map(Text, cells), Text(row.change))
    return titled(
        f"{found.model} on {found.fleet}: planned anew under each change", table, "\n".join(_change_lines(found))
    )


def _change_cells(row: WhatIfRow, now: WhatIfRow) -> list[str]:
    assert row.step_s is not None and row.samples_per_s is not None
    gain = None if row is now or now.samples_per_s is None else row.samples_per_s / now.samples_per_s - 1
    return [
        format_duration(row.step_s),
        f"{row.samples_per_s:.4g}",
        "-" if gain is None else f"{gain:+.1%}",
        str(row.devices),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _change_lines(found: WhatIf) -> Sequence[str]:
    lines = [f"{row.what}: no plan: {row.refused}" for row in found.rows if row.refused is not None]
    best, now_s = found.best_purchase, found.rows[0].samples_per_s or 0.0
    if best is not None and best.samples_per_s is not None:
        gain, price = best.samples_per_s - now_s, best.bought_per_hour
        lines.append(f"pays most: {best.what}: {gain:.3g} samples/s more for {price:.4g} per hour")
    elif any(row.gained_per_price is not None for row in found.rows):
        lines.append("no purchase makes the job faster")
    if found.left_out:
        lines.append(f"planning was interrupted: {found.left_out} changes have no row")
    return lines


class BoundaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The plan under one boundary. Where there is none, its figures are None."""

    name: str
    settings: str  # the job's `[model.boundary]` and `[compression]` for it, in TOML
    step_s: float | None = None  # as predicted by the closed form
    bottleneck: str = ""
    replicas: tuple[str, ...] = ()  # as `replica_line` has them
    increase: float | None = None  # increase of the expected loss by boundary and codecs, as a share of the loss
    refused: str | None = None  # why there is no plan

    @property
    def time_to_loss_s(self) -> float:
        """Return the time of all steps that make up for the increase, per step without it; infinite without a plan."""
        if self.step_s is None or self.increase is None:
            return math.inf
        return self.step_s * more_steps(self.increase)


def replica_line(replica: Replica) -> str:
    """Its micro-batches, its devices in order, and the codecs of its messages."""
    devices = ", ".join(stage.device for stage in replica.stages)
    codecs = ", ".join(codecs_of(replica))
    return f"{replica.micro_batches}: {devices}" + (f" ({codecs})" if codecs else "")


def codecs_of(replica: Replica) -> list[str]:
    packed = [c for e in replica.edges for c in (e.forward_compression, e.backward_compression) if c is not None]
    return sorted({c.codec if c.ratio == 1 else f"{c.codec} {c.ratio:g}" for c in packed})


class BoundaryChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The least time to a loss first; those without a plan behind."""

    model: str
    fleet: str
    budget: float
    measured_on: str  # the source of the expected losses
    rows: tuple[BoundaryRow, ...]


def boundary_table(found: BoundaryChoice) -> RenderableType:
    """A row for each boundary, and what to write into the job for the first."""
    columns = (
        "boundary",
        "step",
        "expected loss",
        "what limits the step",
        "micro-batches of each replica, its devices",
    )
    table = new_table(columns, ("step", "expected loss"))
    for row in found.rows:
        if row.step_s is not None and row.increase is not None:
            cells = (
                row.name,
                format_duration(row.step_s),
                f"{row.increase:+.2%}",
                row.bottleneck,
                "\n".join(row.replicas),
            )
            table.add_row(*map(Text, cells))
    lines = [f"{row.name}: no plan: {row.refused}" for row in found.rows if row.refused is not None]
    lines.append(f"expected loss: as measured on {found.measured_on}")
    lines.append(f"for {found.rows[0].name}:\n{found.rows[0].settings.rstrip()}")
    title = f"{found.model} on {found.fleet}: within {format_share(found.budget)} of the loss"
    return titled(title, table, "\n".join(lines))


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
