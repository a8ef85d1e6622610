"""The job file: the tables that every program has, those of a pipeline, how a file is read and checked, and what a job
asks of a plan on its fleet."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import msgspec
import torch
from msgspec import Meta

from isthmus.callbacks import CallbackConfig
from isthmus.combinations import refused
from isthmus.cost import SyncPolicy
from isthmus.cost.compression import ratio_planner_names
from isthmus.data import DataSpec
from isthmus.disclosure import ActivationNoise
from isthmus.documents import JOB_NAME, beside, check_is_local, convert, folder_of, read_toml
from isthmus.engines import check_engine
from isthmus.errors import UserError, unknown_name
from isthmus.fleet import Fleet, FleetChange, changed, in_half, resolve_fleet
from isthmus.graph.metrics import Metrics
from isthmus.models import ModelSpec
from isthmus.overrides import counted_from, overridden, overridden_struct
from isthmus.plans import CHOICES, CompressionConfig, Constraints, LackingOperators, Objective, OwnSamples
from isthmus.protocol.finite import OnNonFinite
from isthmus.stores import StoreConfig
from isthmus.trackers import Track, check_trackers
from isthmus.training.engine import EngineConfig
from isthmus.training.kernels import Kernels
from isthmus.training.learning_rate import LearningRate
from isthmus.training.optim import OptimizerConfig, settings_of
from isthmus.training.scaling import LossScaling
from isthmus.units import parse_duration
from isthmus.wire_types import MOST_COUNT, Seed, Threads


class JobDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a job file that every program has."""

    LENGTH: ClassVar[str]  # the key with the length of the run, in steps or rounds
    name: Annotated[str, Meta(pattern=JOB_NAME)]  # The run's name: its folder is RUN_DIR/NAME.
    model: ModelSpec  # Which model to train.
    metrics: tuple[str, ...] = ()
    """Figures of evaluations beside the loss: `accuracy`, `perplexity`, or `package.module:function` of your own."""
    run_dir: str = "runs"  # Where run folders are made.
    callback: tuple[CallbackConfig, ...] = ()  # One table [[callback]] per callback of your own.
    track: Track = Track()  # Which trackers get the run's figures.
    store: StoreConfig | None = None  # Where the run is kept besides its folder; without this table nowhere.

    @property
    def kind(self) -> Literal["pipeline", "federated"]:
        """Its program."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Optimizer steps, or rounds, of the whole run."""
        raise NotImplementedError

    @property
    def has_sites(self) -> bool:
        """Whether it trains where data are kept by their owners."""
        return False

    def unset_by(self, overrides: Mapping[str, object]) -> dict[str, object]:
        """Overrides of defaults in whose place others stand."""
        return {}

    def check_metrics(self) -> None:
        """UserError for names that mean nothing."""
        _ = Metrics(self.metrics)

    def check_common(self) -> None:
        """UserError for values of these tables that cannot be."""
        check_is_local("run_dir", self.run_dir)
        check_trackers(self.track)
        self.check_metrics()


AnyJob = TypeVar("AnyJob", bound=JobDocument)


@dataclass(frozen=True)
class JobReader(Generic[AnyJob]):
    """How a program's job is read."""

    struct: type[AnyJob]
    located: Callable[[AnyJob, str], AnyJob]  # with paths that count from a folder
    checked: Callable[[AnyJob], AnyJob]  # UserError for settings that do not go together

    def load(self, path: Path, overrides: Mapping[str, object] = {}) -> AnyJob:
        """Read and check a job file; UserError names the file, the field, what was got and what was expected."""
        folder = folder_of(path)
        given = counted_from(overrides, os.getcwd()) if folder else overrides
        job = convert(overridden(read_toml(path, "job file"), given, str(path)), self.struct, str(path))
        job = self.located(job, folder)
        try:
            return self.checked(job)
        except UserError as e:
            raise type(e)(f"{path}: {e}") from None

    def overridden(self, job: AnyJob, overrides: Mapping[str, object], source: str = "job") -> AnyJob:
        """A job from Python, checked too. UserError."""
        return self.checked(overridden_struct(job, {**job.unset_by(overrides), **overrides}, source))


Positive = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
NotNegative = Annotated[int, Meta(ge=0, le=MOST_COUNT)]


