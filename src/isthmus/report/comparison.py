"""Plans of several planners for one problem, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import RenderableType
from rich.text import Text

from isthmus.fleet import Fleet
from isthmus.plans import Objective, Plan
from isthmus.report.tables import asked, new_table, titled
from isthmus.units import format_duration, format_size


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
            table.add_row(*(Text(cell) for cell in _cells(row)))
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


def _cells(row: ComparedPlan) -> tuple[str, ...]:
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
