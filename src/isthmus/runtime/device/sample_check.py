"""Whether a stage that reads raw samples computes each by itself, tried on its own data before anything is sent.

Shapes tell where samples are put together (`graph.mixing`); they do not tell where values keep their shape and depend
on other samples all the same, as a softmax over them does, or lie at another sample's place. So one sample is exchanged
for another: nothing but its own values may change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.graph import Ref, StageGraph
from isthmus.graph.mixing import sample_axis
from isthmus.protocol.work import Item
from isthmus.protocol.worker import StageView
from isthmus.runtime.device.batches import Batches
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.program import Program

CLOSE = 1e-4
"""Of the largest value: kernels may sum in another order, samples that mix differ by far more."""


def check_samples_apart(assignment: Assignment, weights: Mapping[str, Tensor], batches: Batches) -> None:
    """On the host, once. `weights` as for the engine, `batches` on the host too. UserError for values of a sample that
    depend on another."""
    size = assignment.engine.micro_batch_size
    if size == 1:
        return
    graphs: tuple[tuple[Literal["train", "eval"], StageGraph], ...] = (
        ("train", assignment.train),
        ("eval", assignment.evaluation),
    )
    for mode, stage in graphs:
        program = Program(stage, mode, batch=size, seed=assignment.engine.seed)
        first, others = (_inputs(stage, batches, number, size) for number in _own(assignment.view))
        before = _run(program, stage, weights, first)
        for exchanged in (0, size - 1):
            after = _run(program, stage, weights, _with(stage, first, others, exchanged))
            for ref in _changed(stage, before, after, exchanged):
                raise UserError(
                    f"privacy.activations: value {ref.op!r} of device {assignment.device!r} changes for a sample when "
                    "another one is exchanged, expected each sample's values to be its own"
                )


def _own(view: StageView) -> tuple[int, int]:
    """The first two micro-batches that the stage works on, by their numbers in the run."""
    for count in (2**k for k in itertools.count(1)):
        own = view.own(Item(index=0, kind="train", step=0, micro_batches=count))
        if len(own) > 1:
            return own[0], own[1]
    raise AssertionError("powers do not end")


def _inputs(stage: StageGraph, batches: Batches, number: int, size: int) -> dict[Ref, Tensor]:
    """The columns of a micro-batch, and random numbers for what comes from other stages."""
    item = Item(index=0, kind="train", step=0)
    found = batches.columns(stage, item, number)
    draws = torch.Generator().manual_seed(number)
    for c in stage.receives:
        found[c.value] = torch.randn(c.spec.shape_at(size), generator=draws).to(getattr(torch, c.spec.dtype))
    return found


def _with(
    stage: StageGraph, first: Mapping[Ref, Tensor], others: Mapping[Ref, Tensor], sample: int
) -> dict[Ref, Tensor]:
    axes = {c.value: sample_axis(c.spec) for c in stage.receives}
    found: dict[Ref, Tensor] = {}
    for ref, value in first.items():
        axis = axes.get(ref, 0)  # columns have their samples first
        found[ref] = value.clone()
        if axis is not None:
            found[ref].select(axis, sample).copy_(others[ref].select(axis, sample))
    return found


def _run(
    program: Program, stage: StageGraph, weights: Mapping[str, Tensor], inputs: Mapping[Ref, Tensor]
) -> dict[Ref, Tensor]:
    held = {
        Ref(op.name): weights[op.target].detach().to("cpu", getattr(torch, op.outputs[0].dtype), copy=True)
        for op in stage.variables()
    }
    with torch.no_grad():
        return program.run({**held, **inputs}, 0, 0)


def _changed(
    stage: StageGraph, before: Mapping[Ref, Tensor], after: Mapping[Ref, Tensor], exchanged: int
) -> Iterator[Ref]:
    """Values that leave and are others for a sample that was not exchanged."""
    for c in stage.sends:
        axis = sample_axis(c.spec)
        if axis is None or not before[c.value].is_floating_point():
            continue
        moved = (after[c.value].double() - before[c.value].double()).abs().movedim(axis, 0)
        moved[exchanged] = 0
        if float(moved.max()) > CLOSE * float(before[c.value].double().abs().max()):
            yield c.value
