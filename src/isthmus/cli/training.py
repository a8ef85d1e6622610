"""`isthmus train`: plan, run, watch, compare, and leave a folder that explains it all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from isthmus.cli.folder import LossPoint, RunFolder
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.graph import encode
from isthmus.job import Job, Prepared, fleet_of, load_hook, prepare
from isthmus.plan import Plan, load_plan
from isthmus.planners import plan as make_plan
from isthmus.protocol import Item, RunSpec
from isthmus.report import Progress, comparison_summary, comparison_table, draw_loss, draw_timeline, plan_table
from isthmus.runtime.run import RunOptions, Watcher, check_outcome, run_spec
from isthmus.runtime.run import train as run_training
from isthmus.runtime.stages import stage_pairs
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import Span, Trace, busy_share, steady_step_s
from isthmus.units import format_duration

SIMULATED_STEPS = 8
HEADER_BYTES = 400
"""A frame's prefix and header, about: it matters on slow links with small tensors only."""


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line adds to the job."""

    resume: bool = False
    run: Path | None = None
    plan: Path | None = None
    json: bool = False


def plan_for(prepared: Prepared, fleet: Fleet, document: Path | None = None) -> Plan:
    """The given plan document, checked against the job, or a new plan."""
    if document is None:
        return make_plan(prepared.job.planner, prepared.problem(fleet))
    return read_plan(prepared.job, fleet, document)


def read_plan(job: Job, fleet: Fleet, document: Path) -> Plan:
    """A plan document; UserError when it was made for another batch or names a device that the fleet has not."""
    plan = load_plan(document)
    if (plan.micro_batches, plan.micro_batch_size) != (job.training.micro_batches, job.micro_batch_size):
        raise UserError(
            f"plan file {document}: made for {plan.micro_batches} micro-batches of {plan.micro_batch_size}, "
            f"the job has {job.training.micro_batches} of {job.micro_batch_size}"
        )
    for stage in plan.stages:
        fleet.device(stage.device)
    return plan


def plan_spec(job: Job) -> RunSpec:
    """The job's training steps alone: what a plan without its model can be simulated for."""
    t = job.training
    return RunSpec(steps=t.steps, micro_batches=t.micro_batches, micro_batch_size=job.micro_batch_size)


def simulation_options(prepared: Prepared, plan: Plan) -> SimulationOptions:
    """The simulator's view of the job."""
    pairs = stage_pairs(plan, prepared.captured, clips=prepared.job.training.clip_norm > 0)
    size = prepared.job.micro_batch_size
    edges: dict[tuple[int, int], int] = {}
    for pair in pairs:
        for crossing in pair.evaluation.sends:
            key = (crossing.source, crossing.target)
            edges[key] = edges.get(key, 0) + crossing.spec.nbytes(size)
    return SimulationOptions(
        clips=prepared.job.training.clip_norm > 0, counts=prepared.captured.train.count is not None,
        eval_edges=edges, header_bytes=HEADER_BYTES,
    )  # fmt: skip


def predict(prepared: Prepared, plan: Plan, fleet: Fleet, spec: RunSpec) -> Trace:
    """A few steps of the run on the virtual clock."""
    steps = min(spec.steps, spec.start_step + SIMULATED_STEPS)
    return simulate(plan, fleet, msgspec.structs.replace(spec, steps=steps), simulation_options(prepared, plan))


def print_simulation(console: Console, trace: Trace, plan: Plan) -> None:
    console.print(
        f"simulated step {format_duration(steady_step_s(trace))}, closed form "
        f"{format_duration(plan.predicted.step_s)}, Eq. 3 {format_duration(plan.predicted.eq3_step_s)}",
        highlight=False,
    )
    for device, share in busy_share(trace).items():
        console.print(f"  {device}: computing {share:.0%}", highlight=False, markup=False)


def train(job: Job, choices: Choices, out: Console) -> int:
    """The whole command; returns the exit code."""
    notes = Console(stderr=True)
    hooks = {k: load_hook(v) for k in ("step", "checkpoint", "finish") if (v := getattr(job.hooks, k))}
    folder = _folder(job, choices)
    notes.print(f"capturing {job.model.name} ...", highlight=False)
    prepared, fleet = prepare(job), fleet_of(job)
    spec = run_spec(prepared)
    plan = plan_for(prepared, fleet, choices.plan)
    predicted = predict(prepared, plan, fleet, spec)
    folder.write_inputs(job, fleet, plan)
    folder.graph.write_bytes(encode(prepared.captured.train))
    (notes if choices.json else out).print(plan_table(plan, fleet, prepared.captured.train))
    notes.print(f"run folder: {folder.path}", highlight=False)
    with Progress(notes, plan) as progress:
        watch = _Watch(prepared, folder, progress, hooks)
        options = RunOptions(emulate=job.runtime.emulate, resume=choices.resume)
        outcome = run_training(
            prepared, plan, fleet, folder.path, options, Watcher(advanced=watch.advanced, saved=watch.saved)
        )
    measured = Trace(source="runtime", run=folder.path.name, spans=outcome.spans)
    folder.write_traces(predicted, measured)
    if "finish" in hooks:
        hooks["finish"](folder.path, outcome.outcome)
    _report(folder, prepared, (predicted, measured), plan, choices, out)
    _warn_late(notes, outcome.late_s, measured)
    check_outcome(outcome)
    if outcome.outcome == "interrupted":
        notes.print(f"interrupted: saved in {folder.checkpoints}; go on with --resume", highlight=False)
        return 130
    return 0