Precision = Literal["fp32", "bf16", "fp16"]
MOST_MICRO_BATCHES = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps, batch, evaluation and checkpoints. Zero turns an `every` off."""

    steps: Positive = 100  # Optimizer steps of the whole run.
    batch_size: Positive = 32  # Samples per optimizer step.
    micro_batches: Positive | None = None
    """Parts of a batch that are in the pipeline at once; must divide `batch_size`. By default as many as divide it, up
    to 8; or 1, where the loss is a mean of the model's own, which may be another with each number."""
    seed: Seed = 0  # The seed of weights, dropout and the order of samples.
    shuffle: bool = True  # Whether every pass over the data has an order of its own; false: as they lie.
    precision: Precision = "fp32"
    """bf16 and fp16 compute and send in bfloat16 or float16 and keep fp32 master weights; fp16 scales the loss."""
    loss_scale: LossScaling | None = None
    """With fp16, how its scale begins and moves, where that is not as torch.amp.GradScaler has it."""
    clip_norm: Annotated[float, Meta(ge=0)] = 0.0  # Largest norm of all gradients together; 0: they are not clipped.
    non_finite: OnNonFinite = "stop"
    """A step whose loss or gradient norm is NaN or infinite ends the run; or its update is left out; or nothing is
    looked at."""
    non_finite_steps: Positive | None = None
    """So many of them in a row end the run; by default 1 with `stop`, 100 with `skip`."""
    eval_every: NotNegative = 0  # Steps between evaluations on held-out samples; 0: none.
    eval_samples: NotNegative = 256
    """Held-out samples of an evaluation, at most: of more, so many drawn at random, the same in every evaluation."""
    save_every: NotNegative = 0  # Steps between checkpoints; 0: at the end only.
    keep_checkpoints: Positive = 2  # Newest checkpoints that are kept.

    @property
    def exchanges_norms(self) -> bool:
        """Return whether stages wait for each other's gradient norms before they update."""
        return self.clip_norm > 0 or self.leaves_out

    @property
    def leaves_out(self) -> bool:
        """Return whether the update of a step that is not finite is left out on every stage."""
        return self.non_finite == "skip" or self.loss_scaling is not None

    @property
    def loss_scaling(self) -> LossScaling | None:
        return (self.loss_scale or LossScaling()) if self.precision == "fp16" else None

    @property
    def dtype(self) -> torch.dtype:
        """In which stages compute."""
        return DTYPES[self.precision]

    def __post_init__(self) -> None:
        if self.loss_scale is not None and self.precision != "fp16":
            raise ValueError(f"loss_scale: got a scale with precision {self.precision!r}, expected precision 'fp16'")

    @property
    def most_non_finite_steps(self) -> int:
        """Consecutive steps that are not finite after which the run ends; 0: none are too many."""
        return 0 if self.non_finite == "ignore" else self.non_finite_steps or {"stop": 1, "skip": 100}[self.non_finite]


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constraints on a plan besides time."""

    objective: Objective = "time"
    """`cost` minimises the price of a step: devices by the hour, and bytes that leave priced sites."""
    max_step: str = ""  # With objective `cost`: how long a step may take ("2.5 s"). None: as long as is cheapest.
    max_price: Annotated[float, Meta(gt=0)] | None = None
    """With objective `time`: what 1,000 steps may cost, in the unit of the fleet's prices."""
    data_holder: str | tuple[str, ...] = ()
    """A device or a region that has the data, or several: only they read it. None: the data are everywhere."""
    holders_data: Literal["same", "own"] = "same"
    """`same`: any one of the data holders reads for all. `own`: each has other samples, and all take part: every one
    runs the first stage on its own data."""
    micro_batches: tuple[Positive, ...] = ()
    """Into how many a plan may cut a batch; none: into `training.micro_batches`. Each divides `training.batch_size`."""
    recompute: bool = True
    """Whether stages short of memory may run their forward twice instead of keeping what it saves."""
    memory_headroom: Annotated[float, Meta(ge=0, lt=1)] = 0.10
    """Share of each device's memory that plans leave free: for what is not in the model of memory, as allocators'
    fragments and libraries' workspaces."""
    labels_stay: bool = False
    """Labels do not leave the data holders: they run the last part of the model as well as the first."""

    @property
    def feeders(self) -> tuple[str, ...]:
        """The holders, where each has data of its own."""
        return self.holders if self.holders_data == "own" else ()

    @property
    def holders(self) -> tuple[str, ...]:
        return (self.data_holder,) if isinstance(self.data_holder, str) else self.data_holder


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the device processes on this machine."""

    threads: Threads = 1  # Torch threads of each device.
    emulate: bool = True  # Shape links and stretch compute to the fleet's figures.
    device: str | dict[str, str] = "cpu"
    """Where device processes compute: `cpu`, `cuda:0`, ..., or `auto`, which deals this machine's accelerators out in
    turn. A table has a name per device; those that it leaves out take the CPU. Machines that join say it themselves."""
    engine: str | dict[str, str] = {}
    """The framework of device processes: `torch` or `jax`. A table has a name per device; those that it
    leaves out have what the fleet file says, which is torch by default. Machines that join say it themselves."""
    tf32: bool | None = None
    """Whether float32 products and convolutions may use TF32, where the hardware has it; by default as torch does: in
    convolutions alone."""
    deterministic: bool = False
    """Whether equal inputs give equal bits on accelerators too: operators without such a kernel are refused."""
    compile: bool = False
    """Whether a stage's operators are joined by torch.compile, where a measurement on its device says that it pays.
    Rounding then differs, from device to device and from run to run."""
    timeout: str = "60 s"  # Silence after which a peer counts as lost.
    lease_ahead: Positive = 3  # Steps that a device receives before it needs them.
    recovery_attempts: Positive = 3
    """Attempts to go on after losses, with no step done in between, after which the run ends. The first loss of each
    device since the last step ends none."""
    fingerprints: bool = False
    """Keep a keyed hash of what each device sends, receives and computes in every step: `isthmus audit` compares."""
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the steps that are computed again while the run works, on idle devices of the fleet, or else on the
    coordinator's machine: drawn at each checkpoint, for the steps since the one before. Above 0 it implies
    `fingerprints`."""
    snapshots: bool = True
    """Keep the state in the devices' memory from time to time, with a copy on another device: what a run goes on from
    when one is lost."""
    snapshot_every: NotNegative = 0  # Steps between snapshots; 0: as the links have room for them.
    adapt: bool = True  # Measure devices and links from the work itself, and change the plan where that pays.
    changes: tuple[FleetChange, ...] = ()  # Changes of the emulated fleet during the run, to see what becomes of it.


class PrivacyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Noise and clipping of values before they leave a data holder."""

    activations: ActivationNoise  # Clipping and Gaussian noise on activations that leave a data holder.


class Job(JobDocument, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole job file.

    Raises `UserError` where `load_job` or `checked` finds a value that cannot be.

    >>> import isthmus
    >>> from isthmus.data import DataSpec
    >>> from isthmus.job import TrainingConfig
    >>> from isthmus.models import ModelSpec
    >>> job = isthmus.Job(
    ...     name="first",
    ...     model=ModelSpec(name="mlp"),
    ...     data=DataSpec(kind="digits"),
    ...     training=TrainingConfig(steps=20),
    ... )
    >>> job.fleet, job.planner, job.training.steps
    ('laptop', 'auto', 20)
    """

    LENGTH: ClassVar[str] = "training.steps"
    data: DataSpec  # Which data to train on.
    fleet: str = "laptop"  # A built-in fleet or a path to a fleet TOML.
    devices: Positive | None = None  # Thin the fleet to so many devices.
    planner: str = "auto"  # Who plans: one of `isthmus planners`, or `package.module:function` of your own.
    schedule: str = "1f1b"
    """In which order a stage computes micro-batches: `1f1b`, `gpipe`, `zero-bubble` (weight gradients apart, when
    nothing else is ready), `auto`, the quicker of `1f1b` and `zero-bubble` for the plan; or `delayed`: `1f1b` without a
    pause between steps, each of which computes at the weights before the last update."""
    plan: PlanConfig = PlanConfig()  # Conditions on a plan besides time.
    compression: CompressionConfig | None = None  # Without this table messages travel as they are.
    training: TrainingConfig = TrainingConfig()
    """How long to train, in which batches and precision, when to evaluate and to save."""
    optimizer: tuple[OptimizerConfig, ...] = (OptimizerConfig(),)
    """One table [[optimizer]] per group of parameters; the first whose pattern matches a parameter updates it."""
    learning_rate: LearningRate = LearningRate()
    """The learning rate by step: a factor on every optimizer's own, or a scheduler of torch."""
    sync: SyncPolicy = SyncPolicy()  # How several replicas synchronise.
    privacy: PrivacyConfig | None = None  # Without this table values leave data holders as they were computed.
    runtime: RuntimeConfig = RuntimeConfig()  # How device processes run.

    @property
    def kind(self) -> Literal["pipeline"]:
        """Its program."""
        return "pipeline"

    @property
    def length(self) -> int:
        """Optimizer steps of the whole run."""
        return self.training.steps

    def check_metrics(self) -> None:
        """UserError for names that mean nothing, and where nothing is evaluated."""
        if Metrics(self.metrics).names and not self.evaluates:
            raise UserError(f"metrics: got {list(self.metrics)} with training.eval_every = 0, expected 1 or more")

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch, unless a plan has another number. This is the default before the model is known
        (`Prepared.job` has it)."""
        batch, most = self.training.batch_size, range(MOST_MICRO_BATCHES, 0, -1)
        return self.training.micro_batches or next(count for count in most if batch % count == 0)

    @property
    def micro_batch_size(self) -> int:
        """Samples."""
        return self.training.batch_size // self.micro_batches

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many micro-batches a plan may cut a batch."""
        return self.plan.micro_batches or (self.micro_batches,)

    def cut_into(self, micro_batches: int) -> Job:
        """The job with batches of so many micro-batches."""
        training = msgspec.structs.replace(self.training, micro_batches=micro_batches)
        return msgspec.structs.replace(self, training=training)

    @property
    def evaluates(self) -> bool:
        """Return whether held-out samples are needed."""
        return self.training.eval_every > 0

    @property
    def used_data(self) -> DataSpec:
        """Nothing is held out where nothing is evaluated."""
        return self.data if self.evaluates else self.data.training_alone()

    @property
    def timeout_s(self) -> float:
        """Seconds without a message after which a device is lost."""
        return parse_duration(self.runtime.timeout, "runtime.timeout")

    def engine(self) -> EngineConfig:
        """The settings that every stage computes by."""
        t, r = self.training, self.runtime
        return EngineConfig(
            optimizers=self.optimizer,
            learning_rate=self.learning_rate.tabled(t.steps),
            clip_norm=t.clip_norm,
            steps=t.steps,
            micro_batches=self.micro_batches,
            micro_batch_size=self.micro_batch_size,
            seed=t.seed,
            non_finite=t.non_finite,
            loss_scaling=t.loss_scaling,
            kernels=Kernels(tf32=r.tf32, deterministic=r.deterministic, compile=r.compile),
        )


