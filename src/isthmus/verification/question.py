"""The question that a plan document answers: its model, fleet and batch. The differences that a check found, field by
field."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from isthmus.errors import UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.graph.opgraph import OpGraph
from isthmus.plans import Constraints

FLOAT32_BYTES = 4
_KEPT_TENSORS = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2, "muon": 1}
"""float32 tensors of the parameter's shape that an optimizer keeps from step to step."""


class StateBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per element of a trainable parameter, beside the tensor that computes."""

    master: int = 0
    gradient: int = FLOAT32_BYTES
    optimizer: int = 0


def state_bytes(optimizer: str, *, momentum: bool = False, narrow: bool = False) -> StateBytes:
    """Return the bytes that an optimizer keeps of an element; `narrow` where parameters compute in less than float32
    and have a float32 master copy.

    Raises UserError for an unknown optimizer.
    """
    name = "momentum" if optimizer == "sgd" and momentum else optimizer
    if name not in _KEPT_TENSORS:
        raise unknown_name("optimizer", optimizer, _KEPT_TENSORS)
    return StateBytes(master=FLOAT32_BYTES if narrow else 0, optimizer=FLOAT32_BYTES * _KEPT_TENSORS[name])


@dataclass(frozen=True, kw_only=True)
class Question:
    """The problem that the document claims to solve.

    Raises UserError for a graph that is not a train graph or was captured for another batch, and for sizes below one.
    """

    graph: OpGraph
    fleet: Fleet
    micro_batch_size: int
    micro_batches: int  # micro-batches of a step, over all replicas
    schedule: str
    state: StateBytes = field(default_factory=StateBytes)
    period: int = 1  # steps in which every parameter is averaged; 1 where gradients are summed in each step
    constraints: Constraints = field(default_factory=Constraints)
    recompute: bool = True  # whether a stage may run its forward twice
    counts: tuple[int, ...] = ()
    """The numbers of micro-batches that a plan may choose from; none: `micro_batches` alone."""
    gradients: bool = True  # whether replicas sum gradients, in each step

    def __post_init__(self) -> None:
        if self.graph.mode != "train":
            raise UserError(f"graph {self.graph.name!r}: got mode {self.graph.mode!r}, expected 'train'")
        for name, size in (("micro_batch_size", self.micro_batch_size), ("micro_batches", self.micro_batches)):
            if size < 1:
                raise UserError(f"{name}: got {size}, expected at least 1")
        if self.graph.batch not in (None, self.micro_batch_size):
            expected = f"{self.graph.batch}, the only size at which {self.graph.name!r} could be captured"
            raise UserError(f"micro_batch_size: got {self.micro_batch_size}, expected {expected}")
        if not self.counts:
            object.__setattr__(self, "counts", (self.micro_batches,))

    def cut_into(self, micro_batches: int) -> Question:
        """The same batch in so many micro-batches."""
        size = self.micro_batch_size * self.micro_batches // micro_batches
        return replace(self, micro_batches=micro_batches, micro_batch_size=size)

    def room_bytes(self, device: str) -> int:
        """Return the bytes of the device's memory that stages may take."""
        memory = self.fleet.device(device).memory_bytes
        return memory - math.ceil(memory * self.constraints.memory_headroom)

    def flops_per_s(self, device: str) -> float:
        return self.fleet.device(device).sustained_flops_per_s


CLOSE = 1e-9  # relative: sums of floats taken in another order agree to this

Figure = int | float | str | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the document that does not hold."""

    field: str
    got: Figure  # the figure in the document
    expected: Figure  # the figure that was computed, or the condition on it in words
    by: str = ""  # how far apart two numbers are


class BoundCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the check of the certificate's lower bound."""

    status: Literal["none stated", "proven", "unchecked"]
    proven: float = 0.0  # a lower bound that was proven here, not above the one stated: seconds, or money
    text: str  # in words, with what this does not prove


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`checked` fields were compared with figures computed anew; `differences` did not hold."""

    checked: int
    differences: tuple[Difference, ...]
    bound: BoundCheck

    def holds(self, *, bound_unchecked: bool = False) -> bool:
        """Return whether all figures hold, and the bound, if one is stated, was proven or need not be."""
        return not self.differences and (bound_unchecked or self.bound.status != "unchecked")


class DifferenceList:
    """Counts what is compared and keeps what differs."""

    def __init__(self) -> None:
        self.checked = 0
        self.differences: list[Difference] = []

    def same(self, field: str, got: Figure, expected: Figure) -> bool:
        """Equal; two numbers to the last digit."""
        return self.judge(field, got == expected, got, expected)

    def close(self, field: str, got: float, expected: float) -> bool:
        """Equal but for the order of a sum; a number that is not finite is never close."""
        return self.judge(field, math.isclose(got, expected, rel_tol=CLOSE, abs_tol=1e-15), got, expected)

    def judge(self, field: str, holds: bool, got: Figure, expected: Figure) -> bool:
        self.checked += 1
        if not holds:
            self.differences.append(Difference(field=field, got=got, expected=expected, by=_apart(got, expected)))
        return holds


def _apart(got: Figure, expected: Figure) -> str:
    if isinstance(got, str) or isinstance(expected, str) or got is None or expected is None:
        return ""
    relative = f" ({100 * (got - expected) / expected:+.3g} %)" if expected else ""
    return f"{got - expected:+.6g}{relative}"
