"""A job: which model, which data, how to train it, on which fleet. One TOML file."""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import torch
from msgspec import Meta
from torch import nn

from isthmus.cost import ParameterState, Problem, SyncPolicy, parameter_state
from isthmus.cost.compression import ratio_planner_names
from isthmus.cost.problem import FLOAT32_BYTES
from isthmus.data import DataSpec
from isthmus.data.description import DataDescription, describe, read_description
from isthmus.data.joined import joined_descriptions
from isthmus.documents import check_is_local, convert, read_toml
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_object, load_third_party, third_party
from isthmus.fleet import Change, Fleet, changed, in_half, resolve_fleet
from isthmus.graph import Flow
from isthmus.graph.captured import Capture, Captured, Column, read_captured, write_captured
from isthmus.models import ModelSpec, as_eager, build_model
from isthmus.plan import SCHEDULES, ActivationNoise, CompressionConfig, Objective, OwnSamples, Terms
from isthmus.protocol.finite import OnNonFinite
from isthmus.training.engine import EngineConfig
from isthmus.training.kernels import Kernels
from isthmus.training.optim import LearningRate, OptimizerConfig
from isthmus.training.preflight import check_limits, check_optimizers, check_types
from isthmus.training.scaling import LossScaling
from isthmus.units import parse_duration

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long, how much at once, how often to look and to save. Zero turns an `every` off."""

    steps: Positive = 100
    batch_size: Positive = 32
    """Samples per optimizer step."""
    micro_batches: Positive = 8
    """Parts of a batch that are in the pipeline at once; must divide `batch_size`."""
    seed: NotNegative = 0
    shuffle: bool = True
    precision: Precision = "fp32"
    """bf16 and fp16 compute and send in bfloat16 or float16 and keep fp32 master weights; fp16 scales the loss."""
    loss_scale: LossScaling | None = None
    """With fp16, how its scale begins and moves, where that is not as torch.amp.GradScaler has it."""
    clip_norm: Annotated[float, Meta(ge=0)] = 0.0
    non_finite: OnNonFinite = "stop"
    """A step whose loss or gradient norm is NaN or infinite ends the run; or its update is left out; or nothing is
    looked at."""
    non_finite_steps: Positive | None = None
    """So many of them in a row end the run; by default 1 with `stop`, 100 with `skip`."""
    eval_every: NotNegative = 0
    eval_samples: NotNegative = 256
    save_every: NotNegative = 0
    keep_checkpoints: Positive = 2

    @property
    def exchanges_norms(self) -> bool:
        """Whether stages wait for each other's gradient norms before they update."""
        return self.clip_norm > 0 or self.leaves_out

    @property
    def leaves_out(self) -> bool:
        """Whether the update of a step that is not finite is left out on every stage."""
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
            raise ValueError(f"loss_scale: got one with precision {self.precision!r}, expected precision 'fp16'")

    @property
    def most_non_finite_steps(self) -> int:
        """Consecutive steps that are not finite after which the run ends; 0: none are too many."""
        return 0 if self.non_finite == "ignore" else self.non_finite_steps or {"stop": 1, "skip": 100}[self.non_finite]


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan must respect besides time."""

    objective: Objective = "time"
    """`cost` minimises the price of a step: devices by the hour, and bytes that leave priced sites."""
    max_step: str = ""
    """With objective `cost`: how long a step may take ("2.5 s"). None: as long as is cheapest."""
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
    """How device processes run on this machine."""

    threads: Positive = 1
    """Torch threads of each device."""
    emulate: bool = True
    """Shape links and stretch compute to the fleet's figures."""
    device: str | dict[str, str] = "cpu"
    """Where device processes compute: `cpu`, `cuda:0`, ..., or `auto`, which deals this machine's accelerators out in
    turn. A table has a name per device; those that it leaves out take the CPU. Machines that join say it themselves."""
    tf32: bool | None = None
    """Whether float32 products and convolutions may use TF32, where the hardware has it; by default as torch does: in
    convolutions alone."""
    deterministic: bool = False
    """Whether equal inputs give equal bits on accelerators too: operators without such a kernel are refused."""
    patience: str = "60 s"
    """Silence after which a party counts as lost."""
    lease_ahead: Positive = 3
    recovery_attempts: Positive = 3
    """Attempts to go on after losses, with no step done in between, after which the run ends. The first loss of each
    device since the last step ends none."""
    snapshots: bool = True
    """Keep the state in the devices' memory from time to time, with a copy on another device: what a run goes on from
    when one is lost."""
    snapshot_every: NotNegative = 0
    """Steps between snapshots; 0: as the links have room for them."""
    adapt: bool = True
    """Measure devices and links from the work itself, and change the plan where that pays."""
    changes: tuple[Change, ...] = ()
    """Of the emulated fleet, along the run: to see what becomes of it."""


class PrivacyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of values before they leave a data holder."""

    activations: ActivationNoise


class Hooks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Callables as `package.module:name`, or names registered under the entry-point group `isthmus.hooks`."""

    step: str = ""
    """Called as hook(step: int, loss: float | None) after each step."""
    checkpoint: str = ""
    """Called as hook(step: int, directory: pathlib.Path) when a checkpoint is complete."""
    finish: str = ""
    """Called as hook(run: pathlib.Path, outcome: str) at the end."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole job file."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: ModelSpec
    data: DataSpec
    fleet: str = "laptop"
    """A built-in topology or a path to a fleet TOML."""
    devices: Positive | None = None
    """Thin the fleet to so many devices."""
    planner: str = "auto"
    schedule: str = "1f1b"
    plan: PlanConfig = PlanConfig()
    compression: CompressionConfig | None = None
    """Without this table messages travel as they are."""
    run_dir: str = "runs"
    training: TrainingConfig = TrainingConfig()
    optimizer: tuple[OptimizerConfig, ...] = (OptimizerConfig(),)
    learning_rate: LearningRate = LearningRate()
    sync: SyncPolicy = SyncPolicy()
    """Of several replicas."""
    privacy: PrivacyConfig | None = None
    """Without this table values leave data holders as they were computed."""
    runtime: RuntimeConfig = RuntimeConfig()
    hooks: Hooks = Hooks()

    @property
    def micro_batch_size(self) -> int:
        return self.training.batch_size // self.training.micro_batches

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many micro-batches a plan may cut a batch."""
        return self.plan.micro_batches or (self.training.micro_batches,)

    def cut_into(self, micro_batches: int) -> Job:
        training = msgspec.structs.replace(self.training, micro_batches=micro_batches)
        return msgspec.structs.replace(self, training=training)

    @property
    def evaluates(self) -> bool:
        """Whether held-out samples are needed."""
        return self.training.eval_every > 0

    @property
    def patience_s(self) -> float:
        return parse_duration(self.runtime.patience, "runtime.patience")

    def engine(self) -> EngineConfig:
        t = self.training
        return EngineConfig(
            optimizers=self.optimizer, learning_rate=self.learning_rate, clip_norm=t.clip_norm, steps=t.steps,
            micro_batches=t.micro_batches, micro_batch_size=self.micro_batch_size, seed=t.seed,
            non_finite=t.non_finite, loss_scaling=t.loss_scaling,
            kernels=Kernels(tf32=self.runtime.tf32, deterministic=self.runtime.deterministic),
        )  # fmt: skip