def _counted_from(job: Job, folder: str) -> Job:
    """Return the job as a file in this folder says it: with its paths."""
    job = msgspec.structs.replace(job, fleet=beside(job.fleet, folder), data=job.data.counted_from(folder))
    pretrained = job.model.options.get("path")
    if isinstance(pretrained, str):
        options = {**job.model.options, "path": beside(pretrained, folder)}
        job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, options=options))
    return job


def checked(job: Job) -> Job:
    """The job, cut into the first of its numbers of micro-batches, if it says any. UserError for settings that do not
    go together."""
    _check_training(job)
    _check_holders(job)
    job.check_common()
    if job.store is not None and job.privacy is not None:
        raise refused("store", "activation noise", "one")
    if job.schedule not in CHOICES:
        raise UserError(f"schedule: {unknown_name('schedule', job.schedule, CHOICES)}")
    if job.schedule == "delayed":
        _check_delayed(job)
    if job.compression is not None and job.compression.method not in ratio_planner_names():
        raise UserError(f"compression.method: {unknown_name('method', job.compression.method, ratio_planner_names())}")
    if job.runtime.compile and job.runtime.deterministic:
        raise refused("compile", "deterministic", True)
    if job.runtime.changes and not job.runtime.emulate:
        raise refused("changes", "real devices", "some")
    if not 1 <= job.timeout_s < math.inf:
        raise UserError(f"runtime.timeout: got {job.runtime.timeout!r}, expected at least 1 s")
    return job.cut_into(job.plan.micro_batches[0]) if job.plan.micro_batches else job


PIPELINE = JobReader(Job, _counted_from, checked)


def load_job(path: Path, overrides: Mapping[str, object] = {}) -> Job:
    """Return the same as `JobReader.load`."""
    return PIPELINE.load(path, overrides)


def _check_delayed(job: Job) -> None:
    """Two steps are under way at once: what changes how a step computes by what the one before gave cannot be."""
    t = job.training
    if t.leaves_out:
        raise refused("skipped steps", "delayed", "steps that may be left out")
    if job.sync.mode != "every-step":
        raise refused("averaged replicas", "delayed", repr(job.sync.mode))
    if job.plan.feeders:
        raise refused("own data", "delayed", "'own'")
    if job.privacy is not None:
        raise refused("activation noise", "delayed", "noise")


def _check_training(job: Job) -> None:
    t = job.training
    for count in job.counts:
        if t.batch_size % count:
            field = "plan.micro_batches" if job.plan.micro_batches else "training.micro_batches"
            raise UserError(f"training.batch_size: got {t.batch_size}, expected a multiple of {field} ({count})")
    if job.sync.mode != "decoupled" and t.steps % job.sync.every:
        raise UserError(
            f"training.steps: got {t.steps}, expected a multiple of sync.period ({job.sync.every}): replicas are "
            "equal only at the end of a period"
        )
    if not job.optimizer:
        raise UserError("optimizer: got an empty list, expected at least one [[optimizer]]")
    for optimizer in job.optimizer:
        if optimizer.nesterov and not optimizer.momentum:
            raise UserError("optimizer.nesterov: got true without momentum, expected momentum above 0")
        settings_of(optimizer, job.learning_rate.tabled(t.steps), t.steps)


