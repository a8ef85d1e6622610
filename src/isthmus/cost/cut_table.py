"""Many ways to cut a model into so many stages, and what each stage computes, keeps and sends: arrays over the cuts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.cost.blocks import BlockItem, Blocks
from isthmus.cost.network import Floats

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class CutTable:
    """First axis: the cut. FLOPs and bytes are for one micro-batch, those of parameters for one step."""

    ends: Ints
    """[cuts, stages + 1]: block boundaries, 0 and the number of blocks among them."""
    stage_of: Ints
    """[cuts, blocks]"""
    forward_work: Floats
    """[cuts, stages]: FLOPs."""
    backward_work: Floats
    fixed_bytes: Floats
    saved_bytes: Floats
    """[cuts, stages]: kept from forward to backward, unless the stage recomputes."""
    column_bytes: Floats
    """[cuts, stages]: of the batch, kept if it recomputes."""
    received_bytes: Floats
    """[cuts, stages]: kept either way."""
    forward: Floats
    """[cuts, source, target]: bytes of values, as they are sent."""
    backward: Floats
    """[cuts, source, target]: bytes of the gradients that target returns to source."""
    shared: Floats
    """[cuts, owner, user]: bytes of shared parameters."""
    shared_count: Floats

    @property
    def stages(self) -> int:
        return self.forward_work.shape[1]


def every_cut(blocks: Blocks, stages: int) -> Ints:
    """[cuts, stages + 1]: the block boundaries of every cut; there are binomial(blocks - 1, stages - 1)."""
    inner = list(itertools.combinations(range(1, blocks.count), stages - 1))
    return np.array([(0, *cut, blocks.count) for cut in inner], dtype=np.int64)


def cut_table(blocks: Blocks, ends: Ints) -> CutTable:
    """The figures of these cuts, [cuts, stages + 1] block boundaries."""
    stages = ends.shape[1] - 1
    numbers = np.arange(blocks.count)
    stage_of = (numbers[None, :, None] >= ends[:, None, 1:-1]).sum(axis=2)
    forward_work = _between(blocks.forward_work, ends)
    shape = (len(ends), stages, stages)
    held, forward, backward, shared, shared_count = (np.zeros(shape) for _ in range(5))
    for item in blocks.items:
        if item.per_step:
            _add(shared, stage_of, item, item.forward_bytes)
            _add(shared_count, stage_of, item, 1)
        else:
            _add(held, stage_of, item, item.held_bytes)
            _add(forward, stage_of, item, item.forward_bytes)
            _add(backward, stage_of, item, item.backward_bytes)
    return CutTable(
        ends=ends,
        stage_of=stage_of,
        forward_work=forward_work,
        backward_work=_between(blocks.work, ends) - forward_work,
        fixed_bytes=_fixed_bytes(blocks, stage_of, stages),
        saved_bytes=_between(blocks.saved, ends),
        column_bytes=_between(blocks.columns, ends),
        received_bytes=held.sum(axis=1),
        forward=forward,
        backward=backward,
        shared=shared,
        shared_count=shared_count,
    )


def _between(cumulative: Floats, ends: Ints) -> Floats:
    return np.diff(cumulative[ends], axis=1)


def _add(table: Floats, stage_of: Ints, item: BlockItem, amount: int) -> None:
    """From the stage where the item is made to every other stage that takes it, once each."""
    if amount:
        home = stage_of[:, item.made_in]
        for rows, stage in _other_stages(stage_of, item.made_in, item.uses):
            table[rows, home[rows], stage] += amount


def _other_stages(stage_of: Ints, first: int, uses: Sequence[int]) -> list[tuple[Ints, Ints]]:
    """Per use, the cuts in which it is the first one of a stage that is not that of block `first`, and the stage."""
    found: list[tuple[Ints, Ints]] = []
    before = stage_of[:, first]
    for use in uses:
        stage = stage_of[:, use]
        rows = np.flatnonzero(stage != before)
        found.append((rows, stage[rows]))
        before = stage
    return found


def _fixed_bytes(blocks: Blocks, stage_of: Ints, stages: int) -> Floats:
    table = np.zeros((len(stage_of), stages))
    every = np.arange(len(stage_of))
    for variable in blocks.variables:
        table[every, stage_of[:, variable.uses[0]]] += variable.owned_bytes
        for rows, stage in _other_stages(stage_of, variable.uses[0], variable.uses[1:]):
            table[rows, stage] += variable.user_bytes
    return table
