"""A run of decoupled replicas of any kind has a merger, and the model that the merger makes; and which devices train a
replica, by the job."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from msgspec import UnsetType
from torch import Tensor, nn

from isthmus.cost import SyncPolicy
from isthmus.data import Dataset
from isthmus.data.dataset import any_left_out, evaluation_rows
from isthmus.data.replica_share import ReplicaShare
from isthmus.errors import UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.graph.metrics import NO_METRICS, Metrics
from isthmus.graph.outputs import evaluate
from isthmus.job import Job, Prepared
from isthmus.models import build_model
from isthmus.plans import OuterOptimizer
from isthmus.programs.merger import Merger
from isthmus.programs.merging import Finish
from isthmus.protocol.decoupled_events import (
    NOTHING_MERGED,
    MergeChanges,
    MergeRules,
    MergesDone,
)
from isthmus.rng import torch_seed
from isthmus.run_files import LinesFile
from isthmus.runtime.coordinator.data_holders import Digests
from isthmus.runtime.decoupled.merger import MergeTraffic
from isthmus.training.checkpoint import (
    OPTIMIZER,
    CheckpointWriter,
    Manifest,
    checkpoint_files,
    load_checkpoint,
    read_manifest,
)
from isthmus.training.decoupled import MergedFragments, change_codec, check_model, flat, flat_fragments, fragments_of
from isthmus.training.finite import is_finite
from isthmus.training.optim import MOMENTUM
from isthmus.training.weights import parameter_names

Groups = dict[str, tuple[str, ...]]
"""The devices of each replica in the fleet's order, by its name. A replica of one device has that device's name."""


FIELD = "sync.decoupled.replicas"


def replica_groups(job: Job, fleet: Fleet) -> Groups:
    """In the order of the fleet's devices. UserError for lists that are not a partition of the fleet."""
    asked = job.sync.decoupled.replicas
    if asked == "devices":
        return {name: (name,) for name in fleet.names}
    if asked == "regions":
        found: dict[str, list[str]] = {}
        for device in fleet.devices:
            found.setdefault(device.region, []).append(device.name)
        return {_name(devices, region): tuple(devices) for region, devices in found.items()}
    named = Counter(name for group in asked for name in group)
    for name, count in named.items():
        if name not in fleet.names:
            raise UserError(f"{FIELD}: {unknown_name('device', name, fleet.names)}")
        if count > 1:
            raise UserError(f"{FIELD}: got {name!r} {count} times, expected each device once")
    if missing := [name for name in fleet.names if name not in named]:
        raise UserError(f"{FIELD}: got no replica for {', '.join(missing)}, expected each device in one")
    if not all(asked):
        raise UserError(f"{FIELD}: got an empty list, expected at least one device in each")
    groups = sorted((sorted(group, key=fleet.names.index) for group in asked), key=lambda g: fleet.names.index(g[0]))
    return {_name(group, "+".join(group)): tuple(group) for group in groups}


def _name(devices: list[str], several: str) -> str:
    return several if len(devices) > 1 else devices[0]