def _check_holders(job: Job) -> None:
    plan, feeders = job.plan, job.plan.feeders
    if plan.labels_stay and not plan.holders:
        raise UserError("plan.labels_stay: got true, expected a plan.data_holder where the labels stay")
    if job.privacy is not None and not plan.holders:
        raise UserError("privacy.activations: got noise, expected a plan.data_holder whose data it is to protect")
    if "" in plan.holders:
        raise UserError("plan.data_holder: got an empty name, expected a device or a region")
    if plan.holders_data == "own" and not feeders:
        raise UserError("plan.holders_data: got 'own' without a plan.data_holder, expected one")
    if len(set(feeders)) < len(feeders):
        raise UserError(f"plan.data_holder: got {', '.join(feeders)}, expected each device once")
    if job.data.description and feeders:
        raise refused("a description", "own data", repr(job.data.description))
    for name in job.data.of:
        if name not in feeders:
            whose = ", ".join(feeders) or "none without plan.holders_data = 'own'"
            raise UserError(f"data.of: {name!r} is not among the holders with data of their own: {whose}")


def fleet_of(job: Job) -> Fleet:
    """UserError for a fleet that is not there, or lacks a device that is to change or a data holder."""
    fleet = resolve_fleet(job.fleet)
    fleet = fleet.thin(job.devices) if job.devices is not None else fleet
    fleet = in_half(fleet) if job.training.precision != "fp32" else fleet
    fleet = _with_engines(fleet, job.runtime.engine)
    for number, change in enumerate(job.runtime.changes):
        try:
            changed(fleet, [change], change.step)
        except UserError as e:
            raise UserError(f"runtime.changes[{number}]: {e}") from None
    for name in job.plan.holders:
        try:
            fleet.located(name)
        except UserError as e:
            thinned = f", of which {job.devices} devices are left," if job.devices is not None else ""
            raise UserError(f"plan.data_holder: fleet {fleet.name!r}{thinned}: {e}") from None
    return fleet


def _with_engines(fleet: Fleet, chosen: str | Mapping[str, str]) -> Fleet:
    """Return the fleet with engines by `[runtime] engine`. UserError for a device or an engine that does not exist."""
    field = "runtime.engine" if isinstance(chosen, str) else "runtime.engine.{}"
    by_device = dict.fromkeys(fleet.names, chosen) if isinstance(chosen, str) else chosen
    for device in by_device:
        if device not in fleet.names:
            raise UserError(f"runtime.engine: {unknown_name('device', device, fleet.names)}")
    engines = {device: check_engine(field.format(device), name) for device, name in by_device.items()}
    devices = (msgspec.structs.replace(d, engine=engines.get(d.name, d.engine)) for d in fleet.devices)
    return msgspec.structs.replace(fleet, devices=tuple(devices)) if engines else fleet


def constraints_of(
    job: Job,
    fleet: Fleet,
    own_samples: Mapping[str, OwnSamples] = {},
    lacking: Sequence[LackingOperators] = (),
) -> Constraints:
    """The constraints that the job sets on a plan for this fleet, which may have lost devices. `own_samples` are the
    samples of holders with data of their own, once known. Raises UserError if no data holder is left, or if a holder
    with data of its own is missing."""
    found: list[str] = []
    for name in job.plan.holders:
        with contextlib.suppress(UserError):
            found += fleet.located(name)
    if job.plan.holders and not found:
        raise UserError(f"plan.data_holder: none of the data holders is there: {', '.join(job.plan.holders)}")
    feeders = job.plan.feeders
    for name in feeders:
        if name not in fleet.names:
            region = any(device.region == name for device in fleet.devices)
            what = f"got region {name!r}, expected devices" if region else f"device {name!r} is not there"
            raise UserError(f"plan.data_holder: {what}: each has data of its own")
    holders = feeders or tuple(name for name in fleet.names if name in found)
    return Constraints(
        objective=job.plan.objective,
        data_holders=holders,
        own_samples=tuple(own_samples[name] for name in feeders) if own_samples else (),
        labels_stay=job.plan.labels_stay,
        max_step_s=parse_duration(job.plan.max_step, "plan.max_step") if job.plan.max_step else None,
        max_price=job.plan.max_price,
        compression=job.compression,
        memory_headroom=job.plan.memory_headroom,
        lacking=tuple(lacking),
    )
