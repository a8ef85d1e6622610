"""The plan: one JSON document that says who computes what, in which order, and what that should cost.

Everything that the runtime and the simulator need is in it, and everything that explains the choice.

A stage takes part in a run under its worker id. A device has one worker id, its own name, for the first of its stages.
Where it holds several, as a data holder where labels stay, each further stage has a worker id made from it: to the
protocol these are devices of their own, on one machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.errors import UserError, plain_types
from isthmus.fleet import Fleet
from isthmus.plans.collective import Collective
from isthmus.plans.constraints import Constraints
from isthmus.plans.exchanges import OuterOptimizer
from isthmus.plans.packing import Compression
from isthmus.plans.schedule import STEPS_AT_ONCE, Schedule
from isthmus.reading import read_json

_FURTHER = re.compile(r"/stage [0-9]+$")


def worker_id(device: str, number: int) -> str:
    """Name a device's stage with this number, from 0."""
    return f"{device}/stage {number + 1}" if number else device


def device_of(name: str) -> str:
    return _FURTHER.sub("", name)


def is_first(name: str) -> bool:
    """Return whether it is the one that every device has."""
    return device_of(name) == name


def worker_ids_of(devices: Sequence[str]) -> tuple[str, ...]:
    counted: Counter[str] = Counter()
    found: list[str] = []
    for device in devices:
        found.append(worker_id(device, counted[device]))
        counted[device] += 1
    return tuple(found)


PLAN_VERSION = 11
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a stage needs on its device."""

    weights: NotNegative
    gradients: NotNegative
    optimizer: NotNegative
    activations: NotNegative  # kept between forward and backward, for all micro-batches in flight at once
    recomputed: NotNegative = 0
    """Bytes that recomputation saves for one micro-batch, from the second forward to the end of the backward."""
    working: NotNegative = 0
    """Bytes of the operator that needs most while it runs, such as gradients of logits or of an embedding, and of the
    gradients that come from stages which share this stage's parameters."""

    @property
    def total(self) -> int:
        kept = self.weights + self.gradients + self.optimizer + self.activations
        return kept + self.recomputed + self.working


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A run of operators on one device. FLOPs are for one micro-batch."""

    device: str
    first: NotNegative  # number of the stage's first operator in the graph's cut order (`Flow.operators`)
    last: NotNegative  # number of its last operator, inclusive
    first_op: str
    last_op: str
    flops_forward: NotNegative
    flops_backward: NotNegative  # with the second forward, where the stage recomputes
    parameter_bytes: NotNegative
    memory: StageMemory
    recompute: bool = False
    """Keep only what was received between forward and backward, and run the forward again when the backward is due."""


class Edge(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message from stage `source` to stage `target` for each micro-batch, and the gradient message back."""

    source: NotNegative
    target: NotNegative
    values: tuple[str, ...]  # `op` or `op:index` of each tensor, in the order in which they travel
    gradients: tuple[str, ...]
    forward_bytes: NotNegative  # bytes of the tensors before any compression
    backward_bytes: NotNegative
    forward_compression: Compression | None = None  # None sends the tensors as they are
    backward_compression: Compression | None = None

    def __post_init__(self) -> None:
        if self.forward_compression is not None and self.forward_compression.feedback:
            raise UserError(
                f"plan: edge {self.source} -> {self.target}: forward_compression.feedback: got true, expected false: "
                "values are not summed, so what is left out of one does not belong into another"
            )

    @property
    def forward_wire_bytes(self) -> int:
        """Bytes that cross the link for each micro-batch."""
        return self.forward_compression.wire_bytes if self.forward_compression else self.forward_bytes

    @property
    def backward_wire_bytes(self) -> int:
        return self.backward_compression.wire_bytes if self.backward_compression else self.backward_bytes


class SharedParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter that several stages use: its value travels once per step, and its gradient back."""

    name: str
    owner: NotNegative
    users: tuple[int, ...]
    size_bytes: NotNegative
    gradient_bytes: NotNegative  # of its gradient, which is float32 where the parameter computes in a narrower type


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One full copy of the model: its stages in order, and its share of the batch.

    Two stages that are no neighbours may be on one device, as where labels must not leave it: they share its compute
    and its memory, and what one sends the other costs nothing.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    shared: tuple[SharedParameter, ...] = ()
    micro_batches: Positive  # micro-batches of each step; those of all replicas are one batch
    schedule: Schedule
    loss_stage: int = -1  # the stage that computes the loss: its index, or -1 for the last
    copies: tuple[Stage, ...] = ()
    """Where several holders feed the chain: the first stage on each holder but the first, and then so the last stage,
    where labels stay. A copy does the micro-batches of its holder's data, with the same parameters."""

    @property
    def workers(self) -> tuple[Stage, ...]:
        """Whatever runs: the stages, and behind them the copies."""
        return (*self.stages, *self.copies)

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The stage that each worker runs. UserError for a copy of none."""
        begins = {stage.first: number for number, stage in enumerate(self.stages)}
        for copy in self.copies:
            if copy.first not in begins:
                raise UserError(f"plan: copies: got operators from {copy.first} on, expected those of a stage")
        return (*range(len(self.stages)), *(begins[copy.first] for copy in self.copies))

    @property
    def weight_flops(self) -> tuple[int, ...]:
        """The value of each worker: see `Schedule.weight_flops`."""
        apart = self.schedule.weight_flops or (0,) * len(self.stages)
        return tuple(apart[stage] for stage in self.stage_of)

    @property
    def copied(self) -> dict[int, tuple[int, ...]]:
        """The stages that have copies: of each the numbers of all its workers, in the order of the holders."""
        chain = self.stage_of
        several = sorted(set(chain[len(self.stages) :]))
        return {stage: tuple(w for w, other in enumerate(chain) if other == stage) for stage in several}

    def joined(self, source: int, target: int) -> tuple[tuple[int, int], ...]:
        """The pairs of workers of two stages that work on the same micro-batches: of two copied ones, each holder's."""
        copied = self.copied
        sources, targets = copied.get(source, (source,)), copied.get(target, (target,))
        if len(sources) > 1 and len(targets) > 1:
            return tuple(zip(sources, targets, strict=True))
        return tuple((a, b) for a in sources for b in targets)

    @property
    def worker_edges(self) -> tuple[Edge, ...]:
        return tuple(
            msgspec.structs.replace(edge, source=a, target=b)
            for edge in self.edges
            for a, b in self.joined(edge.source, edge.target)
        )

    @property
    def shared_uses(self) -> tuple[tuple[SharedParameter, int, int], ...]:
        """Each shared parameter with the worker that owns it and one that uses it: of copies that own it the first
        sends it, and all that use it receive it."""
        copied = self.copied
        return tuple(
            (shared, shared.owner, worker)
            for shared in self.shared
            for user in shared.users
            for worker in copied.get(user, (user,))
        )


class SyncGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that the same stages of different replicas hold, or copies of one stage, summed together."""

    devices: tuple[str, ...]
    """One of each replica, in the order of the replicas; or the holders whose stages are copies of each other."""
    parameters: tuple[str, ...] = ()  # their names in the graph, in its order
    size_bytes: NotNegative
    """Bytes of the buffer that is summed: float32, the parameters' elements and, where gradients are summed, one number
    per parameter that tells whether it has one, and the loss's count."""
    collective: Collective = Collective()
    iterations: tuple[NotNegative, ...] = (0,)  # in which steps of a period
    stages: tuple[NotNegative, ...] = ()
    """The stage that each device sums: of copies, and where a device has several; empty otherwise."""


Averages = Literal["gradients", "parameters", "deltas"]
"""The summands of replicas: gradients before the update; or after it, weighted by their shares, parameters or their
movements since the last outer step."""


