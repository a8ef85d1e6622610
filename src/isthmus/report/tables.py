"""Tables for a terminal: a plan, a run beside its prediction, the verdict on a plan, fleets, planners, and memory that
stages took; and a certificate in one sentence. Nothing is printed here: the caller has the console."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from isthmus.fleet import Device, Fleet, Link
from isthmus.graph import OpGraph
from isthmus.plans import ANY_PLAN, Certificate, Plan, PlanPeriod, Prediction, Stage, bounded_plans
from isthmus.protocol.step_failures import MemoryPeak
from isthmus.report.summary import (
    ComparisonSummary,
    DeviceMemoryUse,
    PlanComparison,
    PlanSummary,
    StageSummary,
    comparison_summary,
    plan_summary,
    prediction_error,
)
from isthmus.trace import Trace, steady_step_s, step_times
from isthmus.units import format_bandwidth, format_compute, format_duration, format_share, format_size
from isthmus.verification import Verdict
from isthmus.verification.question import Figure

# Names come from files and from other parties. As `Text`, "[bold]" in one of them is what it says, not a style.


def titled(title: str, table: Table, caption: str = "") -> RenderableType:
    """Not rich's own title and caption: those wrap at the table's width, however narrow it is."""
    return Group(Text(title, "bold"), table, *([Text(caption, "dim")] if caption else []), Text())


def new_table(columns: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    """An empty table in the report's one style. The columns named in `numbers` are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    right = set(numbers)
    for column in columns:
        table.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
    return table


def stage_number(number: int, plan: PlanSummary) -> str:
    """In its replica; of several replicas, with the replica in front."""
    stage = plan.stages[number]
    if stage.copy_of is not None:
        return f"{stage.copy_of}, copy"
    within = number - next(i for i, other in enumerate(plan.stages) if other.replica == stage.replica)
    return str(within) if plan.stages[-1].replica == 0 else f"{stage.replica}.{within}"


def noted(plan: PlanSummary) -> list[str]:
    """Return the notes of a plan that the table's rows do not give."""
    rows = tuple(f"{stage.device} runs " for stage in plan.stages)
    return [note for note in plan.notes if not note.startswith(rows)]


def comparison_table(summary: ComparisonSummary) -> RenderableType:
    """Step time, busy devices and used links: predicted beside measured. If the plan changed, a row for each plan."""
    tables = [_step_table(summary), _device_table(summary)]
    if summary.links:
        tables.append(_link_table(summary))
    return Group(_plans_table(summary), *tables) if len(summary.plans) > 1 else Group(*tables)


def _plans_table(summary: ComparisonSummary) -> RenderableType:
    numbers = ("predicted", "measured", "error")
    table = new_table(("steps", "devices", *numbers), numbers)
    for plan in summary.plans:
        table.add_row(
            Text(f"{plan.first_step} to {plan.last_step}"),
            Text(", ".join(plan.devices)),
            Text(_seconds(plan.predicted_step_s)),
            Text(_seconds(plan.measured_step_s)),
            Text(f"{plan.error:+.1%}"),
        )
    caption = "each plan with the fleet that it was made for, and the steps under it; below, the last one"
    return titled("Step time of each of the run's plans", table, caption)


def _step_table(summary: ComparisonSummary) -> RenderableType:
    title = f"Step time: {summary.model} on {summary.fleet}, planner {summary.planner}"
    table = new_table(("", "step time", "error"), ("step time", "error"))
    table.add_row(Text("measured"), Text(_seconds(summary.measured_step_s)), Text("-"))
    rows = (
        ("simulator", summary.predicted_step_s, summary.error),
        ("formula", summary.closed_form_step_s, summary.closed_form_error),
    )
    for name, seconds, error in rows:
        table.add_row(Text(name), Text(_seconds(seconds)), Text(f"{error:+.1%}"))
    caption = "median of the steps after the first; error = (predicted - measured) / measured"
    return titled(title, table, "\n".join([caption, *summary.too_slow]))


