"""The program of replicas that never wait: its runs, its plans, and its simulation: how fast the replicas are together,
and what faults cost.

`[sync] period = "auto"`: how often decoupled replicas merge, from how fast their steps and links are.

Replicas that make s samples per second together need P * batch / s seconds for the P batches of a period. In it each
sends its change of every fragment once, and receives what was merged of every one. The period is the least P with

    bytes of either way / bandwidth  <=  LINK_SHARE * P * batch / s        of every replica's link

and with no contribution too late for its merge, in a simulation of some merges without faults. Where every period has
late ones, as a device has that is very slow beside the others, links alone decide: what is late counts in the next
merge.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from isthmus.api.folder import RunFolder
from isthmus.api.forecast import Forecast, Simulating, StruckRun
from isthmus.api.make_plan import plan_for, predict, steady_on
from isthmus.api.observer import Observer
from isthmus.api.pipeline import Pipeline, places_of, plan_again, start_of
from isthmus.api.run import Traced, draw_metrics, trace_sessions
from isthmus.api.run_session import Choices, run_started
from isthmus.api.watch import Ran, Watch
from isthmus.callbacks import Evaluated, StepDone
from isthmus.combinations import refused
from isthmus.cost import PlanLayout, Price, build_replicas, is_priced, step_price
from isthmus.cost.price import GB, SECONDS_PER_HOUR
from isthmus.data import Dataset, load_dataset
from isthmus.errors import Diverged, UserError
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.graph.metrics import Metrics
from isthmus.job import Job, Prepared, constraints_of, fleet_of, prepare
from isthmus.plans import Plan
from isthmus.protocol.decoupled_events import MergeChanges, StepsMade
from isthmus.report.comparison import codecs_of
from isthmus.report.rounds_table import replicas_traced
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.coordinator.data_holders import DataHolders, agreed, unchanged
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.decoupled.merged_run import (
    DecoupledOutcome,
    MergedRun,
    MergeLine,
    evaluated,
    merge_rules,
    merged_fragments,
    merges_file,
    pipeline_prepared,
    replica_groups,
)
from isthmus.runtime.decoupled.merger import MergerWatch
from isthmus.runtime.decoupled.run import DecoupledRun, Replicas, check_decoupled, links_of
from isthmus.runtime.processes.signals import Stop
from isthmus.simulator import Fault
from isthmus.simulator.merging import (
    FragmentBytes,
    MergingSimulation,
    Planned,
    PlannedStep,
    ReplicaModel,
    SimulatedReplicas,
)
from isthmus.simulator.run import check_faults
from isthmus.trace import Span, Trace, steady_step_s
from isthmus.training.checkpoint import CheckpointWriter, read_manifest
from isthmus.training.decoupled import MergedFragments, change_codec, delta_codec
from isthmus.units import format_bandwidth, format_count, format_duration, format_share, format_size

PLANNING_S = 2.0
"""From the loss of a pipeline's device until there is a plan for the others, and their processes are connected: as
benchmarks/everything measured it."""


def replica_models(prepared: Prepared, fleet: Fleet, plans: Mapping[str, Plan]) -> list[ReplicaModel]:
    """The times of the fleet's replicas. `plans` are their first ones."""
    job = prepared.job
    groups = replica_groups(job, fleet)
    planned = {name: _planned_steps(prepared, fleet, plans[name], name) for name in groups if len(groups[name]) > 1}
    step_s = {name: plan.predicted.expected_s for name, plan in plans.items()}
    for name, make in planned.items():
        if (step := make(frozenset(groups[name]))) is not None:
            step_s[name] = step.step_s
    samples = job.training.batch_size // len(groups)
    return [
        ReplicaModel(
            name=name,
            step_s=step_s[name],
            samples=samples,
            up=up,
            down=down,
            devices=groups[name],
            planned=planned.get(name),
        )
        for name, (up, down) in links_of(groups, fleet).items()
    ]


