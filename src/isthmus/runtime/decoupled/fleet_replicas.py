"""A run whose replicas are devices that joined a fleet: each that is there trains, each that comes is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from isthmus.combinations import refused
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared
from isthmus.plans import Plan
from isthmus.runtime.coordinator.backend import Backend, RunRequest
from isthmus.runtime.coordinator.data_holders import DataHolders, Digests
from isthmus.runtime.decoupled.groups import replica_groups
from isthmus.runtime.decoupled.merged_run import DecoupledOutcome, MergedRun
from isthmus.runtime.decoupled.merger import MergerWatch
from isthmus.runtime.decoupled.run import check_decoupled
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.lanes import Outgoing


def check_joined(job: Job, fleet: Fleet) -> None:
    """Do the same as `check_decoupled`, and UserError for replicas of several devices."""
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
        super().__init__(prepared.job, replica_groups(prepared.job, fleet), checkpoint, calls=True)
        self._prepared, self._fleet, self._plans, self._holders = prepared, fleet, plans, holders

    @property
    def digests(self) -> Digests:
        return self._holders.digests

    def run(self, backend: Backend, watch: MergerWatch, stop: Stop, logs: Path) -> DecoupledOutcome:
        """To the end."""
        job = self._job
        host = self._host(dict.fromkeys(self.groups), watch)
        host.begin, host.has_data = self.first, self._has_data
        call = RunRequest(
            run=self._run,
            devices=(),
            others=self._fleet.names,
            timeout_s=job.timeout_s,
            threads=job.runtime.threads,
            logs=logs,
            role="replica",
            stop=stop,
        )
        with backend.at_work(call, host.acceptor) as devices:
            return self._coordinate(host, devices, stop)

    def _has_data(self, device: str) -> bool:
        return self._holders.is_known(device) and device in self._holders.described

    def first(self, replica: str) -> Outgoing:
        """Return the merger's first message to a device that joins the run."""
        order, kept = self.order(replica, self._prepared, self._plans[replica], self._fleet)
        assignment = msgspec.structs.replace(
            order.assignment,
            data=self._job.used_data.at(replica),
            digests=self._holders.digests.get(replica, {}),
        )
        return msgspec.structs.replace(order, assignment=assignment), list(kept.values())
