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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from isthmus.errors import PeerError
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared
from isthmus.plans import Plan
from isthmus.programs.merge_trace import MergeTrace
from isthmus.protocol.decoupled_events import CollectChanges, FragmentSent
from isthmus.protocol.run_messages import Halt, Item, WeightExchange
from isthmus.runtime.coordinator.backend import Backend
from isthmus.runtime.coordinator.data_holders import DataHolders
from isthmus.runtime.coordinator.plans import SteadySeconds
from isthmus.runtime.coordinator.run import RunOptions, Watcher, check_outcome, late_warnings, run_plan
from isthmus.runtime.coordinator.run_callbacks import WeightAmounts
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaHost, ReplicaPlace
from isthmus.runtime.messages.decoupled import MOST_NOTE, ReplicaNote
from isthmus.runtime.processes.signals import Stop
from isthmus.session.program import OVER
from isthmus.trace import Span
from isthmus.training.decoupled import ReplicaFragments, delta_codec, fragments_of, spread
from isthmus.training.weights import parameter_names, weights_of


@dataclass(frozen=True, kw_only=True)
class ReplicaPipeline:
    """The job, the plan and the devices of one replica."""

    prepared: Prepared  # the replica's own job, prepared
    module: nn.Module  # the whole run's first weights, which become the replica's
    plan: Plan
    fleet: Fleet  # the replica's devices
    replan: Callable[[Fleet], Plan]  # for those of them that are there
    steady_s: SteadySeconds
    folder: Path
    trace: MergeTrace  # the whole run's
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


class PipelineReplica(ReplicaHost):
    """Its steps are those of a run, which it changes between two of them: everything but the connection's threads is in
    the run's thread."""

    def __init__(self, job: Job, pipeline: ReplicaPipeline, place: ReplicaPlace, steps: int = 0) -> None:
        """`steps` were made before, by optimizers whose state is lost."""
        rules = job.sync.decoupled
        self._parameters = fragments_of(pipeline.module, rules.fragments)
        fragments = ReplicaFragments(self._parameters, delta_codec(rules))
        super().__init__(fragments, job.training.batch_size, MergerLink(place), steps)
        self._job, self._pipeline = job, pipeline
        self._samples = pipeline.prepared.job.training.batch_size
        self._most_steps = 2 * job.training.steps * job.training.batch_size // self._samples
        """The whole run has half as many, if no other replica makes any."""
        self._names = parameter_names(pipeline.module)
        self._origin_s = 0.0  # from which the spans of this run count, by the monotonic clock
        self._late_s: dict[str, float] = {}  # seconds by which each emulated device's tasks took longer
        self._first_step = steps
        self._amounts: dict[str, Tensor] = {}
        self._asked: CollectChanges | None = None
        """The amounts and the request for a contribution that come with the step that is opened next."""
        self._opened: dict[int, _Opened] = {}
        self._has_copies = True  # whether steps may be made again

    @property
    def _emulates(self) -> bool:
        return self._job.runtime.emulate and not self._pipeline.backend.survives_coordinator

    def run(self) -> None:
        """Until the run is over. The merger gets the error of training, which is then raised."""
        ended = self._pipeline.stop.calls(lambda: self.link.received.put((Halt(), [])))
        with self.link.reporting(), ended:
            if self.receive() is not None:
                began_s = time.monotonic()
                with contextlib.suppress(_Ended):
                    self._train()
                for text in late_warnings(self._late_s, time.monotonic() - began_s):
                    self._note(text)
            self._next = None
            self.receive()

    def _train(self) -> None:
        known, plan = self._pipeline, self._pipeline.plan
        options = RunOptions(
            emulate=self._emulates,
            weights={name: t.clone() for name, t in weights_of(known.module, known.prepared.captured).items()},
            backend=known.backend,
            holders=known.holders,
            stop=known.stop,
            first_step=self._first_step,
            until=self._most_steps,
            exchanges=self,
            replan=known.replan,
            steady_s=known.steady_s,
        )
        watcher = Watcher(
            planned=self._planned,
            advanced=self._advanced,
            late=self._late,
            acknowledged=self._acknowledged,
            noted=self._note,
        )
        check_outcome(run_plan(known.prepared, plan, known.fleet, known.folder, options, watcher))

    # The run

    def opened(self, item: Item) -> WeightAmounts:
        self._origin_s = self._origin_s or time.monotonic()
        if (found := self._opened.get(item.step)) is not None:
            found.found.clear()
            return found.weights
        if item.step < self._steps:
            raise PeerError(f"step {item.step} is lost, and what came with it is not known any more")
        training = self._job.training
        rate_step = min(self.samples // training.batch_size, training.steps - 1)
        wanted: list[str] = []
        for fragment in self._asked.fragments if self._asked is not None else ():
            wanted += [name for one in self._parameters[fragment] for name in self._names[one]]
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
        with torch.no_grad():  # the weights after the last step that is over, with what was taken then
            for parameter in (one for fragment in asked.fragments for one in self._parameters[fragment]):
                parameter.copy_(next(opened.found[name] for name in self._names[parameter] if name in opened.found))
        self._give(asked, asked.fragments)
        if asked.last:
            raise _Ended

    def _complete(self, asked: CollectChanges, found: Mapping[str, Tensor]) -> bool:
        """Return whether each parameter is there, by one of its names."""
        parameters = [one for fragment in asked.fragments for one in self._parameters[fragment]]
        return all(any(name in found for name in self._names[parameter]) for parameter in parameters)

    def _advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        for span in spans:
            if span.track == "compute":
                self._pipeline.trace.computed(span, self._origin_s)
        if item.kind != "train" or item.step < self._steps:
            return
        self._fragments.account.trained(self._samples)
        if not self._has_copies:
            self._opened.clear()
        self.stepped(self._samples, loss)
        if self.phase == OVER:
            raise _Ended

    def _acknowledged(self, step: int) -> None:
        """No step before is made again."""
        self._opened = {number: opened for number, opened in self._opened.items() if number >= step}

    def _planned(self, plan: Plan, epoch: int) -> None:
        self._has_copies = len(plan.used) > 1 and self._job.runtime.snapshots
        self._note(f"a pipeline over {', '.join(plan.used)}: {plan.predicted.expected_s:.3g} s per step as planned")

    def _late(self, device: str, seconds: float) -> None:
        self._late_s[device] = self._late_s.get(device, 0.0) + seconds

    def _note(self, text: str) -> None:
        self.link.put(ReplicaNote(text=text[:MOST_NOTE]))

    # What the replica asks

    def contribute(self, collect: CollectChanges) -> None:
        fragments = self._fragments.account.due(collect.fragments, last=collect.last)
        self._asked = msgspec.structs.replace(collect, fragments=fragments) if fragments else None

    def take(self, sent: FragmentSent) -> None:
        (values,) = self._values
        parameters, account = self._parameters[sent.fragment], self._fragments.account
        added = account.take(sent.fragment, values, whole=sent.whole, included=sent.included, first=sent.first)
        self._taken.add(sent, self._steps)
        if added is None:
            spread(values, parameters)
            return
        for parameter, part in zip(parameters, added.split([p.numel() for p in parameters]), strict=True):
            for name in self._names[parameter]:
                self._amounts[name] = torch.cat([self._amounts[name], part]) if name in self._amounts else part