def load_job(path: Path) -> Job:
    """Read and check a job file; UserError names the file, the field, what was got and what was expected."""
    job = convert(read_toml(path, "job file"), Job, str(path))
    t = job.training
    for count in job.counts:
        if t.batch_size % count:
            field = "plan.micro_batches" if job.plan.micro_batches else "training.micro_batches"
            raise UserError(
                f"{path}: training.batch_size: got {t.batch_size}, expected a multiple of {field} ({count})"
            )
    job = job.cut_into(job.counts[0])
    check_is_local(f"{path}: run_dir", job.run_dir)
    if t.steps % job.sync.period:
        raise UserError(
            f"{path}: training.steps: got {t.steps}, expected a multiple of sync.period ({job.sync.period}): replicas "
            "are equal only at the end of a period"
        )
    if job.plan.labels_stay and not job.plan.holders:
        raise UserError(f"{path}: plan.labels_stay: got true, expected a plan.data_holder where the labels stay")
    if job.privacy is not None and not job.plan.holders:
        raise UserError(f"{path}: privacy.activations: got one, expected a plan.data_holder that it is to protect")
    if "" in job.plan.holders:
        raise UserError(f"{path}: plan.data_holder: got an empty name, expected a device or a region")
    feeders = job.plan.feeders
    if job.plan.holders_data == "own" and not feeders:
        raise UserError(f"{path}: plan.holders_data: got 'own' without a plan.data_holder, expected one")
    if len(set(feeders)) < len(feeders):
        raise UserError(f"{path}: plan.data_holder: got {', '.join(feeders)}, expected each device once")
    if job.data.description and feeders:
        raise UserError(
            f"{path}: data.description: got one with plan.holders_data 'own', expected none: holders describe their own"
        )
    for name in job.data.of:
        if name not in feeders:
            whose = ", ".join(feeders) or "none without plan.holders_data = 'own'"
            raise UserError(f"{path}: data.of: {name!r} is not among the holders with data of their own: {whose}")
    if job.schedule not in SCHEDULES:
        raise UserError(f"{path}: schedule: {unknown_name('schedule', job.schedule, SCHEDULES)}")
    if job.compression is not None and job.compression.method not in ratio_planner_names():
        name = unknown_name("method", job.compression.method, ratio_planner_names())
        raise UserError(f"{path}: compression.method: {name}")
    if not job.optimizer:
        raise UserError(f"{path}: optimizer: got an empty list, expected at least one [[optimizer]]")
    for optimizer in job.optimizer:
        if optimizer.nesterov and not optimizer.momentum:
            raise UserError(f"{path}: optimizer.nesterov: got true without momentum, expected momentum above 0")
    try:
        patience_s = job.patience_s
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    if job.runtime.changes and not job.runtime.emulate:
        raise UserError(f"{path}: runtime.changes: only an emulated fleet can be changed, and runtime.emulate is false")
    if not 1 <= patience_s < math.inf:
        raise UserError(f"{path}: runtime.patience: got {job.runtime.patience!r}, expected at least 1 s")
    return job


def fleet_of(job: Job) -> Fleet:
    """UserError for a fleet that is not there, or lacks a device that is to change or a data holder."""
    fleet = resolve_fleet(job.fleet)
    fleet = fleet.thin(job.devices) if job.devices is not None else fleet
    fleet = in_half(fleet) if job.training.precision != "fp32" else fleet
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


def terms_of(job: Job, fleet: Fleet, own_samples: Mapping[str, OwnSamples] = {}) -> Terms:
    """What the job asks of a plan on this fleet, of which devices may have been lost; `own_samples` are those of
    holders whose data are their own, once they are known. UserError where no data holder is left, or one with data of
    its own is not."""
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
    return Terms(
        objective=job.plan.objective, data_holders=holders,
        own_samples=tuple(own_samples[name] for name in feeders) if own_samples else (),
        labels_stay=job.plan.labels_stay,
        max_step_s=parse_duration(job.plan.max_step, "plan.max_step") if job.plan.max_step else None,
        max_price=job.plan.max_price, compression=job.compression,
        memory_headroom=job.plan.memory_headroom,
    )  # fmt: skip


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose model is captured on its data's columns. No weight is allocated yet."""

    job: Job
    captured: Captured
    samples: DataDescription
    """What is known of the data; nobody need have read them here."""
    origin: str
    """A digest of all that it was captured from."""

    def build(self) -> nn.Module:
        with contextlib.redirect_stdout(sys.stderr):
            return build_model(self.job.model)

    @property
    def flow(self) -> Flow:
        return Flow(self.captured.train, columns_first=bool(self.job.plan.holders))

    def cut_into(self, micro_batches: int) -> Prepared:
        return msgspec.structs.replace(self, job=self.job.cut_into(micro_batches))

    def problem(self, fleet: Fleet) -> Problem:
        """What a planner is asked."""
        t = self.job.training
        return Problem(
            flow=self.flow, fleet=fleet, micro_batch_size=self.job.micro_batch_size, micro_batches=t.micro_batches,
            schedule=self.job.schedule, sync=self.job.sync, state=_state(self.job),
            terms=terms_of(self.job, fleet, self.samples.holders), recompute=self.job.plan.recompute,
        )  # fmt: skip


class _About(msgspec.Struct, frozen=True):
    """Beside a capture on disk."""

    origin: str
    samples: DataDescription