def _planned_steps(prepared: Prepared, fleet: Fleet, first: Plan, name: str) -> Planned:
    """Return the steps of a replica that is a pipeline: as it would plan on the devices that are there."""
    groups = replica_groups(prepared.job, fleet)
    own = pipeline_prepared(prepared, groups, name)
    known = {frozenset(groups[name]): first}

    @functools.cache
    def planned(present: frozenset[str]) -> PlannedStep | None:
        left = fleet.subset([name for name in fleet.names if name in present]) if present else None
        try:
            plan = None if left is None else known.get(present) or plan_for(own, left, proving=None)
        except UserError:  # of too little memory, for example
            return None
        if plan is None or left is None:
            return None
        spec = run_spec(own)
        trace = predict(own, plan, left, spec)
        steps = len({span.step for span in trace.spans if span.name == "update"})
        busy_s = dict.fromkeys(plan.used, 0.0)
        for span in trace.spans:
            busy_s[span.device] += (span.end_s - span.start_s) / steps if span.track == "compute" else 0.0
        stages = StageAssignments(own, plan, left)
        begin_s = PLANNING_S + stages.whole_s
        links = frozenset(frozenset((span.device, span.other)) for span in trace.spans if span.track == "send")
        return PlannedStep(steady_step_s(trace, undisturbed=True), busy_s, begin_s, stages.layout.keep_every, links)

    return planned


def fragment_bytes(job: Job, merged: MergedFragments) -> FragmentBytes:
    elements, floats = [values.numel() for values in merged.known], torch.float32
    return FragmentBytes(
        delta=tuple(delta_codec(job.sync.decoupled).wire_bytes(n, floats) for n in elements),
        change=tuple(change_codec(job.sync.decoupled).wire_bytes(n, floats) for n in elements),
        whole=tuple(n * floats.itemsize for n in elements),
    )


LINK_SHARE = 0.5
"""Share of a link's time that changes may take: the rest is for late ones, and for messages of pipelines."""
SIMULATED_MERGES = 40  # merges that are simulated of each period that is tried


class _Load(NamedTuple):
    link_s: float
    bytes_per_s: float
    size_bytes: int
    name: str

    def text(self, period_s: float) -> str:
        return (
            f"the link of {self.name}, {format_bandwidth(self.bytes_per_s)}, carries {format_size(self.size_bytes)} "
            f"in {format_duration(self.link_s)} of {format_duration(period_s)}"
        )


def with_period(job: Job, models: Sequence[ReplicaModel], sizes: FragmentBytes) -> tuple[Job, str]:
    """The job with its period as a number, and why it is that; the job as it is, and nothing, where it is one already.
    UserError where no period of the run is long enough for the links."""
    if job.sync.period != "auto":
        return job, ""
    training = job.training
    batch_s = batch_seconds(job, models)
    slowest = max(_loads(models, sizes), default=None)
    least = 1 if slowest is None else max(1, math.ceil(slowest.link_s / (LINK_SHARE * batch_s)))
    if slowest is not None and least > training.steps:
        raise UserError(
            f"sync.period: got 'auto', expected faster links or a longer run: {slowest.text(training.steps * batch_s)} "
            f"that the run takes, expected {format_share(LINK_SHARE)} at most"
        )
    period, late = _in_time(lambda p: late_of(job, p, models, sizes), least, training.steps)
    reasons = [slowest.text(period * batch_s)] if slowest is not None else []
    if late:
        reasons.append(
            f"with {late.period}, {late.contributions} contributions to {SIMULATED_MERGES} merges would be too late"
        )
    return _planned(job, period), f"period {period}: {'; '.join(reasons) or 'no link is in use'}"


def busiest_link(job: Job, models: Sequence[ReplicaModel], sizes: FragmentBytes) -> str:
    """Return what the slowest link of a replica carries in a period, in words; nothing where no link is in use."""
    loads = max(_loads(models, sizes), default=None)
    return "" if loads is None else loads.text(job.sync.every * batch_seconds(job, models))


