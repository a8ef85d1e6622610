"""A plan for a first look: which device has which layers, how long a step takes, how good the plan is. Nothing is
printed here: the caller has the console."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.plans import ANY_PLAN, Plan
from isthmus.report.certificates import proof_text
from isthmus.report.summary import PlanSummary, StageSummary, plan_summary
from isthmus.report.tables import new_table, noted, stage_number, titled
from isthmus.units import format_duration, format_size

LEFT_OUT = " is left out"
"""What planners say of a device that a plan does not use."""


def plan_overview(plan: Plan, fleet: Fleet, graph: OpGraph | None = None) -> RenderableType:
    """One row per stage and a few lines; `plan_table` has the rest. With its `graph`, operators are shown by module.

    UserError when the plan names a device that is not in the fleet.
    """
    summary = plan_summary(plan, fleet)
    modules = {op.name: op.module for op in graph.ops if op.module} if graph else {}
    table = new_table(("stage", "device", "layers", "weights", "compute", "memory", "sends"), ("weights", "compute"))
    for number, stage in enumerate(summary.stages):
        if number > 0 and stage.replica != summary.stages[number - 1].replica:
            table.add_section()
        table.add_row(*_cells(stage, stage_number(number, summary), modules))
    counts = f"{plan.micro_batches} micro-batches of {plan.micro_batch_size}"
    return titled(f"Plan for {plan.model} on fleet {plan.fleet}: {counts}", table, "\n".join(_lines(summary)))


def _cells(stage: StageSummary, number: str, modules: dict[str, str]) -> tuple[Text, ...]:
    first, last = (modules.get(op, op) for op in (stage.first_op, stage.last_op))
    sends = "\n".join(
        f"{format_size(sent.size_bytes)} to {sent.target}, {format_duration(sent.duration_s)}" for sent in stage.sends
    )
    return (
        Text(number),
        Text(f"{stage.device} ({stage.region})"),
        Text(first if first == last else f"{first} .. {last}"),
        Text(format_size(stage.parameter_bytes)),
        Text(format_duration(stage.forward_s + stage.backward_s)),
        Text(f"{format_size(stage.memory_bytes)} of {format_size(stage.memory_available_bytes)}"),
        Text(sends or "-"),
    )


def _lines(plan: PlanSummary) -> list[str]:
    lines = [
        "compute and sends: of one micro-batch",
        f"One step should take {format_duration(plan.predicted.step_s)}: {plan.samples_per_s:.4g} samples/s. "
        f"What limits it: {plan.predicted.bottleneck}.",
    ]
    if plan.price_per_1000_steps:
        lines.append(f"Price of 1,000 steps: {plan.price_per_1000_steps:.4g}.")
    if plan.certificate is not None:
        lines.append(f"{proof_text(plan.certificate)}.")
    left_out = [note.partition(LEFT_OUT)[0] for note in plan.notes if LEFT_OUT in note]
    if left_out:
        lines.append(f"Not used: {', '.join(left_out)}.")
    bounds_and_left_out = (ANY_PLAN, LEFT_OUT)
    return [*lines, *(note for note in noted(plan) if not any(said in note for said in bounds_and_left_out))]
