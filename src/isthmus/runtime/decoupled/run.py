"""A run of decoupled replicas: the merger is where the run's coordinator is.

Replicas are devices that train alone, and pipelines over several devices: processes of this machine, or devices that
joined a fleet.

A replica that is a pipeline has a thread that coordinates a run over its devices, and changes the run's weights between
two steps.

    step k is over ──► look at what the merger sent since ──► step k + 1 is opened: before it, the devices add what was
                       taken, and report the weights that are asked for ──► give them, while step k + 1 is made

So a pipeline takes and gives after the same step as a process that has all weights, and at the same step on every
device. Devices that are lost cost this replica the steps since its last snapshot. They are made again with the same
exchanges.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec
import torch
from torch import Tensor, nn

from isthmus.combinations import refused
from isthmus.errors import FleetTooSmall, Interrupted, PeerError, UserError, unknown_name
from isthmus.fleet import Fleet, Link
from isthmus.graph import StageGraph
from isthmus.job import Job, Prepared, constraints_of
from isthmus.plans import Plan
from isthmus.programs.merger import MergeTrace
from isthmus.protocol.decoupled_events import CollectChanges, FragmentSent
from isthmus.protocol.decoupled_replica import RETURN_S
from isthmus.protocol.run_messages import Halt, Item, WeightExchange
from isthmus.protocol.run_ports import EpochStart
from isthmus.runtime.coordinator.backend import Backend, DevicesAtWork, LocalBackend, RunRequest
from isthmus.runtime.coordinator.data_holders import DataHolders, Digests
from isthmus.runtime.coordinator.plans import SteadySeconds
from isthmus.runtime.coordinator.run import RunOptions, Watcher, check_outcome, late_warnings, run_plan
from isthmus.runtime.coordinator.run_callbacks import Address, WeightAmounts
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.coordinator.stages import readers
from isthmus.runtime.decoupled.merged_run import (
    DecoupledOutcome,
    Groups,
    MergedRun,
    pipeline_prepared,
    replica_groups,
    seeded_model,
)
from isthmus.runtime.decoupled.merger import MergerHost, MergerWatch
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaHost, ReplicaPlace
from isthmus.runtime.messages.decoupled import MOST_NOTE, ReplicaNote, TrainReplica
from isthmus.runtime.processes.device_processes import ForkServers, ProcessPlace
from isthmus.runtime.processes.signals import ComputeThreads, Stop
from isthmus.runtime.transport.lanes import Outgoing
from isthmus.runtime.transport.listener import Listener
from isthmus.session.program import OVER
from isthmus.session.session import reason_and_fault
from isthmus.trace import Span
from isthmus.training.decoupled import ReplicaFragments, delta_codec, fragments_of, spread
from isthmus.training.layout import header_of
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


END_S = 10.0  # for a pipeline to end its run by itself


class ReplicasAtWork(DevicesAtWork):
    """A pipeline works while its thread runs, and could work if one of its devices that may read data is free. A
    context manager: on leaving, pipelines that still run are stopped."""

    def __init__(
        self,
        devices: DevicesAtWork,
        groups: Groups,
        reading: Collection[str],
        begin: Callable[[str], Callable[[], None]],
        stop: Stop,
    ) -> None:
        """`reading`: devices that may read data. `begin` returns what the thread of a pipeline is to do. `stop` ends
        what pipelines wait for."""
        self._devices, self._begin, self._stop = devices, begin, stop
        self._groups = {name: {*devices} & {*reading} for name, devices in groups.items() if len(devices) > 1}
        self._alone = groups.keys() - self._groups.keys()
        self._threads = ComputeThreads()
        self._running: dict[str, threading.Thread] = {}
        self._ended: dict[str, str] = {}
        self._over: set[str] = set()  # pipelines that cannot work, however often they are called

    def ended(self) -> Mapping[str, str]:
        return {**self._devices.ended(), **self._ended}

    def starting(self, device: str) -> bool:
        return self._runs(device) if device in self._groups else self._devices.starting(device)

    def offers(self) -> Collection[str]:
        free = frozenset(self._devices.offers())
        waiting = (name for name in self._groups.keys() - self._over if not self._runs(name))
        return (free & self._alone) | {name for name in waiting if free.intersection(self._groups[name])}

    def leaving(self) -> Collection[str]:
        return self._devices.leaving()

    def call(self, device: str) -> None:
        if device not in self._groups:
            self._devices.call(device)
        elif not self._runs(device):
            self._ended.pop(device, None)
            act = partial(self._serve, device, self._begin(device))
            self._running[device] = self._threads.start(act, f"replica {device}")

    def _runs(self, pipeline: str) -> bool:
        return pipeline in self._running and self._running[pipeline].is_alive()

    def _serve(self, pipeline: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Interrupted:
            pass  # the merger has ended the run
        except Exception as e:  # the merger decides what follows
            if not isinstance(e, PeerError | FleetTooSmall):
                self._over.add(pipeline)
            self._ended[pipeline] = reason_and_fault(e)[0]

    def __enter__(self) -> ReplicasAtWork:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.request()
        until_s = time.monotonic() + END_S
        for thread in self._running.values():
            thread.join(max(0.0, until_s - time.monotonic()))
        self._threads.end()


_NO_EVALUATION = StageGraph(index=0, ops=(), columns=(), receives=(), sends=(), shared_from={}, shared_with={})
REPLICAS = "replicas"  # folder of the run's folder, with one for each pipeline


def replica_folder(run: Path, name: str) -> Path:
    """Return the folder of a replica that is a pipeline."""
    return run / REPLICAS / quote(name, safe="+ ")


def check_decoupled(job: Job, fleet: Fleet) -> None:
    """UserError for what replicas that never wait cannot do, or a batch that the fleet's devices cannot share."""
    training, runtime = job.training, job.runtime
    groups = replica_groups(job, fleet)
    count, pipelines = len(groups), [name for name, devices in groups.items() if len(devices) > 1]
    if training.batch_size % count:
        raise UserError(
            f"training.batch_size: got {training.batch_size} for {count} replicas, expected a multiple of {count}"
        )
    for name in job.sync.decoupled.packed:
        if name not in pipelines:
            raise UserError(f"sync.decoupled.packed: {unknown_name('pipeline', name, pipelines)}")
    if job.sync.decoupled.packed and job.compression is None:
        got = ", ".join(job.sync.decoupled.packed)
        raise UserError(f"sync.decoupled.packed: got {got} without a table [compression], expected one")
    asked: dict[str, tuple[object, object]] = {
        "changes that are not finite": ("ignore" if training.non_finite == "ignore" else "", ""),
        "own data": (job.plan.holders_data, "same"),
        "activation noise": (job.privacy is not None, False),
        "compression": (job.compression is not None and not pipelines, False),
        "changes": (bool(runtime.changes), False),
        "snapshots": (0 if pipelines else runtime.snapshot_every, 0),
        "fingerprints": (runtime.fingerprints or runtime.audit > 0, False),
    }
    for what, (got, expected) in asked.items():
        if got != expected:
            raise refused(what, "decoupled", repr(got) if isinstance(got, str) else got)
    for name, devices in groups.items() if job.plan.holders else ():
        if not set(constraints_of(job, fleet).data_holders) & set(devices):
            holders = ", ".join(job.plan.holders)
            raise UserError(f"plan.data_holder: got {holders}, none of replica {name}: expected one of each replica")