def batch_seconds(job: Job, models: Sequence[ReplicaModel]) -> float:
    """Return the time in which all replicas together train on a batch."""
    return job.training.batch_size / sum(model.samples / model.step_s for model in models)


class _Late(NamedTuple):
    period: int
    contributions: int


def _in_time(late: Callable[[int], int], least: int, most: int) -> tuple[int, _Late | None]:
    """A period from `least` to `most` with no late contribution, and the one before, which has some; `least` where it
    has none, or where none of those that were tried is without."""
    if not (count := late(least)):
        return least, None
    below, high = _Late(least, count), least
    while count:
        if high == most:
            return least, _Late(least, late(least))
        high = min(2 * high, most)
        count = late(high)
        below = _Late(high, count) if count else below
    while high - below.period > 1:
        middle = (below.period + high) // 2
        if count := late(middle):
            below = _Late(middle, count)
        else:
            high = middle
    return high, below


def late_of(job: Job, period: int, models: Sequence[ReplicaModel], sizes: FragmentBytes) -> int:
    """Contributions that come after their merge has ended, with this period and without faults."""
    rules = merge_rules(_planned(job, period))
    some = msgspec.structs.replace(rules, samples=math.ceil(SIMULATED_MERGES * rules.merge_every))
    return MergingSimulation(some, models, sizes).run().late


def _planned(job: Job, period: int) -> Job:
    return msgspec.structs.replace(job, sync=msgspec.structs.replace(job.sync, period=period))


def _loads(models: Sequence[ReplicaModel], sizes: FragmentBytes) -> Iterator[_Load]:
    for model in models:
        for link, size_bytes in ((model.up, sum(sizes.delta)), (model.down, sum(sizes.change))):
            if link is not None:
                seconds = size_bytes / link.bandwidth_bytes_per_s
                yield _Load(seconds, link.bandwidth_bytes_per_s, size_bytes, model.name)


class Decoupled(Pipeline):
    """A job of replicas that never wait as its program."""

    def check(self, *, on_fleet: bool, plan: Path | None = None) -> None:
        if plan is not None:
            raise refused("a plan document", "decoupled", "one")
        check_decoupled(self.job, fleet_of(self.job))

    def run(self, choices: Choices, watch: Watch, stop: Stop) -> Ran | None:
        """Run until all samples are merged, or it is to stop: then what replicas have is merged and saved. Replicas are
        processes here, or devices of a backend. None where nothing is left to do."""
        job = self.job
        start = start_of(job, choices, watch)
        if start is None:
            return None
        fleet, observer = fleet_of(job), watch.observer
        backend = choices.backend or LocalBackend(places=places_of(job))
        reading = constraints_of(job, fleet).data_holders or fleet.names
        holders = DataHolders(backend.asks(stop), job.used_data, reading, heldout=job.evaluates, note=observer.note)
        holders.ask()
        observer.note(f"capturing {job.model.name} ...")
        prepared = prepare(job, agreed(holders.described), least=len(replica_groups(job, fleet)))
        if start.checkpoint is not None:
            unchanged(read_manifest(start.checkpoint).data, holders.digests)
        prepared = msgspec.structs.replace(prepared, computes=backend.computes)
        replicas = Replicas(
            prepared=prepared,
            fleet=fleet,
            plans=replica_plans(prepared, fleet),
            backend=backend,
            holders=holders,
            replan=lambda own, left: plan_again(own, backend, holders, left),
            steady_s=steady_on,
        )
        return _watched(replicas, DecoupledRun(replicas, watch.folder.path, start.checkpoint), watch, stop)

    def simulated(self, how: Simulating, observer: Observer, stop: Stop) -> Forecast:
        if how.given:
            raise refused("options of a simulation", "decoupled", how.given[0])
        return simulate_decoupled(self.job, how.faults)

    def rehearsed(self, observer: Observer, stop: Stop) -> Forecast | None:
        return self.simulated(Simulating(), observer, stop)

    def traced(self, folder: RunFolder) -> Traced:
        return trace_sessions(folder, lambda session: replicas_traced(session.measured()))