def prepare(job: Job, samples: DataDescription | None = None) -> Prepared:
    """Build the model under fake tensors and capture it on batches made from what the data are like: `samples`, or the
    job's description file, or the data themselves, which are opened only where neither is given.

    Raises UserError for whatever is wrong with them, with how they fit together and the optimizers, or with a hook.
    """
    load_hooks(job.hooks)
    if samples is None and job.data.description:
        samples = described_in(job)
    elif samples is None:
        try:
            samples = described_here(job)
        except UserError as e:
            elsewhere = "; of data that are elsewhere, data.description names what `isthmus describe` wrote there"
            raise type(e)(f"{e}{elsewhere if job.plan.holders else ''}") from e
    columns = {name: Column(c.dtype, c.shape) for name, c in samples.columns.items()}
    # Imported when it is needed: torch.export takes seconds, and who goes on with a run has its graphs.
    capture = cast("Capture", import_object("isthmus", "isthmus.graph.capture:capture"))
    with contextlib.ExitStack() as stack:

        def build() -> nn.Module:
            module = build_model(job.model)
            stack.enter_context(as_eager(columns))  # only now is the module's library imported
            return module

        # stdout is data, and the user's constructor or forward may print.
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        captured = capture(build, columns, name=job.model.name, batch=job.micro_batch_size, dtype=job.training.dtype)
    return _checked(Prepared(job=job, captured=captured, samples=samples, origin=_origin(job)))


def described_here(job: Job) -> DataDescription:
    """What this machine's own data are like: opens them. UserError."""
    if not job.plan.feeders:
        return describe(job.data, heldout=job.evaluates)
    return joined_descriptions(
        {name: describe(job.data.at(name), heldout=job.evaluates) for name in job.plan.feeders}
    )


def described_in(job: Job) -> DataDescription:
    """The description file that the job names. UserError for one that is not of its data."""
    return read_description(Path(job.data.description), job.data, heldout=job.evaluates)


def _checked(prepared: Prepared) -> Prepared:
    train, columns = prepared.captured.train, prepared.samples.columns
    check_optimizers(prepared.job.optimizer, train.trainable)
    check_types(train)
    check_limits(train, {name: c.limit for name, c in columns.items() if c.limit is not None})
    return prepared


def keep_prepared(prepared: Prepared, path: Path) -> None:
    """For whoever goes on with a run in its middle: it finds the graphs that devices have, and captures nothing."""
    about = _About(origin=prepared.origin, samples=prepared.samples)
    write_captured(path, prepared.captured, msgspec.json.encode(about).decode())


def kept_prepared(job: Job, path: Path) -> Prepared | None:
    """What `prepare` made of the same model, data and sizes; None where nothing of the kind was kept. UserError for
    optimizers that do not fit."""
    found = read_captured(path)
    if found is None:
        return None
    captured, text = found
    try:
        about = msgspec.json.decode(text, type=_About)
    except ValueError:  # of another version
        return None
    if about.origin != _origin(job):
        return None
    return _checked(Prepared(job=job, captured=captured, samples=about.samples, origin=about.origin))


def _origin(job: Job) -> str:
    told = (
        job.model, job.data, job.plan.feeders, job.evaluates, job.micro_batch_size, job.training.precision,
        str(torch.__version__),
    )  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


def _state(job: Job) -> ParameterState:
    """The largest per-parameter state among the job's optimizers: a stage may hold parameters of any of them."""
    narrow = job.training.precision != "fp32"
    states = [parameter_state(o.name, momentum=o.momentum > 0, narrow=narrow) for o in job.optimizer]
    largest = max(states, key=lambda s: s.optimizer_bytes)
    outer = job.sync.outer
    kept_bytes = 0 if outer is None else FLOAT32_BYTES * (2 if outer.momentum else 1)
    return msgspec.structs.replace(largest, optimizer_bytes=largest.optimizer_bytes + kept_bytes)


def load_hooks(hooks: Hooks) -> dict[str, Callable[..., object]]:
    """Those that the job names, by what they are called for."""
    named = {"step": hooks.step, "checkpoint": hooks.checkpoint, "finish": hooks.finish}
    found: dict[str, Callable[..., object]] = {}
    for kind, name in named.items():
        if name:
            try:
                found[kind] = load_hook(name)
            except UserError as e:
                raise UserError(f"hooks.{kind}: {e}") from None
    return found


def load_hook(name: str) -> Callable[..., object]:
    """A callable named in a job: `package.module:name`, or an entry point of `isthmus.hooks`."""
    registered = third_party("isthmus.hooks")
    if name not in registered and ":" not in name:
        raise unknown_name("hook", name, [*registered, "package.module:callable"])
    found = load_third_party(registered[name]) if name in registered else import_object("hook", name)
    if not callable(found):
        raise UserError(f"hook {name!r}: expected a callable, got {found!r}")
    return found
