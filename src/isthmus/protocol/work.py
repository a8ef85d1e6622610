"""The work of a run as a sequence of items, a pure function of the job: what is leased, in which order, and which data
holder feeds a micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from isthmus.plans.schedule import feeder_slot


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of leased work. Every device does all items, in order.

    `train` is one optimizer step, `eval` a forward-only pass over held-out samples, `save` a checkpoint, `keep` a
    snapshot in the devices' memory.
    `first_sample` and `samples` are positions in the data order, which the coordinator owns.
    """

    index: int
    kind: Literal["train", "eval", "save", "keep"]
    step: int
    """Train: the step's number, from 0. The others: how many steps came before."""
    first_sample: int = 0
    micro_batches: int = 0
    first_micro_batch: int = 0
    """Of the step's, the number of this item's first: a replica's item is a part of everybody's."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's part of every item: of each step's `of` micro-batches, `count` from number `first` on."""

    first: int
    count: int
    of: int
    micro_batch_size: int

    def part(self, item: Item) -> Item:
        """What the replica does of an item. Of a shorter item, an evaluation's, it does about the same part."""
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
    eval_micro_batches: int = 0
    save_every: int = 0
    lease_ahead: int = 3
    """Items that a device may know of before it finishes the first of them: the coordinator is never waited for."""
    start_step: int = 0
    non_finite_steps: int = 0
    """Consecutive steps with numbers that are not finite after which the run ends; 0: it never ends for that."""
    recovery_attempts: int = 0
    """Attempts to go on after losses, with no step done in between, after which the run ends; 0: it never gives up."""


def items(spec: RunSpec, *, due: bool = False) -> Iterator[Item]:
    """The run's items. An evaluation is split so that no item has more micro-batches than a training step.

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
    """What is due after so many steps."""
    last = done == spec.steps
    if spec.eval_every and (done % spec.eval_every == 0 or last):
        for start in range(0, spec.eval_micro_batches, spec.micro_batches):
            yield Item(
                index=next(count),
                kind="eval",
                step=done,
                first_sample=start * spec.micro_batch_size,
                micro_batches=min(spec.micro_batches, spec.eval_micro_batches - start),
            )
    if last or (spec.save_every and done % spec.save_every == 0):
        yield Item(index=next(count), kind="save", step=done)


class Feeding(msgspec.Struct, frozen=True, kw_only=True):
    """Pure: all devices tell the same from the same counts."""

    train: tuple[int, ...]
    """Samples of each holder."""
    heldout: tuple[int, ...]
    """Whole micro-batches of each holder's held-out samples."""
    micro_batch_size: int
    copies: tuple[tuple[int, ...], ...]
    """Workers that run copies of one stage, in the order of the holders; for each stage that has copies."""

    def does(self, worker: int, item: Item, micro_batch: int) -> bool:
        """Whether a worker has to do with a micro-batch of an item: who runs no copy has to do with all."""
        own = next((copies for copies in self.copies if worker in copies), None)
        return own is None or own[self.holder(item, micro_batch)] == worker

    def holder(self, item: Item, micro_batch: int) -> int:
        """Whose micro-batch of an item it is: the number of the holder."""
        number = item.first_sample // self.micro_batch_size + micro_batch
        return feeder_slot(self.train if item.kind == "train" else self.heldout, number).holder

    def present(self, workers: tuple[int, ...], item: Item, micro_batch: int) -> tuple[int, ...]:
        """Those of some workers that have to do with a micro-batch."""
        return tuple(worker for worker in workers if self.does(worker, item, micro_batch))
