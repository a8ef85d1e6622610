"""The work of a run as a sequence of items, a pure function of the job: what is leased, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of leased work. Every device does all items, in order.

    `train` is one optimizer step, `eval` a forward-only pass over held-out samples, `save` a checkpoint.
    `first_sample` and `samples` are positions in the data order, which the coordinator owns.
    """

    index: int
    kind: Literal["train", "eval", "save"]
    step: int
    """Train: the step's number, from 0. Eval and save: how many steps came before."""
    first_sample: int = 0
    micro_batches: int = 0


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run is and what happens along it. Zero turns an `every` off."""

    steps: int
    micro_batches: int
    micro_batch_size: int
    eval_every: int = 0
    eval_micro_batches: int = 0
    save_every: int = 0
    lease_ahead: int = 3
    """Items that a device may know of before it finishes the first of them: the coordinator is never waited for."""
    start_step: int = 0


def items(spec: RunSpec) -> Iterator[Item]:
    """The run's items. An evaluation is split so that no item has more micro-batches than a training step."""
    index = 0
    batch = spec.micro_batches * spec.micro_batch_size
    for step in range(spec.start_step, spec.steps):
        yield Item(index=index, kind="train", step=step, first_sample=step * batch, micro_batches=spec.micro_batches)
        index += 1
        done, last = step + 1, step + 1 == spec.steps
        if spec.eval_every and (done % spec.eval_every == 0 or last):
            for start in range(0, spec.eval_micro_batches, spec.micro_batches):
                count = min(spec.micro_batches, spec.eval_micro_batches - start)
                yield Item(
                    index=index, kind="eval", step=done, first_sample=start * spec.micro_batch_size, micro_batches=count
                )
                index += 1
        if last or (spec.save_every and done % spec.save_every == 0):
            yield Item(index=index, kind="save", step=done)
            index += 1
