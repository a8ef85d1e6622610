"""The work of a run as a sequence of items, a pure function of the job: what is leased, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from isthmus.wire_types import Count

Work = Literal["F", "B", "W", "E"]
"""A task on a micro-batch: forward, backward, the weight gradients where they are apart, an evaluation's forward."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of leased work. Every device does all items, in order.

    `train` is one optimizer step, `eval` a forward-only pass over held-out samples, `save` a checkpoint, `keep` a
    snapshot in the devices' memory.
    `first_sample` is a position in the data order, which the coordinator owns.
    """

    index: Count
    kind: Literal["train", "eval", "save", "keep"]
    step: Count  # train: the step's number, from 0. The others: how many steps came before.
    first_sample: Count = 0
    micro_batches: Count = 0
    first_micro_batch: Count = 0
    """The number in the step of this item's first micro-batch: a replica's item is a part of the whole item."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's part of every item: of each step's `of` micro-batches, `count` from number `first` on."""

    first: Count
    count: Count
    of: Count
    micro_batch_size: Count

    def part(self, item: Item) -> Item:
        """Return the replica's part of an item. Its part of a shorter item, an evaluation's, is about as large a
        share."""
        first = self.first * item.micro_batches // self.of
        last = (self.first + self.count) * item.micro_batches // self.of
        return msgspec.structs.replace(
            item,
            first_sample=item.first_sample + first * self.micro_batch_size,
            micro_batches=last - first,
            first_micro_batch=first,
        )


def shares(counts: Sequence[int], micro_batch_size: int) -> tuple[Share, ...]:
    """The parts of replicas with so many micro-batches of each step."""
    starts = itertools.accumulate(counts, initial=0)
    return tuple(
        Share(first=first, count=count, of=sum(counts), micro_batch_size=micro_batch_size)
        for first, count in zip(starts, counts, strict=False)
    )


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, micro-batches, evaluations and checkpoints of a run. Zero turns an `every` off."""

    steps: int
    micro_batches: int
    micro_batch_size: int
    eval_every: int = 0
    eval_micro_batches: int = 0  # whole ones
    eval_rest: int = 0  # samples of an evaluation beyond whole micro-batches
    save_every: int = 0
    lease_ahead: int = 3
    """Items that a device may know of before it finishes the first of them: the coordinator is never waited for."""
    start_step: int = 0
    eval_due: bool = False  # whether the evaluation of the start step is still to be made
    non_finite_steps: int = 0
    """Consecutive steps with numbers that are not finite after which the run ends; 0: it never ends for that."""
    recovery_attempts: int = 0
    """Attempts to go on after losses, with no step done in between, after which the run ends; 0: it never gives up."""

    @property
    def evaluated_micro_batches(self) -> int:
        """Micro-batches of an evaluation, the two of its rest included."""
        return self.eval_micro_batches + (2 if self.eval_rest else 0)

    def eval_weight(self, item: Item) -> float:
        """The factor of an evaluation item's sums in those of the whole evaluation. That of the copies alone takes off
        the copies that filled the item before."""
        of_copies = item.first_sample // self.micro_batch_size == self.eval_micro_batches + 1
        return self.eval_rest / self.micro_batch_size - 1.0 if self.eval_rest and of_copies else 1.0


def items(spec: RunSpec, *, due: bool = False) -> Iterator[Item]:
    """The run's items. An evaluation is split so that no item has more micro-batches than a training step. Its rest is
    two items: a micro-batch that copies of the first sample fill up, and one of such copies alone, whose share is taken
    off again.

    `due` begins with what comes after the step before the first one.
    """
    count = itertools.count()
    if due and spec.start_step:
        yield from _after(spec.start_step, spec, count)
    batch = spec.micro_batches * spec.micro_batch_size
    for step in range(spec.start_step, spec.steps):
        yield Item(
            index=next(count), kind="train", step=step, first_sample=step * batch, micro_batches=spec.micro_batches
        )
        yield from _after(step + 1, spec, count)


def _after(done: int, spec: RunSpec, count: Iterator[int]) -> Iterator[Item]:
    """Yield the items that are due after so many steps."""
    last = done == spec.steps
    if spec.eval_every and (done % spec.eval_every == 0 or last):
        whole, most = spec.eval_micro_batches, spec.micro_batches
        parts = [(start, min(most, whole - start)) for start in range(0, whole, most)]
        for start, size in parts + ([(whole, 1), (whole + 1, 1)] if spec.eval_rest else []):
            first = start * spec.micro_batch_size
            yield Item(index=next(count), kind="eval", step=done, first_sample=first, micro_batches=size)
    if last or (spec.save_every and done % spec.save_every == 0):
        yield Item(index=next(count), kind="save", step=done)
