"""Small jobs of decoupled replicas, simulated with what they compute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import msgspec
import torch

from isthmus.api.decoupled import replica_plans
from isthmus.api.make_plan import plan_for, steady_on
from isthmus.cost import SyncPolicy
from isthmus.data import DataSpec, load_dataset
from isthmus.experiments import OptimizerConfig
from isthmus.fleet import Fleet, Link
from isthmus.job import Job, TrainingConfig, constraints_of, prepare
from isthmus.models import ModelSpec
from isthmus.protocol.decoupled_events import MergeRules
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.coordinator.data_holders import DataHolders
from isthmus.runtime.decoupled.merged_run import merge_rules
from isthmus.runtime.decoupled.run import Replicas
from isthmus.runtime.processes.signals import Stop
from isthmus.simulator import Fault
from isthmus.simulator.merging import FragmentBytes, MergingSimulation, ReplicaModel, SimulatedReplicas
from isthmus_testing.decoupled_replay import ReplicasTogether, job_together
from tests.runtime.commands import devices_of

NAMES = ("a", "b", "c", "d")
STEP_S = (0.4, 0.4, 0.2, 0.1)
"""Speeds 1:1:2:4."""
LINK = Link(0.02, 20e6 / 8)
PAIR = """
name = "pair"
[[device]]
name = "a"
region = "x"
compute = "{} MFLOPS"
memory = "1 GiB"
count = 1
[[device]]
name = "b"
region = "y"
compute = "{} MFLOPS"
memory = "1 GiB"
count = 1
[[link]]
from = "x"
to = "y"
latency = "5 ms"
bandwidth = "100 Mbit/s"
"""
"""Two devices in two regions; their MFLOPS are given."""
SIZES = FragmentBytes(delta=(20_000,) * 2, change=(20_000,) * 2, whole=(140_000,) * 2)


def job_of(**decoupled: object) -> Job:
    """An MLP on digits, 16 samples a batch, two fragments."""
    torch.set_num_threads(1)
    sync = {"mode": "decoupled", "period": 4, "decoupled": {"fragments": 2, **decoupled}}
    return Job(
        name="small",
        model=ModelSpec(name="mlp"),
        data=DataSpec(kind="digits"),
        training=TrainingConfig(steps=40, batch_size=16, micro_batches=4),
        optimizer=(OptimizerConfig(name="sgd", lr=0.05, momentum=0.9),),
        sync=msgspec.convert(sync, SyncPolicy),
    )


def replicas(samples: int = 4, names: Sequence[str] = NAMES) -> list[ReplicaModel]:
    return [
        ReplicaModel(name=name, step_s=step_s, samples=samples, up=LINK, down=LINK)
        for name, step_s in zip(names, STEP_S, strict=False)
    ]


def rules(samples: int | None = 9600, fragments: int = 2, quorum: int = 2) -> MergeRules:
    return MergeRules(
        samples=samples, merge_every=64 / fragments, fragments=fragments, quorum=quorum, grace=0.5, timeout_s=60
    )


def replicas_of(job: Job, fleet: Fleet, backend: LocalBackend | None = None) -> Replicas:
    """The job's replicas on processes of this machine."""
    prepared, backend = prepare(job), backend or LocalBackend()
    reading = constraints_of(job, fleet).data_holders or fleet.names
    holders = DataHolders(backend.asks(Stop()), job.used_data, reading, heldout=False)
    holders.ask()
    return Replicas(
        prepared=prepared,
        fleet=fleet,
        plans=replica_plans(prepared, fleet),
        backend=backend,
        holders=holders,
        replan=partial(plan_for, proving=None),
        steady_s=steady_on,
    )


def pid_of(device: str) -> int:
    """Of its process, which this one has started."""
    return devices_of(os.getpid())[device]


def computed(job: Job, faults: Sequence[Fault] = ()) -> tuple[SimulatedReplicas, ReplicasTogether]:
    """The job on the virtual clock, with what its replicas compute."""
    together = job_together(job, load_dataset(job.used_data, "train"), NAMES)
    simulation = MergingSimulation(merge_rules(job), replicas(), SIZES, faults, together)
    return simulation.run(), together