def _watched(replicas: Replicas, run: DecoupledRun, watch: Watch, stop: Stop) -> Ran:
    prepared, fleet, plans, observer = replicas.prepared, replicas.fleet, replicas.plans, watch.observer
    job, seen = prepared.job, _Watch(prepared.job, run, watch)
    seen.start(fleet, stop)
    observer.note(f"run folder: {watch.folder.path}")
    for name, plan in plans.items():
        observer.note(step_text(name, plan, plan.predicted.expected_s))
    models = replica_models(prepared, fleet, plans) if job.sync.period == "auto" else []
    planned, period_note = with_period(job, models, fragment_bytes(job, run.merged))
    if period_note:
        every = merge_rules(planned).merge_every
        run.machine.rules = msgspec.structs.replace(run.machine.rules, merge_every=every)
        observer.note(period_note)
    observer.began(f"{job.model.name} on {fleet.name}, {len(plans)} replicas")
    return seen.end(run.run(seen.merger, stop), run.emulated_s)


def replica_plans(prepared: Prepared, fleet: Fleet) -> dict[str, Plan]:
    """Return the plan of each replica's step: for one device the only one, for several the planner's. UserError for
    replicas that cannot hold the model."""
    job, groups = prepared.job, replica_groups(prepared.job, fleet)
    samples = job.training.batch_size // len(groups)
    if samples % job.micro_batch_size:
        raise UserError(
            f"training.micro_batches: got {job.micro_batches} with {len(groups)} replicas of {samples} "
            f"samples a step, expected a multiple of {len(groups)}"
        )
    found: dict[str, Plan] = {}
    for name, devices in groups.items():
        own, here = pipeline_prepared(prepared, groups, name), fleet.subset(devices)
        if len(devices) > 1:
            found[name] = plan_for(own, here)
        else:
            layout = PlanLayout(devices, (), own.job.micro_batches)
            found[name] = build_replicas(own.problem(here), [layout], planner="decoupled")
    return found


def step_times(prepared: Prepared, fleet: Fleet) -> dict[str, float]:
    """Return the seconds of each replica's step. UserError as of `replica_plans`."""
    return {name: plan.predicted.expected_s for name, plan in replica_plans(prepared, fleet).items()}


def step_text(name: str, plan: Plan, step_s: float) -> str:
    """A replica's step, in words: its samples and its time, and of a pipeline its devices and codecs."""
    text = f"{name}: {plan.micro_batches * plan.micro_batch_size} samples in {format_duration(step_s)}"
    if list(plan.used) == [name]:
        return text
    codecs = ", ".join(sorted({codec for replica in plan.replicas for codec in codecs_of(replica)}))
    return f"{text} over {', '.join(plan.used)}, {f'packed by {codecs}' if codecs else 'nothing packed'}"


NOT_FINITE = "the merged weights are not finite: lower optimizer.lr or sync.decoupled.rate"
OVERRUN = 1.25  # times an emulated step's time: a longer step is worth a warning


def overruns(ended_s: Mapping[str, Sequence[float]], step_s: Mapping[str, float]) -> list[str]:
    """A line for each emulated replica half of whose steps took longer than they should. `ended_s` is when its steps
    ended, seconds. Replicas of other speeds learn something else from the same samples."""
    found: list[str] = []
    for name, emulated_s in step_s.items():
        took_s = [end - begin for begin, end in pairwise(ended_s.get(name, ()))]
        if took_s and (half_s := statistics.median(took_s)) > OVERRUN * emulated_s:
            found.append(
                f"warning: this computer is too slow to emulate {name}: half of its steps took "
                f"{format_duration(half_s)} or more, not {format_duration(emulated_s)}; use fewer or slower devices"
            )
    return found