def links_of(groups: Groups, fleet: Fleet) -> dict[str, tuple[Link | None, Link | None]]:
    """Return the links of each replica's first device to the merger and back. The merger is where the fleet's first
    device is."""
    (first, _), *others = groups.items()
    ends = fleet.names[0]
    found = {name: (fleet.link(devices[0], ends), fleet.link(ends, devices[0])) for name, devices in others}
    return {first: (None, None), **found}


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The replicas of a run, and the devices that compute them."""

    prepared: Prepared
    fleet: Fleet
    plans: Mapping[str, Plan]  # the first plan of each replica
    backend: Backend
    holders: DataHolders  # devices that have the data
    replan: Callable[[Prepared, Fleet], Plan]  # plans a pipeline anew where some of its devices are lost, or came
    steady_s: Callable[[Prepared, Plan, Fleet], float]  # of a step of its plan


class DecoupledRun(MergedRun):
    """Devices of a fleet train whenever they are there; of a process of this machine that has ended there is no other.
    Pipelines are coordinated here."""

    def __init__(self, replicas: Replicas, folder: Path, checkpoint: Path | None = None) -> None:
        """UserError as of `MergedRun`."""
        job, fleet, backend = replicas.prepared.job, replicas.fleet, replicas.backend
        groups = replica_groups(job, fleet)
        super().__init__(job, groups, checkpoint, calls=backend.survives_coordinator)
        self._replicas, self._folder, self._backend = replicas, folder, backend
        self._begun = frozenset[str]()  # pipelines that were called
        self._links = dict[str, tuple[Link | None, Link | None]].fromkeys(groups, (None, None))
        self.emulated_s: dict[str, float] = {}  # how long an emulated step takes of each replica of one device
        if job.runtime.emulate and isinstance(backend, LocalBackend):
            self._links = links_of(groups, fleet)
            alone = (name for name, devices in groups.items() if len(devices) == 1)
            self.emulated_s = {name: replicas.plans[name].predicted.step_s for name in alone}
            self._backend = msgspec.structs.replace(backend, places=self._emulated(backend.places))

    def _emulated(self, places: Mapping[str, ProcessPlace]) -> dict[str, ProcessPlace]:
        return {**places} | {
            name: msgspec.structs.replace(places.get(name, ProcessPlace()), step_s=step_s, merger=self._links[name][0])
            for name, step_s in self.emulated_s.items()
        }

    @property
    def digests(self) -> Digests:
        return self._replicas.holders.digests

    def run(self, watch: MergerWatch, stop: Stop) -> DecoupledOutcome:
        job, fork_servers, ended = self._job, ForkServers(), Stop()
        backend = self._backend
        if isinstance(backend, LocalBackend):
            backend = msgspec.structs.replace(backend, fork_servers=fork_servers)
        links = {name: back for name, (_, back) in self._links.items()}
        codec = delta_codec(job.sync.decoupled)
        watch = replace(watch, begin=self.first, has_data=self._has_data)
        host = MergerHost(self.machine, self.merged, codec, links, self._run, job.timeout_s, watch)
        listener = Listener("127.0.0.1", timeout_s=job.timeout_s)  # for pipelines
        listener.start(host.acceptor.on_connection)
        begin = partial(self._pipeline, backend, f"127.0.0.1:{listener.port}", ended)
        here = [] if backend.survives_coordinator else list(self.groups)
        call = RunRequest(
            run=self._run,
            devices=tuple(name for name in here if len(self.groups[name]) == 1),
            others=self._replicas.fleet.names,
            timeout_s=job.timeout_s,
            threads=job.runtime.threads,
            logs=self._folder / "logs",
            role="replica",
            stop=stop,
        )
        try:
            with (
                backend.at_work(call, host.acceptor) as devices,
                ReplicasAtWork(devices, self.groups, self._replicas.holders.candidates, begin, ended) as at_work,
            ):
                for name in here:
                    at_work.call(name)
                finish = host.coordinate(at_work, stop)
        finally:
            listener.close()
            fork_servers.end()
        self.fill()
        return DecoupledOutcome(
            finish=finish,
            samples=self.machine.samples,
            merges=self.machine.merge - self.machine.begun.merge,
            late=self.machine.late,
            traffic=host.traffic,
            seconds=host.now_s,
        )

    def _has_data(self, replica: str) -> bool:
        """Whether a device that would train alone has the data; pipelines ask those that read them."""
        holders = self._replicas.holders
        return len(self.groups[replica]) > 1 or (holders.is_known(replica) and replica in holders.described)

    def first(self, replica: str) -> Outgoing | None:
        """Return the merger's first message to a device that trains alone."""
        if len(self.groups[replica]) > 1:
            return None
        known, shapes = self._replicas, self.shapes(self._replicas.prepared)
        own = pipeline_prepared(known.prepared, self.groups, replica)
        stages = StageAssignments(own, known.plans[replica], known.fleet)
        assignment = stages.assignments(self._run, EpochStart(0, 0, 0, False), {replica: Address("", 0)})[replica]
        trained = {name for shape in shapes for name in shape}
        values = weights_of(self.model, own.captured)
        kept = {op.target: values[op.target] for op in assignment.train.variables() if op.target not in trained}
        digests = known.holders.digests.get(replica, {})
        order = TrainReplica(
            run=self._run,
            tensors=tuple(header_of(name, tensor) for name, tensor in kept.items()),
            assignment=msgspec.structs.replace(assignment, evaluation=_NO_EVALUATION, digests=digests),
            fragments=shapes,
            rules=self._job.sync.decoupled,
            steps=self.machine.steps(replica),
        )
        return order, list(kept.values())

    def _pipeline(self, backend: Backend, address: str, stop: Stop, name: str) -> Callable[[], None]:
        """Return what the thread of a pipeline does: it trains until the merger ends the run. A pipeline that is called
        again begins anew from the merged weights, with the samples that follow. All of this in the merger's thread,
        as the first weights are drawn from the one generator of random numbers."""
        known, job, devices = self._replicas, self._job, self.groups[name]
        prepared, steps = pipeline_prepared(known.prepared, self.groups, name), self.machine.steps(name)
        again, self._begun = name in self._begun, self._begun | {name}
        if isinstance(backend, LocalBackend):
            backend = msgspec.structs.replace(backend, respawn_after_s=RETURN_S)
        replan, module = partial(known.replan, prepared), seeded_model(job)
        link, folder = self._links[name][0], replica_folder(self._folder, name)
        place = ReplicaPlace(name=name, run=self._run, address=address, timeout_s=job.timeout_s, link=link)
        folder.mkdir(parents=True, exist_ok=True)

        def train() -> None:
            plan, asks = known.plans[name], backend.asks(stop)
            here = asks.here(devices if again else plan.used, every=not again)
            if not set(plan.used) <= set(here):
                plan = replan(known.fleet.subset(here))
            known.holders.ask(readers(plan, prepared.captured, evaluates=False))
            pipeline = ReplicaPipeline(
                prepared=prepared,
                module=module,
                plan=plan,
                fleet=known.fleet.subset(devices),
                replan=replan,
                steady_s=partial(known.steady_s, prepared),
                folder=folder,
                trace=self.machine.trace,
                backend=backend,
                holders=known.holders,
                stop=stop,
            )
            PipelineReplica(job, pipeline, place, steps).run()

        return train