def _device_table(summary: ComparisonSummary) -> RenderableType:
    numbers = ["busy predicted", "busy measured"]
    copied = any(use.copies_hidden is not None for use in summary.devices)
    if copied:
        numbers += ["sends hidden", "copies hidden"]
    table = new_table(("device", *numbers), numbers)
    for use in summary.devices:
        row = [use.predicted_busy, use.measured_busy]
        shares = [*row, use.sends_hidden, use.copies_hidden] if copied else row
        table.add_row(Text(use.device), *(Text("-" if share is None else f"{share:.1%}") for share in shares))
    title = "Devices: share of the time spent computing"
    return titled(title, table, "hidden: while the device computed" if copied else "")


def _link_table(summary: ComparisonSummary) -> RenderableType:
    numbers = ("bytes predicted", "bytes measured", "rate predicted", "rate measured")
    table = new_table(("link", *numbers), numbers)
    for use in summary.links:
        table.add_row(
            Text(f"{use.source} to {use.target}"),
            Text(f"{use.predicted_bytes:,}"),
            Text(f"{use.measured_bytes:,}"),
            Text(_rate(use.predicted_bytes_per_s)),
            Text(_rate(use.measured_bytes_per_s)),
        )
    return titled("Links: tensor bytes per step, and rate while sending", table)


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else format_bandwidth(bytes_per_s)


def _seconds(seconds: float) -> str:
    """Four digits, as errors of a percent are what this is read for."""
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


def bound_text(certificate: Certificate) -> str:
    if certificate.objective == "cost":
        return f"{1000 * certificate.lower_bound:.4g} per 1,000 steps"
    return format_duration(certificate.lower_bound)


def certificate_text(certificate: Certificate) -> str:
    """The proof, and of what the bound is."""
    return f"{proof_text(certificate)}. Bounded: {asked(certificate.question)}"


def asked(question: str) -> str:
    """A bound's question without an end that names the formula, as earlier versions had it."""
    return question.rpartition(", by the ")[0] or question


def proof_text(certificate: Certificate) -> str:
    """For a reader who knows no bounds."""
    costs = certificate.objective == "cost"
    whose = bounded_plans(certificate.question)
    if certificate.gap == 0:
        return f"No {whose} is {'cheaper' if costs else 'faster'}: this is proven"
    takes = certificate.lower_bound * (1 + certificate.gap)
    here = f"{1000 * takes:.4g}" if costs else format_duration(takes)
    more = f"{1 + certificate.gap:.1f} times" if certificate.gap >= 1 else f"{100 * certificate.gap:.1f} % more"
    can, this = ("cost less", "this one costs") if costs else ("be faster", "this one takes")
    return f"No {whose} can {can} than {bound_text(certificate)}; {this} {here} ({more})"


def verdict_table(verdict: Verdict, plan: Plan, source: str) -> RenderableType:
    """One row per field that differs, and what was done about the certificate."""
    words = "planner and notes are words, and were not judged"
    bound = [f"bound: {verdict.bound.text}"]
    if verdict.bound.status == "unchecked":
        bound.append("A bound that was not checked is no pass; --bound-unchecked passes it.")
    if plan.certificate is not None:
        proven = verdict.bound.status == "proven" and not verdict.differences
        bound.insert(0, f"{'' if proven else 'stated, not proven here: '}{certificate_text(plan.certificate)}")
    if not verdict.differences:
        return Text("\n".join([f"{source}: all {verdict.checked} figures hold ({words})", *bound]))
    table = new_table(("field", "document", "computed", "by"))
    for d in verdict.differences:
        table.add_row(*(Text(cell) for cell in (d.field, _shown(d.got), _shown(d.expected), d.by or "-")))
    title = f"{source}: {len(verdict.differences)} of {verdict.checked} figures do not hold"
    return titled(title, table, "\n".join([words, *bound]))


def _shown(figure: Figure) -> str:
    return f"{figure:.9g}" if isinstance(figure, float) else str(figure)


