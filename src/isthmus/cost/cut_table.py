"""Many ways to cut a model into so many stages, and what each stage computes, keeps and sends: arrays over the cuts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from isthmus.cost.blocks import Blocks
from isthmus.cost.kernel import Floats, Ints

MOST_CELLS = 1 << 21  # cuts times uses of values that are looked at together: bounds the memory


@dataclass(frozen=True)
class CutTable:
    """First axis: the cut. FLOPs and bytes are for one micro-batch, those of parameters for one step."""

    ends: Ints  # [cuts, stages + 1]: block boundaries, 0 and the number of blocks among them
    forward_work: Floats  # [cuts, stages]: FLOPs
    backward_work: Floats
    fixed_bytes: Floats  # of the state, and for the operator at work; and gradients that other stages return
    saved_bytes: Floats  # [cuts, stages]: kept from forward to backward, unless the stage recomputes
    column_bytes: Floats  # [cuts, stages]: of the batch, kept if it recomputes
    received_bytes: Floats  # [cuts, stages]: kept either way
    forward: Floats  # [cuts, source, target]: bytes of values, as they are sent
    backward: Floats  # [cuts, source, target]: bytes of the gradients that target returns to source
    shared: Floats  # [cuts, owner, user]: bytes of shared parameters
    shared_gradient: Floats  # and of their gradients
    shared_count: Floats

    @property
    def stages(self) -> int:
        return self.forward_work.shape[1]

    @cached_property
    def sending(self) -> list[tuple[int, int]]:
        """Stages of which one sends values to the other in any cut."""
        return _pairs(self.forward)

    @cached_property
    def sharing(self) -> list[tuple[int, int]]:
        """Stages of which one has parameters of the other in any cut."""
        return _pairs(self.shared)


def every_cut(blocks: Blocks, stages: int) -> Ints:
    """[cuts, stages + 1]: the block boundaries of every cut; there are binomial(blocks - 1, stages - 1)."""
    inner = list(itertools.combinations(range(1, blocks.count), stages - 1))
    return np.array([(0, *cut, blocks.count) for cut in inner], dtype=np.int64)


def cut_table(blocks: Blocks, ends: Ints) -> CutTable:
    """The figures of these cuts, [cuts, stages + 1] block boundaries. A stage may be empty."""
    rows = max(1, MOST_CELLS // max(1, len(blocks.uses)))
    parts = [_crossing(blocks, ends[k : k + rows]) for k in range(0, max(1, len(ends)), rows)]
    joined = (np.concatenate(part) for part in zip(*parts, strict=True))
    held, forward, backward, shared, gradient, shared_count, copied = joined
    forward_work = _between(blocks.forward_work, ends)
    return CutTable(
        ends=ends,
        forward_work=forward_work,
        backward_work=_between(blocks.work, ends) - forward_work,
        fixed_bytes=_between(blocks.owned, ends)
        + _between(blocks.once, ends)
        + blocks.working(ends[:, :-1], ends[:, 1:])
        + copied.sum(axis=1)
        + gradient.sum(axis=2),
        saved_bytes=_between(blocks.saved, ends),
        column_bytes=_between(blocks.columns, ends),
        received_bytes=held.sum(axis=1),
        forward=forward,
        backward=backward,
        shared=shared,
        shared_gradient=gradient,
        shared_count=shared_count,
    )


class Received(NamedTuple):
    """Bytes that a stage of blocks [a, b) receives and returns per micro-batch, bytes of the parameters that it shares
    with stages before, of their gradients, and their number: [a, b] of each."""

    forward: Floats
    backward: Floats
    shared: Floats
    shared_gradient: Floats
    shared_count: Floats


@dataclass(frozen=True)
class RunTable:
    """Every run of blocks [a, b) as a stage, whatever the others are: [a, b] of each, where a < b."""

    work: Floats  # FLOPs; infinite where the run is empty
    fixed_bytes: Floats  # without the gradients that other stages return
    working_bytes: Floats  # of these, for the operator at work
    each_bytes: Floats  # per micro-batch in flight
    early: Received  # from the first stage for sure: made in block 0
    later: Received  # from any stage before


def run_table(blocks: Blocks) -> RunTable:
    """A stage [a, b) receives what was made before it and has its next use, from a on, before b."""
    held, *amounts, copied = blocks.amounts
    early = blocks.uses[:, 0] == 0

    def spans(amount: Floats) -> Floats:
        _, before, use = blocks.uses.T
        found = np.zeros((blocks.count + 2, blocks.count + 2))
        np.add.at(found, (before + 1, use + 1), amount)
        np.subtract.at(found, (use + 1, use + 1), amount)
        return np.asarray(found.cumsum(axis=0).cumsum(axis=1)[:-1, :-1])

    def between(cumulative: Floats) -> Floats:
        return np.asarray(cumulative - cumulative[:, None])

    starts, ends = np.indices((blocks.count + 1, blocks.count + 1))
    working = blocks.working(starts, np.maximum(starts, ends))
    return RunTable(
        work=np.where(np.tri(blocks.count + 1, dtype=bool), np.inf, between(blocks.work)),
        fixed_bytes=between(blocks.owned) + between(blocks.once) + spans(copied) + working,
        working_bytes=working,
        each_bytes=between(blocks.saved) + spans(held),
        early=Received(*(spans(amount * early) for amount in amounts)),
        later=Received(*(spans(amount * ~early) for amount in amounts)),
    )


def stage_bytes(blocks: Blocks, start: int, ends: Sequence[int], in_flight: int) -> Floats:
    """[ends]: memory of the stages [start, end), which never shrinks as the end grows: gradients that other stages
    return are left out."""
    cuts = np.array([(0, start, end, blocks.count) for end in ends], dtype=np.int64).reshape(-1, 4)
    if not len(cuts):
        return np.zeros(0)
    table = cut_table(blocks, cuts)
    fixed = table.fixed_bytes - table.shared_gradient.sum(axis=2)
    found: Floats = fixed + in_flight * (table.saved_bytes + table.received_bytes)
    return found[:, 1]


def _pairs(amounts: Floats) -> list[tuple[int, int]]:
    return [(int(source), int(target)) for source, target in np.argwhere(amounts.any(axis=0))]


def _between(cumulative: Floats, ends: Ints) -> Floats:
    return np.diff(cumulative[ends], axis=1)


def stages_of(places: Ints, ends: Ints) -> Ints:
    """[cuts, places]: the stage of each of these blocks."""
    return np.asarray((places[None, :, None] >= ends[:, None, 1:-1]).sum(axis=2))


def _crossing(blocks: Blocks, ends: Ints) -> list[Floats]:
    """[cuts, source, target] per kind of amount: from the stage where something is made to every other that uses it.

    A use adds where its stage is not that of the use before: once per stage.
    """
    uses, stages, stage_of = blocks.uses, ends.shape[1] - 1, stages_of(np.arange(blocks.count), ends)
    there = stage_of[:, uses[:, 2]] if len(uses) else np.zeros((len(stage_of), 0), dtype=np.int64)
    cut, use = np.nonzero(there != stage_of[:, uses[:, 1]]) if len(uses) else (np.zeros(0, dtype=np.int64),) * 2
    cell = (cut * stages + stage_of[cut, uses[use, 0]]) * stages + there[cut, use]
    shape = (len(stage_of), stages, stages)
    size = len(stage_of) * stages * stages
    sums = (np.bincount(cell, weights=amount[use], minlength=size) for amount in blocks.amounts)
    return [np.asarray(total, dtype=np.float64).reshape(shape) for total in sums]