def _merges(merges: int, late: int) -> str:
    came = f"{format_count(late, 'contribution')} came too late, and counted in a later one"
    return f"{format_count(merges, 'merge')}; {came}"


def _heldout(job: Job) -> Dataset:
    """The merger measures the held-out loss: it has the whole model."""
    try:
        return load_dataset(job.data, "heldout")
    except UserError as e:
        raise UserError(f"training.eval_every: got {job.training.eval_every}, and no held-out data here: {e}") from e


class _Watch:
    """Turns what the merger sees into lines of files, events for who observes it, and calls of the job's callbacks."""

    def __init__(self, job: Job, run: MergedRun, watch: Watch) -> None:
        self._job, self._run, self._watch, self._folder = job, run, watch, watch.folder
        self._writer = CheckpointWriter(self._folder.checkpoints, keep=job.training.keep_checkpoints)
        self._merges = merges_file(self._folder.path)
        self._heldout = _heldout(job) if job.evaluates else None
        self._metrics = Metrics(job.metrics)
        self._step = self._evaluated = self._saved = run.step
        self._losses: list[float] = []
        self._ended_s: defaultdict[str, list[float]] = defaultdict(list)  # seconds at which each replica's steps ended
        self.merger = MergerWatch(stepped=self._stepped, merged=self._merged, note=self._watch.noted)
        self._spans: deque[Span] = deque()  # spans that are not written yet, which threads of links add to
        run.machine.trace.add = self._spans.append

    def start(self, fleet: Fleet, stop: Stop) -> None:
        begun = self._run.machine.begun
        self._folder.begin(self._job, fleet, None, self._step, self._watch.observer.note)
        self._merges.keep_if(lambda line: line.merge.merge <= begun.merge)
        self._watch.began(run_started(self._job, self._folder.path, self._step, stop.request))

    def _stepped(self, replica: str, made: StepsMade, samples: int, seconds: float) -> None:
        self._ended_s[replica].append(seconds)
        self._losses.append(math.nan if made.loss is None else made.loss)
        if (step := self._run.step) == self._step:
            return
        loss = sum(self._losses) / len(self._losses)
        self._step, self._losses = step, []
        machine = self._run.machine
        done = StepDone(
            step=step,
            steps=self._job.training.steps,
            loss=loss,
            samples_per_s=(samples - machine.begun.samples) / seconds,
            merges=machine.merge,
            late=machine.late,
        )
        self._watch.stepped(done, self._new_spans())

    def _new_spans(self) -> list[Span]:
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def _merged(self, merge: MergeChanges, seconds: float) -> None:
        self._merges.add(MergeLine(seconds=seconds, merge=merge))
        training, step = self._job.training, self._run.step
        if step == training.steps:  # the merge that ends the run comes after it: `end` evaluates and saves that
            return
        if self._heldout is not None and step // training.eval_every > self._evaluated // training.eval_every:
            self._evaluate(step, self._heldout)
        if training.save_every and step // training.save_every > self._saved // training.save_every:
            self._save()

    def _save(self) -> bool:
        """Return whether the weights are finite."""
        directory, finite = self._run.save(self._writer)
        self._saved = self._run.step
        self._watch.saved(self._saved, directory)
        return finite

    def _evaluate(self, step: int, heldout: Dataset) -> None:
        self._evaluated = step
        training = self._job.training
        self._run.fill()
        most, size = training.eval_samples, training.batch_size
        loss, metrics = evaluated(self._run.model, heldout, most, size, self._metrics)
        self._watch.evaluated(Evaluated(step=step, loss=loss, metrics=metrics))

    def end(self, outcome: DecoupledOutcome, emulated_s: Mapping[str, float]) -> Ran:
        """Save the merged model, and say what it took."""
        training, step = self._job.training, self._run.step
        if self._heldout is not None and step:
            self._evaluate(step, self._heldout)
        finite = self._save()
        traffic = outcome.traffic
        changes_bytes = traffic.received_bytes + traffic.sent_bytes
        more = outcome.samples - training.steps * training.batch_size
        over = f", {more:,} more than asked: replicas train on until the last merge" if more > 0 else ""
        since = outcome.samples - self._run.machine.begun.samples
        self._watch.noted(f"{since:,} samples in {format_duration(outcome.seconds)}{over}")
        self._watch.noted(_merges(outcome.merges, outcome.late))
        self._watch.noted(
            f"changes: {format_size(traffic.received_bytes)} received, {format_size(traffic.sent_bytes)} sent, "
            f"{traffic.plain_bytes / max(1, changes_bytes):.1f} times fewer than as float32; "
            f"{format_size(traffic.whole_bytes)} of whole fragments sent"
        )
        for text in overruns(self._ended_s, emulated_s):
            self._watch.noted(text)
        self._watch.log.measured(self._new_spans())
        self._folder.keep_spans()
        if not finite:
            return Ran("diverged", NOT_FINITE, Diverged(NOT_FINITE))
        return Ran(outcome.finish.outcome, outcome.finish.reason, explain=lambda: draw_metrics(self._folder))


