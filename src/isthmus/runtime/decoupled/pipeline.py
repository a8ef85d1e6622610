"""A replica that is a pipeline: a thread coordinates a run over its devices, and changes the run's weights between two
steps.

    step k is over ──► look at what the merger sent since ──► step k + 1 is opened: before it, the devices add what was
                       taken, and report the weights that are asked for ──► give them, while step k + 1 is made

So a pipeline takes and gives after the same step as a process that has all weights, and at the same step on every
device. Devices that are lost cost this replica the steps since its last snapshot. They are made again with the same
exchanges.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from isthmus.errors import PeerError
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared
from isthmus.plans import Plan, PlanPeriod
from isthmus.protocol.decoupled_events import CollectChanges, FragmentSent, LastStepMade, StepsMade
from isthmus.protocol.decoupled_replica import DecoupledReplica
from isthmus.protocol.run_messages import Halt, Item, WeightExchange
from isthmus.run_files import LinesFile
from isthmus.runtime.coordinator.backend import Backend
from isthmus.runtime.coordinator.data_holders import DataHolders
from isthmus.runtime.coordinator.run import RunOptions, Watcher, check_outcome, late_warnings, run_plan
from isthmus.runtime.coordinator.run_callbacks import WeightAmounts
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaPlace, TakenVersions, check_received
from isthmus.runtime.messages.decoupled import MOST_NOTE, ReplicaNote
from isthmus.runtime.processes.signals import Stop
from isthmus.trace import Span
from isthmus.training.decoupled import ReplicaAccount, delta_codec, flat, fragments_of, spread
from isthmus.training.weights import parameter_names, weights_of

SPANS, PERIODS = "spans.jsonl", "periods.jsonl"
MOST_SPANS = 500_000  # the most spans of a replica: those of days of training would fill the disk
OVERRUN = 1.05  # times as long as planned: what is shorter is the clock's


class StepSpans(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of computing that devices reported with one step."""

    spans: tuple[Span, ...]


