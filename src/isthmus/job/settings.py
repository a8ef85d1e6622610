"""The settings of a job file."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta

from isthmus.cost import SyncPolicy
from isthmus.data import DataSpec
from isthmus.disclosure import ActivationNoise
from isthmus.errors import UserError
from isthmus.fleet import FleetChange
from isthmus.graph.metrics import Metrics
from isthmus.job.document import JobDocument
from isthmus.plans import CompressionConfig, Objective
from isthmus.protocol.finite import OnNonFinite
from isthmus.training.engine import EngineConfig
from isthmus.training.kernels import Kernels
from isthmus.training.learning_rate import LearningRate
from isthmus.training.optim import OptimizerConfig
from isthmus.training.scaling import LossScaling
from isthmus.units import parse_duration
from isthmus.wire_types import MOST_COUNT, Seed, Threads

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
