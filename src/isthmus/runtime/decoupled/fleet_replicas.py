"""A run whose replicas are devices that joined a fleet: each that is there trains, each that comes is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from torch import nn

from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.graph import StageGraph
from isthmus.job import Job, Prepared
from isthmus.plans import Plan
from isthmus.protocol.run_ports import EpochStart
from isthmus.runtime.coordinator.backend import Backend, DevicesAtWork, RunRequest
from isthmus.runtime.coordinator.data_holders import DataHolders
from isthmus.runtime.coordinator.run_callbacks import Address
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.decoupled.groups import FIELD, Groups, replica_groups
from isthmus.runtime.decoupled.merged_run import DecoupledOutcome, MergedRun
from isthmus.runtime.decoupled.merger import MergerHost, MergerWatch
from isthmus.runtime.decoupled.outgoing import Outgoing
from isthmus.runtime.decoupled.pipeline_job import pipeline_prepared
from isthmus.runtime.decoupled.run import check_decoupled
from isthmus.runtime.messages.decoupled import ReplicaShare, TrainReplica
from isthmus.runtime.processes.signals import Stop
from isthmus.sanitize import sanitize
from isthmus.training.decoupled import fragments_of
from isthmus.training.layout import header_of
from isthmus.training.weights import parameter_names, weights_of

LOOK_S = 0.5
"""Between looks at devices that came."""
AGAIN_S = 30.0
"""After so long a device whose process failed is called again; twice as long each further time."""
_NOTHING = StageGraph(index=0, ops=(), columns=(), receives=(), sends=(), shared_from={}, shared_with={})
"""A replica does not evaluate."""


def check_joined(job: Job, fleet: Fleet) -> None:
    """As `check_decoupled`, and UserError for replicas of several devices."""
    check_decoupled(job, fleet)
    pipelines = [name for name, devices in replica_groups(job, fleet).items() if len(devices) > 1]
    if pipelines:
        raise UserError(
            f"{FIELD}: got pipelines ({', '.join(pipelines)}) on devices that join a fleet, expected 'devices': each "
            "trains alone; pipelines run under `isthmus train`"
        )


class FleetReplicas(MergedRun):
    """The merger is where the fleet's coordinator is."""

    def __init__(self, prepared: Prepared, fleet: Fleet, plans: Mapping[str, Plan], holders: DataHolders) -> None:
        """`plans` are those of each device alone; `holders` says which devices have the data. UserError for a model
        that cannot be merged."""
        self._groups: Groups = replica_groups(prepared.job, fleet)
        super().__init__(prepared.job, len(self._groups), timeout_s=float("inf"))  # devices may be away for long
        self._prepared, self._fleet, self._plans, self._holders = prepared, fleet, plans, holders
        self._shapes = _shapes(self.model, prepared)
        self._looked_s = 0.0
        self._trains = False
        """Whether any did at the last look."""
        self._failed: dict[str, int] = {}
        """How many times a device's process has."""
        self._waits_s: dict[str, float] = {}
        """Until when it is not called."""
        self._leaving: set[str] = set()
        """Devices that were asked to leave while they were called or at work: they are not called again."""

    def run(self, backend: Backend, watch: MergerWatch, stop: Stop, logs: Path) -> DecoupledOutcome:
        """To the end."""
        job = self._job
        host = self._host(dict.fromkeys(self._groups, None), watch, self.first)
        call = RunRequest(
            run=self._run,
            devices=(),
            others=self._fleet.names,
            timeout_s=job.timeout_s,
            threads=job.runtime.threads,
            logs=logs,
            replicas=True,
            stop=stop,
        )
        with backend.at_work(call, host.acceptor) as session, stop.calls(lambda: None):
            finish = host.coordinate(partial(self._look, host, session, watch.note), lambda: stop.requested)
        return self._outcome(host, finish)

    def _look(self, host: MergerHost, session: DevicesAtWork, note: Callable[[str], None]) -> Mapping[str, str]:
        """Call devices that came, and let those go that are to leave. None has ended for good: all may come again."""
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_S:
            return {}
        self._looked_s = now_s
        if self._trains and not self.machine.connected:
            note("no device is left: the run waits for one; if it is stopped, what is merged is saved")
        self._trains = bool(self.machine.connected)
        for name, how in session.ended().items():
            if name not in self._waits_s:
                self._failed[name] = self._failed.get(name, 0) + 1
                self._waits_s[name] = now_s + AGAIN_S * 2 ** (self._failed[name] - 1)
                note(f"{name}: its process ended: {sanitize(how)}")
        there = {name for name in self._groups if name in self.machine.connected or session.starting(name)}
        self._leaving |= there.intersection(session.leaving())
        for name in sorted(self._leaving):  # also one whose process connects later, or again
            host.release(name)
        for name in session.offers():
            has_data = self._holders.is_known(name) and name in self._holders.described
            if has_data and now_s >= self._waits_s.get(name, 0.0):
                self._waits_s.pop(name, None)
                note(f"{name} is here, and is called to train")
                session.call(name)
        return {}

    def first(self, replica: str) -> Outgoing:
        """Return the merger's first message to a device that joins the run."""
        job, number = self._job, list(self._groups).index(replica)
        own = pipeline_prepared(self._prepared, self._groups, replica)
        stages = StageAssignments(own, self._plans[replica], self._fleet)
        assignment = stages.assignments(self._run, EpochStart(0, 0, 0, False), {replica: Address("", 0)})[replica]
        assignment = msgspec.structs.replace(
            assignment,
            data=job.used_data.at(replica),
            digests=self._holders.digests.get(replica, {}),
            evaluation=_NOTHING,
        )
        values = weights_of(self.model, self._prepared.captured)
        trained = {name for fragment in self._shapes for name in fragment}
        kept = {op.target: values[op.target] for op in assignment.train.variables() if op.target not in trained}
        share = ReplicaShare(
            number=number,
            own=job.training.batch_size // len(self._groups),
            batch=job.training.batch_size,
            seed=job.training.seed,
            shuffle=job.training.shuffle,
        )
        message = TrainReplica(
            run=self._run,
            tensors=tuple(header_of(name, tensor) for name, tensor in kept.items()),
            assignment=assignment,
            share=share,
            fragments=self._shapes,
            rules=job.sync.decoupled,
            steps=self.machine.steps(replica),
        )
        return message, list(kept.values())


def _shapes(module: nn.Module, prepared: Prepared) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Return the shapes of each fragment's parameters, by the name that the graph has of them."""
    names, used = parameter_names(module), {op.target for op in prepared.captured.train.ops if op.kind == "parameter"}
    return tuple(
        {next((n for n in names[p] if n in used), names[p][0]): tuple(p.shape) for p in fragment}
        for fragment in fragments_of(module, prepared.job.sync.decoupled.fragments)
    )