class PeriodBegun(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of the replica. Spans of its first step and of later ones are void that began before it."""

    first_step: int
    since_s: float
    step_s: float  # as planned
    devices: tuple[str, ...]


def spans_file(replica: Path) -> LinesFile[StepSpans]:
    return LinesFile(replica / SPANS, StepSpans, "spans")


def periods_file(replica: Path) -> LinesFile[PeriodBegun]:
    return LinesFile(replica / PERIODS, PeriodBegun, "periods")


class PipelineLog:
    """Writes them. What is written stays, however the replica's process ends."""

    def __init__(self, folder: Path, began_s: float) -> None:
        """`began_s`: the whole run, by the monotonic clock."""
        self._spans, self._periods = spans_file(folder), periods_file(folder)
        self._began_s = began_s
        self._written = 0
        self._least_s: dict[tuple[str, str], float] = {}
        """Seconds that a micro-batch takes as planned, by device and work."""
        self.late_s: dict[str, float] = {}  # seconds by which each device's tasks took longer
        self._origin_s: float | None = None  # from which the spans of this run count

    def begin(self) -> None:
        """A step is opened: times of spans count from the first of them."""
        if self._origin_s is None:
            self._origin_s = time.monotonic() - self._began_s

    def spans(self, spans: Iterable[Span]) -> None:
        later_s = self._origin_s or 0.0
        spans = [span for span in spans if span.track == "compute"]
        for span in spans:
            took_s, least_s = span.end_s - span.start_s, self._least_s.get((span.device, span.name), math.inf)
            if took_s > least_s * OVERRUN:
                self.late_s[span.device] = self.late_s.get(span.device, 0.0) + took_s - least_s
        found = tuple(
            msgspec.structs.replace(span, start_s=span.start_s + later_s, end_s=span.end_s + later_s) for span in spans
        )
        self._written += len(found)
        if found and self._written <= MOST_SPANS:
            self._spans.add(StepSpans(spans=found))

    def period(self, begun: PlanPeriod) -> None:
        """A plan came into force, by the monotonic clock."""
        for stage in (stage for replica in begun.plan.replicas for stage in replica.workers):
            flops_per_s = begun.fleet.device(stage.device).sustained_flops_per_s
            self._least_s[stage.device, "F"] = stage.flops_forward / flops_per_s
            self._least_s[stage.device, "B"] = stage.flops_backward / flops_per_s
        plan, since_s = begun.plan, begun.since_s - self._began_s
        found = PeriodBegun(
            first_step=begun.first_step, since_s=since_s, step_s=plan.predicted.step_s, devices=tuple(plan.used)
        )
        self._periods.add(found)


@dataclass(frozen=True, kw_only=True)
class ReplicaPipeline:
    """The job, the plan and the devices of one replica."""

    prepared: Prepared  # the replica's own job, prepared
    module: nn.Module  # the whole run's first weights, which become the replica's
    plan: Plan
    fleet: Fleet  # the replica's devices
    replan: Callable[[Fleet], Plan]  # for those of them that are there
    folder: Path
    began_s: float  # the whole run, by the monotonic clock
    backend: Backend
    holders: DataHolders | None = None
    stop: Stop = field(default_factory=Stop)


@dataclass
class _Opened:
    """A step that is not in a snapshot yet."""

    weights: WeightAmounts
    asked: CollectChanges | None  # None once it is given
    found: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # weights that devices have reported


class _Ended(Exception):
    """The replica's last step is made."""


class PipelineReplica:
    """Drives the machine as the controller of a run: everything but the connection's threads is in the run's thread."""

    def __init__(self, job: Job, pipeline: ReplicaPipeline, place: ReplicaPlace, steps: int = 0) -> None:
        """`steps` were made before, by optimizers whose state is lost."""
        count = job.sync.decoupled.fragments
        self._job, self._pipeline = job, pipeline
        self._samples = pipeline.prepared.job.training.batch_size
        self._most_steps = 2 * job.training.steps * job.training.batch_size // self._samples
        """The whole run has half as many, if no other replica makes any."""
        self._machine = DecoupledReplica(count, job.training.batch_size, steps)
        self._machine.port = self
        self._values: list[Tensor] = []  # values that came with the order that is being taken
        self._fragments = fragments_of(pipeline.module, count)
        self._elements = [sum(parameter.numel() for parameter in fragment) for fragment in self._fragments]
        self._names = parameter_names(pipeline.module)
        self._account = ReplicaAccount(count, delta_codec(job.sync.decoupled))
        self._taken = TakenVersions()
        self._link = MergerLink(place)
        self._log = PipelineLog(pipeline.folder, pipeline.began_s)
        self.steps = self.first_step = steps  # steps that were made; some may be made again
        self._trained = 0  # samples of all replicas at the step that is opened next
        self._amounts: dict[str, Tensor] = {}
        self._asked: CollectChanges | None = None
        """The amounts and the request for a contribution that come with the step that is opened next."""
        self._opened: dict[int, _Opened] = {}
        self._has_copies = True  # whether steps may be made again
        self._over = False

    @property
    def _emulates(self) -> bool:
        return self._job.runtime.emulate and not self._pipeline.backend.survives_coordinator

    def run(self) -> None:
        """Until the run is over. The merger gets the error of training, which is then raised."""
        ended = self._pipeline.stop.calls(lambda: self._link.received.put((Halt(), [])))
        with self._link.reporting(), ended:
            while self._machine.phase == "joining":
                self._receive(wait=True)
            if self._machine.phase == "training":
                began_s = time.monotonic()
                with contextlib.suppress(_Ended):
                    self._train()
                late_s = self._log.late_s if self._emulates else {}
                for text in late_warnings(late_s, time.monotonic() - began_s):
                    self._note(text)
            while not self._over:
                self._receive(wait=True)

    def _train(self) -> None:
        known, plan = self._pipeline, self._pipeline.plan
        options = RunOptions(
            emulate=self._emulates,
            weights={name: t.clone() for name, t in weights_of(known.module, known.prepared.captured).items()},
            backend=known.backend,
            holders=known.holders,
            stop=known.stop,
            first_step=self.first_step,
            until=self._most_steps,
            exchanges=self,
            replan=known.replan,
        )
        watcher = Watcher(
            planned=self._planned,
            period=self._log.period,
            advanced=self._advanced,
            acknowledged=self._acknowledged,
            noted=self._note,
        )
        check_outcome(run_plan(known.prepared, plan, known.fleet, known.folder, options, watcher))

    # The run

    def opened(self, item: Item) -> WeightAmounts:
        self._log.begin()
        if (found := self._opened.get(item.step)) is not None:
            found.found.clear()
            return found.weights
        if item.step < self.steps:
            raise PeerError(f"step {item.step} is lost, and what came with it is not known any more")
        training = self._job.training
        rate_step = min(self._trained // training.batch_size, training.steps - 1)
        wanted: list[str] = []
        for fragment in self._asked.fragments if self._asked is not None else ():
            wanted += [name for parameter in self._fragments[fragment] for name in self._names[parameter]]
        exchange = WeightExchange(rate_step=rate_step, wanted=tuple(wanted))
        self._opened[item.step] = _Opened(WeightAmounts(exchange, self._amounts), self._asked)
        self._amounts, self._asked = {}, None
        return self._opened[item.step].weights

    def collected(self, item: Item, values: Mapping[str, Tensor]) -> None:
        if (opened := self._opened.get(item.step)) is None:
            return  # no honest device is so late
        opened.found.update(values)
        if (asked := opened.asked) is None or not self._complete(asked, opened.found):
            return
        opened.asked = None
        self._give(asked, opened.found)
        if asked.last:
            raise _Ended

    def _complete(self, asked: CollectChanges, found: Mapping[str, Tensor]) -> bool:
        """Return whether each parameter is there, by one of its names."""
        parameters = [parameter for fragment in asked.fragments for parameter in self._fragments[fragment]]
        return all(any(name in found for name in self._names[parameter]) for parameter in parameters)

    def _advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        self._log.spans(spans)
        if item.kind != "train" or item.step < self.steps:
            return
        self.steps = item.step + 1
        self._account.trained(self._samples)
        if not self._has_copies:
            self._opened.clear()
        self._receive()
        if self._over:
            raise _Ended
        if self._machine.phase == "training":
            known = loss if loss is not None and math.isfinite(loss) else None
            self._machine.step_ended(self._samples, known)

    def _acknowledged(self, step: int) -> None:
        """No step before is made again."""
        self._opened = {number: opened for number, opened in self._opened.items() if number >= step}

    def _planned(self, plan: Plan, epoch: int) -> None:
        self._has_copies = len(plan.used) > 1 and self._job.runtime.snapshots
        self._note(f"a pipeline over {', '.join(plan.used)}: {plan.predicted.expected_s:.3g} s per step as planned")

    def _note(self, text: str) -> None:
        self._link.put(ReplicaNote(text=text[:MOST_NOTE]))

    # The merger

    def _receive(self, *, wait: bool = False) -> None:
        while wait or not self._link.received.empty():
            received, wait = self._link.received.get(), False
            try:
                check_received(self._machine, received, self._elements)
                order, self._values = received
                self._machine.ordered(order)
            except PeerError as e:
                self._link.refuse(e)

    # What the replica asks

    def contribute(self, collect: CollectChanges) -> None:
        fragments = self._account.due(collect.fragments, last=collect.last)
        self._asked = msgspec.structs.replace(collect, fragments=fragments) if fragments else None

    def say(self, body: StepsMade | LastStepMade) -> None:
        self._link.put(body)

    def stop(self) -> None:
        self._over = True

    def train(self, samples: int) -> None:
        self._trained = samples

    def take(self, sent: FragmentSent) -> None:
        (values,) = self._values
        parameters = self._fragments[sent.fragment]
        added = self._account.take(sent.fragment, values, whole=sent.whole, included=sent.included, first=sent.first)
        if added is None:
            spread(values, parameters)
            self._taken.add(sent, self.steps)
            return
        for parameter, part in zip(parameters, added.split([p.numel() for p in parameters]), strict=True):
            for name in self._names[parameter]:
                self._amounts[name] = torch.cat([self._amounts[name], part]) if name in self._amounts else part
        self._taken.add(sent, self.steps)

    def _give(self, asked: CollectChanges, found: Mapping[str, Tensor]) -> None:
        """The weights after the last step that is over, with what was taken then."""
        with torch.no_grad():
            for fragment in asked.fragments:
                for parameter in self._fragments[fragment]:
                    parameter.copy_(next(found[name] for name in self._names[parameter] if name in found))
        payloads = [self._account.give(f, flat(self._fragments[f]), asked.merge) for f in asked.fragments]
        samples = [self._account.samples(fragment) for fragment in asked.fragments]
        self._link.put(self._taken.contributed(asked, asked.fragments, self.steps, samples), payloads)