class DecoupledForecast(StruckRun, frozen=True, kw_only=True):
    """A simulated run beside its devices that are never disturbed."""

    run: SimulatedReplicas
    full_speed: float  # samples per second of all devices, none of which ever waits or fails
    plans: Mapping[str, Plan]  # the first plan of each replica
    step_s: Mapping[str, float]  # seconds of each replica's step on that plan, as simulated
    period: int  # batches in which every fragment is merged once
    note: str  # why, where that was planned; else empty

    def notes(self) -> Iterable[tuple[float, str]]:
        return self.run.notes

    @property
    def goodput(self) -> float:
        """Samples per second whose steps are in the result, over the full speed."""
        return self.run.useful_samples / (self.run.seconds * self.full_speed) if self.run.seconds else 0.0

    @property
    def trace(self) -> Trace:
        return Trace(source="simulator", run="decoupled", spans=tuple(self.run.spans))

    @property
    def steps(self) -> dict[str, int]:
        return dict(sorted(Counter(name for _, name, _ in self.run.steps).items()))

    def lines(self) -> list[str]:
        run = self.run
        steps = ", ".join(f"{name} {count}" for name, count in self.steps.items())
        return [
            *(step_text(name, plan, self.step_s[name]) for name, plan in self.plans.items()),
            *([self.note] if self.note else []),
            *self.struck_lines(),
            f"steps: {steps}",
            _merges(len(run.merges), run.late),
            f"devices computed {100 * run.used:.1f} % of the time that they were there",
            f"{run.useful_samples:,.0f} samples merged, {100 * self.goodput:.1f} % of what is possible without faults",
            self.concluded(format_duration(run.seconds)),
        ]

    def summary(self) -> dict[str, object]:
        run = self.run
        return self.ended() | {
            "goodput": self.goodput,
            "used": run.used,
            "useful_samples": run.useful_samples,
            "replicas": {
                name: {"devices": list(plan.used), "step_s": self.step_s[name]} for name, plan in self.plans.items()
            },
            "steps": self.steps,
            "period": self.period,
            "merges": len(run.merges),
            "late_contributions": run.late,
        }


