"""The problem of a planner: this model, on this fleet, with this batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

import msgspec

from isthmus.combinations import refused
from isthmus.errors import UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.graph import Flow, Op
from isthmus.graph.cuts import last_start
from isthmus.plans import CHOICES, Constraints, Objective, OuterOptimizer, Packing, Schedule
from isthmus.plans.exchanges import DELAY, MIXING, MOMENTUM, RATE
from isthmus.plans.sync import MODES_OF
from isthmus.wire_types import MOST_BYTES, MOST_DEVICES, Above, Many, Name, NotNegative

FLOAT32_BYTES = 4
SUMMED = ("float32", "bfloat16", "float16")  # types of parameters that several replicas may train

OPTIMIZER_TENSORS = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2, "muon": 1}
"""fp32 tensors of the parameter's shape that each optimizer keeps."""


class ParameterState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes kept per element of a trainable parameter, beside the tensor that computes."""

    master_bytes: int = 0  # fp32 copy that the optimizer updates when the computing tensor is narrower
    gradient_bytes: int = FLOAT32_BYTES
    optimizer_bytes: int = 0


def parameter_state(optimizer: str, *, momentum: bool = False, narrow: bool = False) -> ParameterState:
    """State of an optimizer, gradients accumulated in fp32. `momentum` makes `sgd` keep one tensor.

    Where an element computes in a `narrow` type, bfloat16 or float16, it costs 2 + 4 bytes (master copy). Raises
    UserError for an unknown optimizer.
    """
    name = optimizer.lower()
    if name not in OPTIMIZER_TENSORS:
        raise unknown_name("optimizer", optimizer, OPTIMIZER_TENSORS)
    tensors = 1 if name == "sgd" and momentum else OPTIMIZER_TENSORS[name]
    return ParameterState(
        master_bytes=FLOAT32_BYTES if narrow else 0,
        optimizer_bytes=FLOAT32_BYTES * tensors,
    )


class Decoupled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas that never wait: how their changes are merged (Decoupled DiLoCo)."""

    fragments: Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)] = 4  # Parts of the model that are merged in turn.
    quorum: Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)] = 2
    """Replicas without whose contribution a merge does not end; fewer where fewer are at work."""
    grace: NotNegative = 0.5
    """How long a merge with its quorum waits for other replicas, as a share of the time between two merges."""
    rate: Above = 1.0  # Learning rate of the outer step. With 1 and no momentum a merge is the weighted mean.
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """The momentum of the outer step. DiLoCo's 0.7 and 0.9 are for periods of 50 and more."""
    codec: Literal["none", "bf16", "int8", "int4", "sparse2bit"] = "int4"  # The codec of the changes of replicas.
    ratio: Annotated[float, msgspec.Meta(ge=1, le=MOST_BYTES)] = 1.0
    """With `sparse2bit`: elements of a change per element that is sent."""
    replicas: Literal["devices", "regions"] | Many[Many[Name]] = "devices"
    """Which devices train one replica: each by itself, those of a region together, or those of each list. Several are a
    pipeline, planned like any other."""
    packed: Many[Name] = ()
    """Among several pipelines, those whose messages are packed as [compression] says, by name; none: all of them."""

    def __post_init__(self) -> None:
        Packing(codec=self.codec, ratio=self.ratio)


class SyncPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state that replicas sum, and how often."""

    mode: Literal["every-step", "local", "partial", "dream", "dreamddp", "outer", "streaming", "decoupled"] = (
        "every-step"
    )
    """`every-step`: gradients, in each step. Then those that average parameters, each once in a period: `local` all of
    them in its last step (LSGD), `partial` the same number in each step (PLSGD-ENP), `dream` so many in each step that
    the period is short, more than once where that costs nothing; `dreamddp` does so by the paper's search and fillings.
    `outer` and `streaming` exchange what parameters have moved and make an outer step on its mean: all in the last step
    of a period (DiLoCo), or in fragments that take turns, on their way while the next steps compute (Streaming
    DiLoCo). `decoupled`: replicas wait for none; changes are merged in fragments."""
    period: Annotated[int, msgspec.Meta(ge=1)] | Literal["auto"] = 1
    """Steps; 1 for `every-step`. With `decoupled`: batches in which every fragment is merged once; "auto": the least
    for which links and devices are quick enough."""
    outer_rate: Annotated[float, msgspec.Meta(gt=0)] = RATE  # `outer` and `streaming`: learning rate of the outer step.
    outer_momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = MOMENTUM
    """`outer` and `streaming`. The defaults are DiLoCo's."""
    delay: Annotated[int, msgspec.Meta(ge=0)] = DELAY
    """`streaming`: steps between the start of a fragment's exchange and its use; a period at most."""
    mixing: Annotated[float, msgspec.Meta(ge=0, lt=1)] = MIXING
    """`streaming`: share of a replica's own parameters that stays when the outer ones arrive."""
    decoupled: Decoupled = Decoupled()  # With `decoupled`: fragments, quorum, outer step and codec.

    @property
    def every(self) -> int:
        """The period, once it is planned."""
        assert self.period != "auto", "planned before it is asked for"
        return self.period

    @property
    def outer(self) -> OuterOptimizer | None:
        """None where no outer step is made."""
        if self.mode == "streaming":
            return OuterOptimizer(
                rate=self.outer_rate, momentum=self.outer_momentum, delay=self.delay, mixing=self.mixing
            )
        return OuterOptimizer(rate=self.outer_rate, momentum=self.outer_momentum) if self.mode == "outer" else None

    def __post_init__(self) -> None:
        if self.period == "auto" and self.mode != "decoupled":
            raise ValueError(f"period: got 'auto' with mode {self.mode!r}, expected a number, or mode 'decoupled'")
        if self.mode == "streaming" and self.delay > self.every:
            raise ValueError(f"delay: got {self.delay}, expected at most the period of {self.period}")
        for option in msgspec.structs.fields(self):
            modes = MODES_OF.get(option.name, (self.mode,))
            if self.mode not in modes and (value := getattr(self, option.name)) != option.default:
                got = f"{'a table' if option.name == 'decoupled' else value} with mode {self.mode!r},"
                of = f"it is for mode {' or '.join(map(repr, modes))}"
                raise ValueError(str(refused("an option of another mode", "a mode", got, option.name, of)))
        if self.mode == "every-step" and self.period != 1:
            raise ValueError(f"period: got {self.period}, expected 1 where mode is 'every-step'")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One planning problem. `flow` is that of the train graph.

    Raises UserError for sizes below one, an unknown schedule or device, or a graph captured at another batch size.
    """

    flow: Flow
    fleet: Fleet
    micro_batch_size: int
    micro_batches: int
    schedule: str = "1f1b"
    sync: SyncPolicy = field(default_factory=SyncPolicy)
    state: ParameterState = field(default_factory=ParameterState)
    constraints: Constraints = field(default_factory=Constraints)
    """With data holders, `flow` becomes one whose columns are all read by the first stage."""
    recompute: bool = True  # whether a stage may run its forward again instead of keeping what it saves for backward

    def __post_init__(self) -> None:
        if self.flow.columns_first != bool(self.constraints.data_holders):
            object.__setattr__(self, "flow", Flow(self.flow.graph, columns_first=bool(self.constraints.data_holders)))
        for name, value in (("micro_batch_size", self.micro_batch_size), ("micro_batches", self.micro_batches)):
            if value < 1:
                raise UserError(f"{name}: got {value}, expected at least 1")
        if self.schedule not in CHOICES:
            raise unknown_name("schedule", self.schedule, CHOICES)
        for name in self.constraints.data_holders:
            if name not in self.fleet.names:
                raise unknown_name("device in data_holder", name, self.fleet.names)
        if self.constraints.copied and self.not_summed is not None:
            raise UserError(f"data_holder: several holders feed one chain, but {self.not_summed}")
        graph = self.flow.graph
        if graph.mode != "train":
            raise UserError(f"graph {graph.name!r}: got mode {graph.mode!r}, expected 'train'")
        if graph.batch not in (None, self.micro_batch_size):
            raise UserError(
                f"micro_batch_size: got {self.micro_batch_size}, expected {graph.batch}, "
                f"the only size at which {graph.name!r} could be captured"
            )
        if not self.flow.operators:
            raise UserError(f"graph {graph.name!r}: has no operator that depends on an input or a trainable parameter")

    def under(self, schedule: Schedule) -> Problem:
        """The same with a plan's schedule, where the job leaves the choice open."""
        return replace(self, schedule=schedule.name)

    @property
    def splits(self) -> bool:
        """Return whether stages compute weight gradients apart."""
        return self.schedule == "zero-bubble"

    def offered_bytes(self, device: str) -> int:
        """Return the bytes of the device's memory that plans may use."""
        return self.constraints.offered_bytes(self.fleet.device(device).memory_bytes)

    def lacked(self, device: str, first: int, end: int) -> list[str]:
        """Operators of a stage that the device does not have. Those that are no part of `flow.operators`, as of masks
        and of the evaluation alone, may be needed in any stage."""
        lacked = self.constraints.lacked_by(device)
        if not lacked:
            return []
        return sorted(lacked.difference(self.targets) or lacked.intersection(self.targets[first:end]))

    @cached_property
    def targets(self) -> tuple[str, ...]:
        return tuple(op.target for op in self.flow.operators)

    def everywhere(self) -> Problem:
        """The same where every device has every operator."""
        return replace(self, constraints=msgspec.structs.replace(self.constraints, lacking=()))

    def tightest(self, device: str) -> str:
        """The device with the least memory of those that run what this one does: a stage, or copies of it."""
        feeders = self.constraints.feeders
        return min(feeders, key=self.offered_bytes) if device in feeders else device

    def flops(self, op: Op) -> tuple[int, int]:
        """(forward, backward) FLOPs of one micro-batch; none for free operators.

        Every stage that needs a mask or a position computes it again. It is a few element-wise operators, and
        charging them would make a stage's cost depend on more than its ends.
        """
        if op.kind != "operator" or op.name in self.flow.free:
            return 0, 0
        return op.flops_forward.at(self.micro_batch_size), op.flops_backward.at(self.micro_batch_size)

    def saved_bytes(self, op: Op) -> int:
        """Bytes kept from forward to backward for one micro-batch; none for free operators."""
        if op.kind != "operator" or op.name in self.flow.free:
            return 0
        return op.saved_bytes.at(self.micro_batch_size)

    def working_bytes(self, op: Op) -> int:
        """Bytes that it needs while it runs, forward or backward, besides what is kept; none for free operators."""
        if op.kind != "operator" or op.name in self.flow.free:
            return 0
        return op.working_bytes.at(self.micro_batch_size)

    @cached_property
    def not_summed(self) -> str | None:
        """The first trained parameter that replicas cannot sum, which they do in float32, in words; None where there is
        none. Narrower ones have a float32 master copy."""
        for op in self.flow.graph.ops:
            if op.kind == "parameter" and any(op.requires_grad) and op.outputs[0].dtype not in SUMMED:
                return f"parameter {op.target!r} is {op.outputs[0].dtype}, and replicas sum in float32"
        return None

    @property
    def most_replicas(self) -> int:
        """Each has a micro-batch at least, and a device that has the data; one where every holder feeds it."""
        if self.not_summed is not None or self.constraints.feeders:
            return 1
        return min(len(self.constraints.data_holders or self.fleet.names), self.micro_batches)

    def cut_into(self, micro_batches: int) -> Problem:
        """The same batch in so many micro-batches. UserError where they do not divide it."""
        batch = self.micro_batch_size * self.micro_batches
        if micro_batches < 1 or batch % micro_batches:
            raise UserError(f"micro_batches: got {micro_batches}, expected a divisor of the batch, which is {batch}")
        if micro_batches == self.micro_batches:
            return self
        return replace(self, micro_batches=micro_batches, micro_batch_size=batch // micro_batches)

    def timed(self) -> Problem:
        """The same with time as its objective."""
        return self.unlimited("time")

    def unlimited(self, objective: Objective) -> Problem:
        """The same with another objective, and no limit on what is not minimised."""
        if self.constraints.objective == objective and not self.constraints.limited:
            return self
        return replace(self, constraints=self.constraints.unlimited(objective))

    def uncompressed(self) -> Problem:
        """The same with messages that travel as they are."""
        if self.constraints.compression is None:
            return self
        return replace(self, constraints=msgspec.structs.replace(self.constraints, compression=None))

    def on(self, fleet: Fleet, micro_batches: int | None = None) -> Problem:
        """The same on a part of the fleet, with so many micro-batches. UserError where no data holder is in it."""
        return replace(
            self,
            fleet=fleet,
            micro_batches=micro_batches or self.micro_batches,
            constraints=self.constraints.among(fleet.names),
        )

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Positions of the operators that write a buffer, as batch norm its running statistics: such a stage has no
        copies, each of which would see a part of the samples."""
        return tuple(k for k, op in enumerate(self.flow.operators) if op.mutates)

    @cached_property
    def last_start(self) -> int | None:
        """The latest position at which a last stage may start for labels to stay with it; None where they may go."""
        return last_start(self.flow) if self.constraints.labels_stay else None

    @cached_property
    def cumulative_flops(self) -> tuple[int, ...]:
        """Forward and backward FLOPs of the first k operators, for k = 0 .. number of operators."""
        return tuple(itertools.accumulate((sum(self.flops(op)) for op in self.flow.operators), initial=0))

    @cached_property
    def cumulative_forward_flops(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((self.flops(op)[0] for op in self.flow.operators), initial=0))

    @cached_property
    def column_bytes(self) -> dict[str, int]:
        """Bytes of each batch column in one micro-batch."""
        placeholders = (op for op in self.flow.graph.ops if op.kind == "placeholder")
        return {op.target: op.outputs[0].nbytes(self.micro_batch_size) for op in placeholders}

    @cached_property
    def cumulative_saved_bytes(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((self.saved_bytes(op) for op in self.flow.operators), initial=0))
