"""A plan for a first look: which device has which layers, how long a step takes, how good the plan is. Nothing is
printed here: the caller has the console."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.plans import ANY_PLAN, Plan, Prediction
from isthmus.report.summary import PlanSummary, StageSummary, plan_summary
from isthmus.report.tables import new_table, noted, proof_text, stage_number, titled
from isthmus.units import format_duration, format_size

COLUMNS = ("stage", "device", "layers", "weights", "compute", "memory", "sends")
WIDE = 120
"""In a narrower window, weights, memory and the sizes of messages are left out: `isthmus plan --explain` has them."""
LEFT_OUT = " is left out"  # planners' words for a device that a plan does not use


def plan_overview(plan: Plan, fleet: Fleet, graph: OpGraph | None = None) -> RenderableType:
    """One row per stage and a few lines; `plan_table` has the rest. With its `graph`, operators are shown by module.
    A window of fewer than `WIDE` columns gets fewer of the table's, so that no cell is broken.

    UserError when the plan names a device that is not in the fleet.
    """
    modules = {op.name: op.module for op in graph.ops if op.module} if graph else {}
    return _Overview(plan_summary(plan, fleet), f"Plan for {plan.model} on fleet {plan.fleet}", modules)


class _Overview:
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
        return (
            Text(number),
            Text(f"{stage.device} ({stage.region})"),
            Text(first if first == last else f"{first} .. {last}", no_wrap=True, overflow="ellipsis"),
            Text(format_size(stage.parameter_bytes)),
            Text(format_duration(stage.forward_s + stage.backward_s)),
            Text(f"{format_size(stage.memory_bytes)} of {format_size(stage.memory_available_bytes)}"),
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
        lines.append(f"Price of 1,000 steps: {plan.price_per_1000_steps:.4g}.")
    if plan.certificate is not None:
        lines.append(f"{proof_text(plan.certificate)}.")
    left_out = [note.partition(LEFT_OUT)[0] for note in plan.notes if LEFT_OUT in note]
    if left_out:
        lines.append(f"Not used: {', '.join(left_out)}.")
    bounds_and_left_out = (ANY_PLAN, LEFT_OUT)
    return [*lines, *(note for note in noted(plan) if not any(said in note for said in bounds_and_left_out))]