COLUMNS = ("stage", "device", "layers", "weights", "compute", "memory", "sends")
WIDE = 120
"""In a narrower window, weights, memory and the sizes of messages are left out: `isthmus plan --explain` says them."""
NEARLY_FULL = 0.9  # share of a device's memory, from which on it is red
LEFT_OUT = " is left out"  # planners' words for a device that a plan does not use


def plan_table(plan: Plan, fleet: Fleet, graph: OpGraph | None = None) -> RenderableType:
    """One row per stage and a few lines; `explain` says the rest. With its `graph`, operators are shown by module. A
    window of fewer than `WIDE` columns gets fewer of the table's, so that no cell is broken.

    UserError when the plan names a device that is not in the fleet.
    """
    modules = {op.name: op.module for op in graph.ops if op.module} if graph else {}
    return _PlanTable(plan_summary(plan, fleet), f"Plan for {plan.model} on fleet {plan.fleet}", modules)


class _PlanTable:
    def __init__(self, summary: PlanSummary, title: str, modules: dict[str, str]) -> None:
        self._summary, self._title, self._modules = summary, title, modules

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary, wide = self._summary, options.max_width >= WIDE
        left_out = set[str]() if wide else {"weights", "memory"}
        table = new_table((name for name in COLUMNS if name not in left_out), ("weights", "compute"))
        for column in table.columns:  # a narrow window shortens layers, and breaks no cell
            column.no_wrap = str(column.header) != "layers"
        for number, stage in enumerate(summary.stages):
            if number > 0 and stage.replica != summary.stages[number - 1].replica:
                table.add_section()
            cells = self._cells(stage, stage_number(number, summary), sizes=wide)
            table.add_row(*(cell for name, cell in zip(COLUMNS, cells, strict=True) if name not in left_out))
        many = "" if summary.micro_batches == 1 else "es"
        counts = f"{summary.micro_batches} micro-batch{many} of {summary.micro_batch_size}"
        yield titled(f"{self._title}: {counts}", table, "\n".join(_lines(summary)))

    def _cells(self, stage: StageSummary, number: str, *, sizes: bool) -> tuple[Text, ...]:
        first, last = (self._modules.get(op, op) for op in (stage.first_op, stage.last_op))
        sends = "\n".join(
            (f"{format_size(sent.size_bytes)} " if sizes else "")
            + f"to {sent.target}, {format_duration(sent.duration_s)}"
            for sent in stage.sends
        )
        again = " (F twice)" if stage.recompute else ""
        full = stage.memory_bytes > NEARLY_FULL * stage.memory_available_bytes
        memory = f"{format_size(stage.memory_bytes)} of {format_size(stage.memory_available_bytes)}"
        return (
            Text(number),
            Text(f"{stage.device} ({stage.region})"),
            Text(first if first == last else f"{first} .. {last}", no_wrap=True, overflow="ellipsis"),
            Text(format_size(stage.parameter_bytes)),
            Text(f"{format_duration(stage.forward_s + stage.backward_s)}{again}"),
            Text(memory, "red" if full else ""),
            Text(sends or "-"),
        )


def _limit(predicted: Prediction) -> str:
    """The averaging of replicas where it takes most of the step, else what sets the period of the slowest."""
    longest = predicted.sync_s > predicted.step_s / 2
    return f"averaging the replicas, {format_duration(predicted.sync_s)}" if longest else predicted.bottleneck


def _lines(plan: PlanSummary) -> list[str]:
    replicas = 1 + plan.stages[-1].replica
    lines = [
        "compute and sends: of one micro-batch",
        *(
            [f"{replicas} replicas of the whole model divide the batch; 1.0 is stage 0 of replica 1."]
            if replicas > 1
            else []
        ),
        f"One step should take {format_duration(plan.predicted.expected_s)}: {plan.samples_per_s:.4g} samples/s. "
        f"What limits it: {_limit(plan.predicted)}.",
    ]
    if plan.price_per_1000_steps:
        minimised = ", which was minimised" if plan.constraints.objective == "cost" else ""
        lines.append(f"Price of 1,000 steps: {plan.price_per_1000_steps:.4g}{minimised}.")
    if plan.constraints.memory_headroom:
        lines.append(f"Memory left free: at least {format_share(plan.constraints.memory_headroom)} of each device's.")
    if plan.certificate is not None:
        lines.append(f"{proof_text(plan.certificate)}.")
    left_out = [note.partition(LEFT_OUT)[0] for note in plan.notes if LEFT_OUT in note]
    if left_out:
        more = f" and {len(left_out) - MOST_NAMED:,} more" if len(left_out) > MOST_NAMED else ""
        lines.append(f"Not used: {', '.join(left_out[:MOST_NAMED])}{more}.")
    bounds_and_left_out = (ANY_PLAN, LEFT_OUT)
    return [*lines, *(note for note in noted(plan) if not any(said in note for said in bounds_and_left_out))]


