"""A run of decoupled replicas on this machine: one process for each device of the fleet, and the merger in this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec

from isthmus.accelerators import open_accelerator
from isthmus.combinations import refused
from isthmus.data import load_dataset
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_extra
from isthmus.fleet import Fleet, Link
from isthmus.job import Job, Prepared, keep_prepared, kept_prepared
from isthmus.plans import Plan, load_plan, save_plan
from isthmus.runtime.coordinator.backend import StartedProcesses, local_places
from isthmus.runtime.decoupled.graph_trainer import GraphTrainer
from isthmus.runtime.decoupled.groups import Groups, replica_groups
from isthmus.runtime.decoupled.merged_run import DecoupledOutcome, MergedRun
from isthmus.runtime.decoupled.merger import MergerWatch
from isthmus.runtime.decoupled.merger_link import ReplicaPlace
from isthmus.runtime.decoupled.pipeline import ReplicaPipeline, serve_pipeline
from isthmus.runtime.decoupled.pipeline_job import pipeline_prepared
from isthmus.runtime.decoupled.replica import serve_replica
from isthmus.runtime.processes.device_processes import ProcessPlace, fork_before_threads
from isthmus.runtime.processes.forked import Forked
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.listener import Listener

MakePlan = Callable[[Prepared, Fleet], Plan]
REPLICAS = "replicas"  # folder of the run's folder, with one for each pipeline
CAPTURED, PLAN = "captured.safetensors", "plan.json"
"""The model's graphs, in the run's folder; a pipeline's first plan, in its own."""


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
        "data holders": (", ".join(job.plan.holders), ""),
        "compression": (job.compression is not None and not pipelines, False),
        "JAX": (", ".join(sorted(fleet.engines)), "torch"),
        "compile": (runtime.compile, False),
        "changes": (bool(runtime.changes), False),
        "snapshots": (0 if pipelines else runtime.snapshot_every, 0),
        "fingerprints": (runtime.fingerprints or runtime.audit > 0, False),
    }
    for what, (got, expected) in asked.items():
        if got != expected:
            raise refused(what, "decoupled", repr(got) if isinstance(got, str) else got)


def links_of(groups: Groups, fleet: Fleet) -> dict[str, tuple[Link | None, Link | None]]:
    """Return the links of each replica's first device to the merger and back. The merger is where the fleet's first
    device is."""
    (first, _), *others = groups.items()
    ends = fleet.names[0]
    found = {name: (fleet.link(devices[0], ends), fleet.link(ends, devices[0])) for name, devices in others}
    return {first: (None, None), **found}


class _Begin(msgspec.Struct, frozen=True):
    """The message that a replica's process waits for."""

    address: str
    step_s: dict[str, float]
    began_s: float  # seconds on the monotonic clock
    micro_batches: int  # micro-batches of the job's batch


class DecoupledRun(MergedRun):
    """Replicas are forked when it is made, so before this process has threads. `processes` is a context manager, which
    ends them."""

    def __init__(
        self, job: Job, fleet: Fleet, folder: Path, replan: MakePlan | None = None, checkpoint: Path | None = None
    ) -> None:
        """`replan` plans a pipeline anew where some of its devices are lost, or came. UserError for a job or a model
        that does not fit, or as of `MergedRun` for the `checkpoint` to go on from."""
        check_decoupled(job, fleet)
        groups = replica_groups(job, fleet)
        super().__init__(job, groups, checkpoint)
        self._folder = folder
        self._links = links_of(groups, fleet) if job.runtime.emulate else dict.fromkeys(groups, (None, None))
        places = local_places(job.runtime.device, fleet.names)
        data = load_dataset(job.used_data, "train")
        title = import_extra("setproctitle", "a device process").setproctitle

        def serve(name: str) -> Callable[[str], None]:
            devices = groups[name]

            def act(text: str) -> None:
                title(f"isthmus {'device' if len(devices) == 1 else 'replica'} {name}")
                begin = msgspec.json.decode(text, type=_Begin)
                own = job.cut_into(begin.micro_batches)
                place = ReplicaPlace(
                    name=name,
                    run=self._run,
                    address=begin.address,
                    timeout_s=job.timeout_s,
                    step_s=begin.step_s.get(name, 0.0),
                    link=self._links[name][0],
                )
                if len(devices) > 1:
                    fork_before_threads(waiting=1)  # one waits for the end of the merger's process
                whole = kept_prepared(own, folder / CAPTURED)
                assert whole is not None, "kept before replicas begin"
                plan = load_plan(replica_folder(folder, name) / PLAN)
                if len(devices) == 1:

                    def trainer() -> GraphTrainer:
                        """A driver that has started in one process works in no copy of it."""
                        accelerator = open_accelerator(places.get(name, ProcessPlace()).accelerator)
                        return GraphTrainer(*self.order(name, whole, plan, fleet), data, accelerator)

                    serve_replica(trainer, place)
                    return
                assert replan is not None, "of a run with pipelines"
                prepared = pipeline_prepared(whole, groups, name)
                pipeline = ReplicaPipeline(
                    prepared=prepared,
                    plan=plan,
                    fleet=fleet.subset(devices),
                    places=places,
                    replan=partial(replan, prepared),
                    folder=replica_folder(folder, name),
                    began_s=begin.began_s,
                )
                serve_pipeline(own, pipeline, place, self.machine.steps(name))

            return act

        acts = {name: serve(name) for name in groups}
        self.processes = Forked(acts, folder / "logs")

    def _keep(self, prepared: Prepared, plans: Mapping[str, Plan]) -> None:
        """Leave what replicas need where they look for it."""
        keep_prepared(prepared, self._folder / CAPTURED)
        for name, plan in plans.items():
            folder = replica_folder(self._folder, name)
            folder.mkdir(parents=True, exist_ok=True)
            save_plan(plan, folder / PLAN)

    def run(
        self,
        prepared: Prepared,
        plans: Mapping[str, Plan],
        step_s: Mapping[str, float],
        watch: MergerWatch,
        stop: Stop,
    ) -> DecoupledOutcome:
        """To the end. `step_s` is how long a step of each replica of one device takes at least."""
        job = self._job
        self._keep(prepared, plans)
        host = self._host({name: back for name, (_, back) in self._links.items()}, watch)
        listener = Listener("127.0.0.1", timeout_s=job.timeout_s)
        listener.start(host.acceptor.on_connection)
        address, micro_batches = f"127.0.0.1:{listener.port}", prepared.job.micro_batches
        begin = _Begin(address, dict(step_s), time.monotonic(), micro_batches)
        self.processes.begin(msgspec.json.encode(begin).decode())
        try:
            return self._coordinate(host, StartedProcesses(self.processes.ended), stop)
        finally:
            listener.close()
