"""Constraints of a plan: its objective, the devices that may read the data, the codecs of messages; and the one
question that its certificate answers, in words."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.errors import UserError
from isthmus.plans.packing import DENSE
from isthmus.units import format_share
from isthmus.wire_types import Count, Positive

Objective = Literal["time", "cost"]


class CompressionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The codec of training messages between stages."""

    method: str  # A ratio planner (`cost.compression`).
    ratio: Annotated[float, Meta(ge=1)] = 100.0  # Elements per element that is sent; what it bounds is the method's.
    backward: str | None = None  # With `bf16`, `int8` and `int4`: which of them packs gradients. None: the same.
    feedback: bool = False  # Whether what is left out of a sample's gradients is added when the sample comes again.
    loss_budget: Annotated[float, Meta(ge=0)] | None = None
    """With `just-enough`: how much higher the loss may become by measured figures; 0.01 is 1 %. None: by any amount."""

    def __post_init__(self) -> None:
        if self.loss_budget is not None and self.method != "just-enough":
            raise ValueError(f"loss_budget: got a budget with method {self.method!r}, expected method 'just-enough'")
        if self.backward is not None and not {self.method, self.backward} <= set(DENSE):
            got = f"got {self.backward!r} with method {self.method!r}"
            raise ValueError(f"backward: {got}, expected each of them among {', '.join(DENSE)}")

    def __str__(self) -> str:
        budget = "" if self.loss_budget is None else f" within {format_share(self.loss_budget)} of loss"
        back = "" if self.backward is None else f", {self.backward} back"
        return f"{self.method} at {self.ratio:g}{back}{budget}"


class OwnSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of samples of one holder."""

    train: Positive
    heldout: Count = 0


class LackingOperators(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Operators of the model that a device cannot compute: its engine or its version does not have them."""

    device: str
    operators: tuple[str, ...]


class Constraints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Raises UserError for labels that must stay where nobody holds the data, or own samples of some holders only."""

    objective: Objective = "time"
    """`cost` minimises the price of a step: devices by the hour while it lasts, and bytes that leave priced sites."""
    data_holders: tuple[str, ...] = ()
    """Devices that have the data: each first stage runs on one of them, and sends on every column that later stages
    take. None where every device has the data: then each stage reads its own columns."""
    own_samples: tuple[OwnSamples, ...] = ()
    """The samples of each data holder, where each has its own: then every holder runs a copy of the first stage, and
    feeds the same chain. None where they have the same data, and any one of them runs it."""
    labels_stay: bool = False  # the last stage runs on a data holder too, and with it every operator that takes labels
    max_step_s: float | None = None  # longest step that a plan may take, in seconds, with objective `cost`
    max_price: float | None = None
    """Highest price of 1,000 steps with objective `time`, in the unit of the fleet's prices."""
    compression: CompressionConfig | None = None  # how messages between stages are packed. None sends them as they are.
    memory_headroom: float = 0.0  # share of each device's memory, 0 or more and less than 1, that a plan leaves free
    lacking: tuple[LackingOperators, ...] = ()
    """Devices that have not all operators of the model: their stages hold none of those that they lack."""

    def __post_init__(self) -> None:
        if self.max_step_s is not None and self.objective != "cost":
            raise UserError(f"plan.max_step: got {self.max_step_s:g} s with objective 'time', expected 'cost'")
        if self.max_price is not None and self.objective != "time":
            raise UserError(f"plan.max_price: got {self.max_price:g} with objective 'cost', expected 'time'")
        for field, limit in (("max_step", self.max_step_s), ("max_price", self.max_price)):
            if limit is not None and not 0 < limit < math.inf:
                raise UserError(f"plan.{field}: got {limit:g}, expected a finite number above 0")
        if not 0 <= self.memory_headroom < 1:
            raise UserError(f"plan.memory_headroom: got {self.memory_headroom:g}, expected at least 0 and less than 1")
        if self.labels_stay and not self.data_holders:
            raise UserError("plan.labels_stay: got true without a data_holder, expected one where the labels stay")
        if self.own_samples and len(self.own_samples) != len(self.data_holders):
            expected = f"{len(self.data_holders)}, one per holder"
            raise UserError(f"constraints.own_samples: got {len(self.own_samples)} entries, expected {expected}")

    @property
    def feeders(self) -> tuple[str, ...]:
        """The holders that feed one chain, each with data of its own; none where they have the same data."""
        return self.data_holders if self.own_samples else ()

    @property
    def copied(self) -> bool:
        """Return whether the first stage has copies, and where labels stay the last."""
        return len(self.feeders) > 1

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of all micro-batches that each of the feeders brings."""
        total = sum(own.train for own in self.own_samples)
        return tuple(own.train / total for own in self.own_samples)

    def lacked_by(self, device: str) -> frozenset[str]:
        return frozenset(target for one in self.lacking if one.device == device for target in one.operators)

    @property
    def limited(self) -> bool:
        """Return whether what is not minimised has a limit."""
        return self.max_step_s is not None or self.max_price is not None

    @property
    def after_headroom(self) -> str:
        """Return the words behind the bytes that a device offers a plan."""
        return f" after {format_share(self.memory_headroom)} headroom" if self.memory_headroom else ""

    def offered_bytes(self, memory_bytes: int) -> int:
        """Return the bytes of a device's memory that a plan may use."""
        return memory_bytes - math.ceil(self.memory_headroom * memory_bytes)

    def unlimited(self, objective: Objective) -> Constraints:
        """The same with another objective and no limit."""
        return msgspec.structs.replace(self, objective=objective, max_step_s=None, max_price=None)

    def among(self, devices: Collection[str]) -> Constraints:
        """The terms on a part of the fleet. UserError where no data holder is in it, or not all that have their own."""
        if not self.data_holders:
            return self
        if gone := [name for name in self.feeders if name not in devices]:
            raise UserError(f"data_holder: {gone[0]} has samples that no other device has, and is not there")
        left = tuple(name for name in self.data_holders if name in devices)
        if not left:
            raise UserError(f"data_holder: none of {', '.join(self.data_holders)} is among {', '.join(devices)}")
        return msgspec.structs.replace(self, data_holders=left)