MOST_NAMED = 12  # devices that are not used
NOT_IN_THE_SEARCH = (
    "data holders, labels stay: without yes, such a job is refused; price: without yes, time is minimised; "
    "compression: without yes, messages are packed once the plan is found; ?: not declared"
)


def fleets_table(fleets: Iterable[tuple[str, str]]) -> RenderableType:
    """From (name, description) pairs."""
    return names_table("Built-in fleets", "fleet", fleets)


def planners_table(
    title: str, planners: Iterable[tuple[str, str, tuple[str, ...] | None]], abilities: tuple[str, ...] = ()
) -> RenderableType:
    """From (name, description, abilities); with a column for each of `abilities`, "?" where they are not declared."""
    table = new_table(("planner", *(ability.replace(" ", "\n") for ability in abilities), "what it is"))
    table.columns[0].no_wrap = True
    for name, description, able in planners:
        cells = ["?" if able is None else "yes" if ability in able else "-" for ability in abilities]
        table.add_row(Text(name, "bold"), *map(Text, cells), Text(description))
    return titled(title, table, NOT_IN_THE_SEARCH if abilities else "")


def names_table(title: str, noun: str, pairs: Iterable[tuple[str, str]]) -> RenderableType:
    """From (name, description) pairs."""
    table = new_table((noun, "what it is"))
    table.columns[0].no_wrap = True
    for name, description in pairs:
        table.add_row(Text(name, "bold"), Text(description))
    return titled(title, table)


def matrix_table(fleet: Fleet) -> Table:
    """Latency and bandwidth from each device to each, and its speed."""
    names = fleet.names
    drawn = Table("from", *names, "speed", title="Latency, bandwidth")
    for device in fleet.devices:
        cells = ["" if n == device.name else _link_text(fleet.link(device.name, n)) for n in names]
        half = f", half {format_compute(device.half_flops_per_s)}" if device.half_flops_per_s else ""
        drawn.add_row(device.name, *cells, format_compute(device.sustained_flops_per_s) + half)
    return drawn


def device_text(device: Device) -> str:
    copies = f", {format_bandwidth(device.host_bytes_per_s)} to and from the host" if device.host_bytes_per_s else ""
    speeds = "".join(f", {m.what} {format_compute(m.flops_per_s)}" for m in device.measured)
    engine = "" if device.engine == "torch" else f" by {device.engine}"
    memory = f"{format_size(device.memory_bytes)} of memory"
    return f"{device.hardware or 'hardware unknown'}{engine}, {memory}{copies}{speeds}"


def _link_text(link: Link) -> str:
    return f"{format_duration(link.latency_s)}, {format_bandwidth(link.bandwidth_bytes_per_s)}"


def fitted_text(fleet: Fleet) -> str:
    """The speed of each device that differs from the fleet file."""
    text = ", ".join(
        f"{d.name} computes at {format_compute(d.sustained_flops_per_s)}, {100 * d.scale:.3g} % of what "
        "the fleet file says"
        for d in fleet.devices
        if d.scale != 1
    )
    return text or "all devices compute as stated"