def pipeline_prepared(prepared: Prepared, groups: Groups, name: str) -> Prepared:
    """Return the job of one replica with the whole job's model, which is captured already: micro-batches are as large.
    The learning rate is that of the whole run's steps."""
    job, training = prepared.job, prepared.job.training
    share = ReplicaShare(
        number=list(groups).index(name),
        own=training.batch_size // len(groups),
        batch=training.batch_size,
        seed=training.seed,
        shuffle=training.shuffle,
    )
    packed = job.sync.decoupled.packed
    own = msgspec.structs.replace(
        job,
        training=msgspec.structs.replace(
            training,
            batch_size=share.own,
            micro_batches=max(1, share.own // job.micro_batch_size),
            seed=torch_seed(training.seed, 0, share.number),
            shuffle=False,
            eval_every=0,
            save_every=0,
            keep_checkpoints=1,
        ),
        # A step is opened when the one before is over: only then is it known what comes with it.
        runtime=msgspec.structs.replace(job.runtime, lease_ahead=1, fingerprints=False, audit=0.0),
        sync=SyncPolicy(),
        compression=job.compression if not packed or name in packed else None,
        callback=(),
        store=None,
    )
    samples = msgspec.structs.replace(prepared.samples, train=share.samples)
    return msgspec.structs.replace(prepared, job=own, samples=samples, replica=share, shared=job.used_data)


def seeded_model(job: Job) -> nn.Module:
    """Return the model as every replica and the merger begin with it."""
    torch.manual_seed(job.training.seed)
    return build_model(job.model)


def merged_fragments(job: Job) -> MergedFragments:
    """The merger's side at the start."""
    rules = job.sync.decoupled
    outer = OuterOptimizer(rate=rules.rate, momentum=rules.momentum)
    return MergedFragments(flat_fragments(seeded_model(job), rules.fragments), outer, change_codec(rules))


@torch.no_grad()
def evaluated(
    module: nn.Module, data: Dataset, most: int, batch_size: int, metrics: Metrics = NO_METRICS
) -> tuple[float, dict[str, float | None]]:
    """The mean loss and the metrics of `most` held-out samples drawn at random, or of all where there are fewer.
    UserError of a metric."""
    module.eval()
    rows, columns = evaluation_rows(data, most), list(data.columns)
    batches = (data.batch(rows[start : start + batch_size], columns) for start in range(0, len(rows), batch_size))
    found = evaluate(module, batches, metrics, uneven=any_left_out(data.columns))
    module.train()
    return found


MERGES = "merges.jsonl"


class MergeLine(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float  # since the run began
    merge: MergeChanges


def merges_file(run: Path) -> LinesFile[MergeLine]:
    return LinesFile(run / MERGES, MergeLine, "merges")


def merge_rules(job: Job, replicas: int = 1) -> MergeRules:
    """Return the job's rules of merges and of its end, with so many replicas. A period that is not planned yet is 1."""
    training, rules = job.training, job.sync.decoupled
    period = 1 if job.sync.period == "auto" else job.sync.period
    return MergeRules(
        samples=training.steps * training.batch_size,
        merge_every=period * training.batch_size / rules.fragments,
        fragments=rules.fragments,
        quorum=rules.quorum,
        grace=rules.grace,
        timeout_s=job.timeout_s,
        step_samples=training.batch_size // replicas,
    )


@dataclass(frozen=True, kw_only=True)
class DecoupledOutcome:
    finish: Finish
    samples: int
    merges: int
    late: int  # contributions that came after their merge had ended, and were part of the next
    traffic: MergeTraffic
    seconds: float  # seconds of this session; merges are those of this session, too


class MergedRun:
    """Replicas may be processes here or devices of a fleet."""

    def __init__(self, job: Job, groups: Groups, checkpoint: Path | None = None, *, calls: bool = False) -> None:
        """`checkpoint`: to go on from. `calls`: as `Merger`. UserError for a model that cannot be merged, and for a
        checkpoint of another model or of another kind of run."""
        torch.set_num_threads(job.runtime.threads)
        self._job, self.groups = job, groups
        self.model: nn.Module = seeded_model(job)
        check_model(self.model)
        begun = NOTHING_MERGED if checkpoint is None else merges_of(checkpoint)
        rules = merge_rules(job, len(groups))
        if calls:
            rules = msgspec.structs.replace(rules, timeout_s=math.inf)  # devices may be away for long
        self.machine = Merger(rules, groups, calls=calls, begun=begun)
        self.merged: MergedFragments = merged_fragments(job)
        if checkpoint is not None:
            self._load(checkpoint)
        self._run = secrets.token_hex(16)

    def _load(self, checkpoint: Path) -> None:
        """The merged weights and the outer optimizer's state."""
        load_checkpoint(self.model, checkpoint)
        saved, fragments = checkpoint_files(checkpoint), self._fragments()
        names = {parameter: f"{OPTIMIZER}{name}.{MOMENTUM}" for name, parameter in self.model.named_parameters()}
        momenta = [
            flat([saved[names[p]].read() for p in fragment]) if all(names[p] in saved for p in fragment) else None
            for fragment in fragments
        ]
        self.merged.load([flat(fragment) for fragment in fragments], momenta)

    @property
    def digests(self) -> Digests:
        """Digests of the data, where devices have described them."""
        return {}

    def save(self, writer: CheckpointWriter) -> tuple[Path, bool]:
        """Save what is merged as a step's checkpoint; returns it, and whether its weights are finite."""
        self.fill()
        training, names = self._job.training, {p: name for name, p in self.model.named_parameters()}
        tensors: dict[str, Tensor] = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for fragment, momentum in zip(self._fragments(), self.merged.momenta, strict=True):
            if momentum is not None:
                for parameter, part in zip(fragment, momentum.split([p.numel() for p in fragment]), strict=True):
                    tensors[f"{OPTIMIZER}{names[parameter]}.{MOMENTUM}"] = part.view(parameter.shape)
        step = self.step
        writer.write(step, "merged", tensors)
        manifest = Manifest(
            step=step,
            seed=training.seed,
            batch=training.batch_size,
            shuffle=training.shuffle,
            data={device: dict(entry) for device, entry in self.digests.items()},
            finite=all(map(is_finite, self.merged.known)),  # a mask of -inf may be a buffer
            merges=self.machine.merges_done,
        )
        return writer.commit(manifest), manifest.finite

    @property
    def step(self) -> int:
        """The step of the job after the samples of all replicas so far."""
        return min(self.machine.samples // self._job.training.batch_size, self._job.training.steps)

    def shapes(self, prepared: Prepared) -> tuple[dict[str, tuple[int, ...]], ...]:
        """Return the shapes of each fragment's parameters, by the name that the graph has of them."""
        names = parameter_names(self.model)
        used = {op.target for op in prepared.captured.train.ops if op.kind == "parameter"}
        return tuple(
            {next((n for n in names[p] if n in used), names[p][0]): tuple(p.shape) for p in fragment}
            for fragment in self._fragments()
        )

    def fill(self) -> None:
        """Put what is merged into `model`."""
        self.merged.fill(self._fragments())

    def _fragments(self) -> list[list[nn.Parameter]]:
        return fragments_of(self.model, self._job.sync.decoupled.fragments)


def merges_of(checkpoint: Path) -> MergesDone:
    """Where the merges of a checkpoint's run are. UserError for one of a run without merges."""
    if isinstance(found := read_manifest(checkpoint).merges, UnsetType):
        raise UserError(f"resume: sync.mode: got 'decoupled', the checkpoint {checkpoint.name} was made with another")
    return found
