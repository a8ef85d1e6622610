"""A run whose replicas are devices that joined a fleet: each that is there trains, each that comes is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import nn

from isthmus.combinations import refused
from isthmus.fleet import Fleet
from isthmus.graph import StageGraph
from isthmus.job import Job, Prepared
from isthmus.plans import Plan
from isthmus.protocol.run_ports import EpochStart
from isthmus.runtime.coordinator.backend import Backend, RunRequest
from isthmus.runtime.coordinator.data_holders import DataHolders, Digests
from isthmus.runtime.coordinator.run_callbacks import Address
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.decoupled.groups import Groups, replica_groups
from isthmus.runtime.decoupled.merged_run import DecoupledOutcome, MergedRun
from isthmus.runtime.decoupled.merger import MergerWatch
from isthmus.runtime.decoupled.pipeline_job import pipeline_prepared
from isthmus.runtime.decoupled.run import check_decoupled
from isthmus.runtime.messages.decoupled import ReplicaShare, TrainReplica
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.lanes import Outgoing
from isthmus.training.decoupled import fragments_of
from isthmus.training.layout import header_of
from isthmus.training.weights import parameter_names, weights_of

_NOTHING = StageGraph(index=0, ops=(), columns=(), receives=(), sends=(), shared_from={}, shared_with={})
"""A replica does not evaluate."""


def check_joined(job: Job, fleet: Fleet) -> None:
    """As `check_decoupled`, and UserError for replicas of several devices."""
    check_decoupled(job, fleet)
    pipelines = [name for name, devices in replica_groups(job, fleet).items() if len(devices) > 1]
    if pipelines:
        raise refused("pipelines", "joined replicas", f"pipelines ({', '.join(pipelines)})")


class FleetReplicas(MergedRun):
    """The merger is where the fleet's coordinator is."""

    def __init__(
        self,
        prepared: Prepared,
        fleet: Fleet,
        plans: Mapping[str, Plan],
        holders: DataHolders,
        checkpoint: Path | None = None,
    ) -> None:
        """`plans` are those of each device alone; `holders` says which devices have the data. UserError as of
        `MergedRun`."""
        self._groups: Groups = replica_groups(prepared.job, fleet)
        super().__init__(prepared.job, self._groups, checkpoint, calls=True)
        self._prepared, self._fleet, self._plans, self._holders = prepared, fleet, plans, holders
        self._shapes = _shapes(self.model, prepared)

    @property
    def digests(self) -> Digests:
        return self._holders.digests

    def run(self, backend: Backend, watch: MergerWatch, stop: Stop, logs: Path) -> DecoupledOutcome:
        """To the end."""
        job = self._job
        host = self._host(dict.fromkeys(self._groups), watch, self.first, self._has_data)
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
        with backend.at_work(call, host.acceptor) as devices:
            return self._coordinate(host, devices, stop)

    def _has_data(self, device: str) -> bool:
        return self._holders.is_known(device) and device in self._holders.described

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