def during(trace: Trace, periods: Sequence[PlanPeriod], number: int) -> Trace:
    """The part of the trace that belongs to a period: its steps, as often as they count. Steps that a later period
    repeats belong to the later period."""
    period = periods[number]
    end = min((later.first_step for later in periods[number + 1 :]), default=None)
    spans = tuple(
        span
        for span in trace.spans
        if span.step >= period.first_step and (end is None or span.step < end) and span.start_s >= period.since_s
    )
    return msgspec.structs.replace(trace, spans=spans, period=period.plan.period)


def compared_periods(predicted: Trace, measured: Trace, periods: Sequence[PlanPeriod]) -> tuple[PlanComparison, ...]:
    """A row for each plan under which a step was done. Periods of one plan in a row are one row, measured in the one
    with the most steps."""
    found: list[PlanComparison] = []
    numbered = itertools.groupby(range(len(periods)), key=lambda number: periods[number].plan)
    for plan, group in numbered:
        parts = [(during(measured, periods, n), during(predicted, periods, n)) for n in group]
        done = [part for part in parts if step_times(part[0]) and step_times(part[1])]
        if not done:
            continue
        real, simulated = max(done, key=lambda part: len(step_times(part[0])))
        steps = [step for part in done for step in step_times(part[0])]
        measured_s, predicted_s = steady_step_s(real), steady_step_s(simulated)
        found.append(
            PlanComparison(
                devices=plan.devices,
                first_step=min(steps) + 1,
                last_step=max(steps) + 1,
                measured_step_s=measured_s,
                predicted_step_s=predicted_s,
                error=prediction_error(predicted_s, measured_s),
                closed_form_step_s=plan.predicted.step_s,
            )
        )
    return tuple(found)


def last_period(measured: Trace, periods: Sequence[PlanPeriod]) -> int | None:
    """The number of the last period in which a step was done, if any was."""
    return next((n for n in reversed(range(len(periods))) if step_times(during(measured, periods, n))), None)


def run_summary(predicted: Trace, measured: Trace, periods: Sequence[PlanPeriod]) -> ComparisonSummary | None:
    """Compares prediction and measurement under the last plan that did a step, with a row per device; None if no step
    was done."""
    number = last_period(measured, periods)
    if number is None:
        return None
    parts = during(predicted, periods, number), during(measured, periods, number)
    summary = comparison_summary(*parts, periods[number].plan)
    return msgspec.structs.replace(summary, plans=compared_periods(predicted, measured, periods))


def memory_use(plan: Plan, peaks: Mapping[str, MemoryPeak]) -> tuple[DeviceMemoryUse, ...]:
    """Predicted and measured memory of each device of the plan that reported its peak."""
    found: dict[str, list[tuple[str, Stage]]] = {}
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(replica.workers):
            name = str(index) if len(plan.replicas) == 1 else f"{number}.{index}"
            found.setdefault(stage.device, []).append((name, stage))
    return tuple(
        DeviceMemoryUse(
            device=device,
            stages=tuple(name for name, _ in held),
            predicted_bytes=sum(stage.memory.total for _, stage in held),
            peak_bytes=peaks[device].size_bytes,
            reserved_bytes=peaks[device].reserved_bytes,
            resident=peaks[device].resident,
        )
        for device, held in found.items()
        if device in peaks
    )


def memory_table(uses: Sequence[DeviceMemoryUse]) -> RenderableType:
    """A row for each device: memory as predicted, and as its allocator counted it."""
    numbers = ("predicted", "peak", "more or less", "reserved")
    table = new_table(("device", "stages", *numbers), numbers)
    for use in uses:
        table.add_row(
            Text(use.device),
            Text(", ".join(use.stages)),
            Text(format_size(use.predicted_bytes)),
            Text(format_size(use.peak_bytes) + "*" * use.resident),
            f"{use.excess:+.1%}",
            "" if use.resident else format_size(use.reserved_bytes),
        )
    captions = ["peak: in tensors; reserved: taken of the accelerator by torch's allocator"]
    if any(use.resident for use in uses):
        captions = captions * any(not use.resident for use in uses) + [
            "* on the CPU, by how much the process's resident set grew, without code: buffers and fragments with it"
        ]
    return titled("Memory of the devices", table, "\n".join(captions))