class ReplicaSync(msgspec.Struct, frozen=True, kw_only=True):
    """The averages of replicas: values, members and period; or the sums of copies of one stage in every step."""

    averages: Averages = "gradients"
    period: Positive = 1  # steps after which the groups' iterations start again
    outer: OuterOptimizer | None = None  # the optimizer of the mean delta; None where no deltas are summed
    groups: tuple[SyncGroup, ...] = ()


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The cost model's prediction for the plan, in seconds per step."""

    step_s: float
    """Closed form with latency hidden inside the step: fill + (n - 1) * period of the slowest replica, and the sync."""
    period_s: float  # steady time between micro-batches: the slowest stage, or the slowest link's bytes / bandwidth
    fill_s: float
    micro_batches: Positive  # n of the slowest replica
    sync_s: float = 0.0  # averaging with other replicas, after the last backward; the mean over the steps of a period
    eq3_step_s: float  # FusionLLM Eq. 3, forward and backward, latency counted in the bottleneck term.
    bottleneck: str  # which device or link sets the period
    steady_s: float = 0.0  # seconds of a steady step as the simulator has it; 0 where it was not asked

    @property
    def expected_s(self) -> float:
        """Seconds per step: the simulator's, or else the closed form's."""
        return self.steady_s or self.step_s


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on the plan's distance from the best plan under its planner's objective."""

    lower_bound: float  # seconds; of objective `cost`, money per step in the unit of the fleet's prices
    gap: float  # (found - lower_bound) / lower_bound; 0: no plan of those that the question ranges over is better
    objective: Literal["step", "stage", "cost"] = "step"
    """The bounded figure: the time of a step, that of its largest stage per micro-batch, or the price of a step."""
    question: str  # the quantity and the plans that the bound is of, in words (`plan.question`)
    exact: bool = False  # whether some plan attains the bound, so that it is the best value and not only a bound on it


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Which device computes which part of a model, how messages travel, and the predicted time of a step.

    `isthmus.plan` makes one; `save_plan` and `load_plan` write and read it as JSON. Times are seconds, sizes bytes.

    >>> from isthmus.plans import load_plan, save_plan
    >>> plan = run.plan
    >>> save_plan(plan, folder.with_suffix(".json"))
    >>> load_plan(folder.with_suffix(".json")) == plan, plan.predicted.step_s > 0
    (True, True)
    """

    version: int = PLAN_VERSION
    model: str
    fleet: str
    planner: str
    micro_batch_size: Positive
    micro_batches: Positive
    replicas: tuple[Replica, ...]
    sync: ReplicaSync = ReplicaSync()
    constraints: Constraints = Constraints()  # Conditions on the plan besides time.
    predicted: Prediction
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()  # Why each device is used or left out, one sentence each.

    @property
    def batch(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch_size * self.micro_batches

    @property
    def replica(self) -> Replica:
        """The only replica. UserError when the plan has several, or none."""
        if len(self.replicas) != 1:
            raise UserError(f"plan: replicas: got {len(self.replicas)}, expected exactly 1")
        return self.replicas[0]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the only replica."""
        return self.replica.stages

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of all stages and their copies, replica after replica: as workers are counted."""
        return tuple(stage.device for replica in self.replicas for stage in replica.workers)

    @property
    def used(self) -> tuple[str, ...]:
        """The devices in use, each once."""
        return tuple(dict.fromkeys(self.devices))

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The names under which all workers take part in a run."""
        return worker_ids_of(self.devices)

    def members(self, group: SyncGroup) -> tuple[int, ...]:
        """The workers that sum. UserError for a device without the stage, or without any."""
        numbers = [number for replica in self.replicas for number in replica.stage_of]
        placed = {place: worker for worker, place in enumerate(zip(self.devices, numbers, strict=True))}
        first = {device: worker for (device, _), worker in reversed(placed.items())}
        if group.stages and len(group.stages) != len(group.devices):
            raise UserError(f"got {len(group.stages)} stages, expected one of each of the {len(group.devices)} devices")
        found = (
            [placed.get(place) for place in zip(group.devices, group.stages, strict=True)]
            if group.stages
            else [first.get(device) for device in group.devices]
        )
        if None in found:
            raise UserError(f"got device {group.devices[found.index(None)]!r}, expected one that has a stage")
        return tuple(worker for worker in found if worker is not None)

    @property
    def overlaps(self) -> bool:
        """Return whether a step begins while the one before is under way."""
        return any(replica.schedule.name in STEPS_AT_ONCE for replica in self.replicas)

    @property
    def period(self) -> int:
        """Steps after which the times of steps repeat: of averages, or of steps that overlap."""
        return max([self.sync.period, *(STEPS_AT_ONCE.get(r.schedule.name, 1) for r in self.replicas)])

    def boundaries(self) -> list[int]:
        """First operator number of every stage but the first."""
        return [stage.first for stage in self.stages[1:]]


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan as JSON. OSError where the file cannot be written."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))


def load_plan(path: Path) -> Plan:
    """UserError when the file is missing, is not a plan, or has another version."""
    try:
        plan = read_json(path, Plan, f"plan file {path}")
    except FileNotFoundError:
        raise UserError(f"plan file {path}: not found") from None
    except UserError as e:
        raise UserError(f"{plain_types(str(e))}; `isthmus plan --json` prints a plan") from None
    if plan.version != PLAN_VERSION:
        raise UserError(f"plan file {path}: version: got {plan.version}, expected {PLAN_VERSION}")
    return plan


class PlanPeriod(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of a run, until the next period begins."""

    plan: Plan
    fleet: Fleet  # as it was believed to be when the plan was made
    first_step: int  # steps that were done before
    since_s: float = 0.0  # in seconds of the run's trace