class PlannedReplicas(NamedTuple):
    job: Job  # with its period, where that was planned
    fleet: Fleet
    graph: OpGraph
    plans: Mapping[str, Plan]
    models: Sequence[ReplicaModel]
    sizes: FragmentBytes
    note: str  # why the period is as it is, where that was planned; else empty

    def summary(self) -> dict[str, object]:
        """Return the summary as JSON has it: the plan documents by replica."""
        found: dict[str, object] = {"period": self.job.sync.every, "samples_per_s": self.samples_per_s}
        priced = {"price_per_1000_batches": 1000 * self.price.total} if is_priced(self.fleet) else {}
        return {**found, **priced, "replicas": self.plans}

    @property
    def samples_per_s(self) -> float:
        """The speed of all replicas together, none of which ever waits."""
        return self.job.training.batch_size / batch_seconds(self.job, self.models)

    @property
    def price(self) -> Price:
        """The price of a batch: the devices of all replicas, and the bytes that leave priced regions."""
        batch_s, egress = batch_seconds(self.job, self.models), 0.0
        devices = [name for plan in self.plans.values() for name in plan.used]
        merger = self.fleet.device(self.fleet.names[0]).region
        for model in self.models:
            plan = self.plans[model.name]
            egress += batch_s / model.step_s * step_price(plan, self.fleet).egress
            region = self.fleet.device((model.devices or (model.name,))[0]).region
            for source, carried in ((region, self.sizes.delta), (merger, self.sizes.change)):
                per_gb = self.fleet.region_info_of(source).egress_price_per_gb if region != merger else 0.0
                egress += per_gb * sum(carried) / GB / self.job.sync.every
        per_hour = sum(self.fleet.device(name).price_per_hour for name in devices)
        return Price(devices=batch_s / SECONDS_PER_HOUR * per_hour, egress=egress)

    def lines(self) -> list[str]:
        """Return how fast they are together, when they merge, and what that costs, in words."""
        fragments, every = self.job.sync.decoupled.fragments, self.job.sync.every
        what = "The weights are" if fragments == 1 else f"Each of {fragments} fragments of the weights is"
        batch_s, link = batch_seconds(self.job, self.models), busiest_link(self.job, self.models, self.sizes)
        price = self.price
        found = [
            f"All replicas together: {self.samples_per_s:.4g} samples/s, a batch in {format_duration(batch_s)}.",
            self.note or f"{what} merged once in {every} batches of all replicas.",
        ]
        if link and not self.note:
            found.append(f"Busiest link: {link}.")
        if is_priced(self.fleet):
            found.append(
                f"1,000 batches cost {1000 * price.total:.4g} in the fleet's unit: {1000 * price.devices:.4g} for "
                f"devices, {1000 * price.egress:.4g} for bytes that leave priced sites."
            )
        return found

    def devices(self, replica: str) -> Fleet:
        return self.fleet.subset(replica_groups(self.job, self.fleet)[replica])


def plan_replicas(job: Job) -> PlannedReplicas:
    """UserError for a job that cannot run like this."""
    fleet = fleet_of(job)
    check_decoupled(job, fleet)
    prepared = prepare(job, least=len(replica_groups(job, fleet)))
    plans = replica_plans(prepared, fleet)
    models = replica_models(prepared, fleet, plans)
    sizes = fragment_bytes(job, merged_fragments(job))
    job, note = with_period(job, models, sizes)
    return PlannedReplicas(job, fleet, prepared.captured.train, plans, models, sizes, note)


def simulate_decoupled(job: Job, faults: Sequence[Fault] = ()) -> DecoupledForecast:
    """The job's whole run. UserError for a job that cannot run like this, or a fault that the fleet cannot have."""
    fleet = fleet_of(job)
    check_faults(tuple(faults), fleet)
    if {fault.device for fault in faults if fault.kind == "join"} >= set(fleet.names):
        raise UserError("--join: got all devices, expected one that is there from the start")
    planned = plan_replicas(job)
    job, models = planned.job, planned.models
    training = job.training
    run = MergingSimulation(
        merge_rules(job),
        models,
        planned.sizes,
        faults,
        seed=training.seed,
        merger=fleet.names[0],
        save_samples=training.save_every * training.batch_size,
    ).run()
    return DecoupledForecast(
        run=run,
        faults=tuple(faults),
        full_speed=sum(model.samples / model.step_s for model in models),
        plans=planned.plans,
        step_s={model.name: model.step_s for model in models},
        period=job.sync.every,
        note=planned.note,
    )