ANY_PLAN = "of any plan"
ONE_EACH = "one stage on each"
ENDS_TOGETHER = f"{ONE_EACH}, but that the last may be on the device of the first"


def bounded_plans(question: str) -> str:
    """Return which plans a bound holds for, in a few words."""
    if f" {ANY_PLAN}:" not in question:
        return "plan of this planner's kind"
    return f"plan with one stage per device{' or both ends on one' if ENDS_TOGETHER in question else ''}"


def question_in_words(
    constraints: Constraints, counts: Sequence[int], *, priced: bool, period: int, recompute: bool
) -> str:
    """Return which plans a lower bound ranges over, and what it bounds.

    `counts` are the numbers of micro-batches that a plan may choose from; `priced` tells whether the bound is one on
    the price of a step; `period` is that of averaging, in steps.
    """
    conditions = [f"{_or(counts)} micro-batch{'' if tuple(counts) == (1,) else 'es'} per step"]
    if period > 1:
        conditions.append(f"every parameter averaged once in {period} steps")
    if constraints.max_step_s is not None:
        conditions.append(f"a step of at most {constraints.max_step_s:g} s")
    if constraints.max_price is not None:
        conditions.append(f"at most {constraints.max_price:g} for 1,000 steps")
    if constraints.copied:
        labels = ", labels too" if constraints.labels_stay else ""
        conditions.append(f"{' and '.join(constraints.feeders)} feeding it, each with its own data{labels}")
    elif constraints.data_holders:
        conditions.append(
            f"data on {_or(constraints.data_holders)} only{', labels too' if constraints.labels_stay else ''}"
        )
    if constraints.memory_headroom:
        conditions.append(f"{format_share(constraints.memory_headroom)} of each device's memory left free")
    if constraints.compression is not None:
        conditions.append(f"messages packed by {constraints.compression}")
    if not recompute:
        conditions.append("no recomputing")
    each = ENDS_TOGETHER if constraints.labels_stay else ONE_EACH
    return (
        f"the {'price' if priced else 'time'} of a step {ANY_PLAN}: any number of replicas, any devices in any order, "
        f"{each}, any cuts and any shares of the batch, {', '.join(conditions)}"
    )


def _or(items: Sequence[object]) -> str:
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