def _folder(job: Job, choices: Choices) -> RunFolder:
    parent = Path(job.run_dir)
    if choices.run is not None:
        folder = RunFolder(choices.run)
        if choices.resume:
            return RunFolder.existing(choices.run)
        if folder.checkpoints.exists():
            raise UserError(f"--run {choices.run}: holds a run already; add --resume to go on with it")
        return folder
    return RunFolder.newest(parent, job.name) if choices.resume else RunFolder.fresh(parent, job.name)


class _Watch:
    """Turns what the conductor sees into progress, logs and hooks."""

    def __init__(
        self, prepared: Prepared, folder: RunFolder, progress: Progress, hooks: dict[str, Callable[..., object]]
    ) -> None:
        self._job = prepared.job
        self._eval_micro_batches = run_spec(prepared).eval_micro_batches
        self._folder = folder
        self._progress = progress
        self._hooks = hooks
        ids = prepared.columns.get("input_ids")
        self._tokens = ids.shape[0] if ids is not None and ids.shape else 0
        self._clock_s = time.monotonic()
        self._heldout: dict[int, list[tuple[float, int]]] = {}
        self._rewound = False

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if not self._rewound:
            self._folder.rewind(item.step)
            self._rewound = True
        if item.kind == "train":
            self._trained(item, loss, spans)
        elif item.kind == "eval" and loss is not None:
            self._evaluated(item, loss)

    def _trained(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        now_s = time.monotonic()
        elapsed_s, self._clock_s = max(1e-9, now_s - self._clock_s), now_s
        done, t = item.step + 1, self._job.training
        if loss is not None:
            self._folder.log(LossPoint(step=done, loss=loss))
        busy: dict[str, float] = {}
        sent: dict[tuple[str, str], int] = {}
        for span in spans:
            if span.step != item.step:
                continue
            if span.track == "compute":
                busy[span.device] = busy.get(span.device, 0.0) + (span.end_s - span.start_s) / elapsed_s
            elif span.track == "send":
                sent[span.device, span.other] = sent.get((span.device, span.other), 0) + span.size_bytes
        rate = t.batch_size / elapsed_s
        self._progress.step(
            done, t.steps, loss, busy={k: min(1.0, v) for k, v in busy.items()}, link_bytes=sent,
            tokens_per_s=rate * self._tokens if self._tokens else None,
            samples_per_s=None if self._tokens else rate,
        )  # fmt: skip
        if "step" in self._hooks:
            self._hooks["step"](done, loss)

    def _evaluated(self, item: Item, loss: float) -> None:
        """An evaluation comes in several items; its loss is their mean by micro-batches."""
        parts = self._heldout.setdefault(item.step, [])
        parts.append((loss, item.micro_batches))
        total = sum(n for _, n in parts)
        mean = sum(x * n for x, n in parts) / total
        if total == self._eval_micro_batches:
            self._folder.log(LossPoint(step=item.step, loss=mean, split="heldout"))
            self._progress.validation(item.step, mean)

    def saved(self, step: int, directory: Path) -> None:
        self._progress.note(f"checkpoint of step {step}: {directory}")
        if "checkpoint" in self._hooks:
            self._hooks["checkpoint"](step, directory)


def _report(
    folder: RunFolder, prepared: Prepared, traces: tuple[Trace, Trace], plan: Plan, choices: Choices, out: Console
) -> None:
    predicted, measured = traces
    points = folder.losses()
    train_points = [(p.step, p.loss) for p in points if p.split == "train"]
    heldout = [(p.step, p.loss) for p in points if p.split == "heldout"]
    if train_points or heldout:
        draw_loss(train_points, heldout, folder.loss_picture, unit=_unit(prepared))
    if not any(s.name == "update" for s in measured.spans):
        return
    draw_timeline(predicted, measured, folder.timeline)
    summary = comparison_summary(predicted, measured, plan)
    folder.summary.write_bytes(summary.as_json())
    if choices.json:
        told = {
            "run": str(folder.path), "loss": train_points[-1][1] if train_points else None,
            "heldout_loss": heldout[-1][1] if heldout else None, "comparison": msgspec.to_builtins(summary),
        }  # fmt: skip
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
        return
    out.print(comparison_table(predicted, measured, plan))
    if heldout:
        out.print(f"held-out loss {heldout[-1][1]:.4f} {_unit(prepared)} after {heldout[-1][0]} steps", highlight=False)
    out.print(f"run folder: {folder.path}", highlight=False)


def _unit(prepared: Prepared) -> str:
    if "input_ids" not in prepared.columns or not prepared.columns["labels"].shape:
        return "nats per sample"
    return "nats per byte" if prepared.job.data.options.get("tokenizer", "bytes") == "bytes" else "nats per token"


def _warn_late(notes: Console, late_s: Mapping[str, float], measured: Trace) -> None:
    """Emulation is honest only while the host computes faster than the devices that it plays."""
    total = max((s.end_s for s in measured.spans), default=0.0)
    for device, late in late_s.items():
        if total and late / total > 0.02:
            notes.print(
                f"warning: this host could not keep up with emulated device {device}: its tasklets overran by "
                f"{format_duration(late)} of {format_duration(total)}; use slower devices or fewer of them",
                highlight=False,
            )
