"""The time of averages for many choices of pipelines: exact where all are tried (as in `cost.sync`), nearly exact where
a search goes on, and for devices that take work in proportion to their speed.

Replicas that hold the same part of a model on the same devices make a group. With R members and P bytes, by a sharded
server or a ring:

    alone     min(2 * max over links (P / R / beta + alpha), 2 (R - 1) * max over hops (P / R / beta + alpha))
    together  no less than what one link carries of all groups: sum of 2 P / R / beta
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import stages_of
from isthmus.cost.kernel import Floats, Ints
from isthmus.cost.network import FleetNetwork
from isthmus.cost.pipelines import Pipelines
from isthmus.cost.problem import FLOAT32_BYTES
from isthmus.cost.sync import SumTime, fastest, sum_time, together_s
from isthmus.fleet import Fleet
from isthmus.plans import SyncGroup

Part = tuple[tuple[int, ...], int, int]  # devices, one per replica, that own the gradients of parts first .. last.


class Averaging:
    """The parts of a model whose gradients replicas average: its blocks that own any."""

    def __init__(self, fleet: Fleet, network: FleetNetwork, blocks: Blocks) -> None:
        self._fleet, self._network = fleet, network
        size, count = np.zeros(blocks.count), np.zeros(blocks.count)
        for variable in blocks.variables:
            size[variable.uses[0]] += variable.gradient_bytes
            count[variable.uses[0]] += variable.gradient_bytes > 0
        self.parts = np.flatnonzero(size)
        self._size, self._count = size[self.parts], count[self.parts]
        self._times: dict[Part, SumTime] = {}

    def holders(self, pipelines: Sequence[Pipelines], rows: Ints) -> Ints:
        """[choices, replicas, parts]: the device that owns the gradients of each part. `rows` is [choices, replicas],
        into each replica's pipelines."""
        chosen = [(p.order[rows[:, r]], p.ends[rows[:, r]]) for r, p in enumerate(pipelines)]
        return np.stack([self.owners(order, ends) for order, ends in chosen], axis=1)

    def owners(self, order: Ints, ends: Ints) -> Ints:
        """[pipelines, parts]: the same of one replica, with the devices of stages and their ends."""
        return np.take_along_axis(order, stages_of(self.parts, ends), axis=1)

    def exact_s(self, holders: Ints, looked_at: Callable[[], None]) -> Floats:
        """[choices] seconds, as `cost.sync` has it. `holders` is [choices, replicas, parts] devices; `looked_at` is
        called for each different row."""
        choices, replicas, parts = holders.shape
        if replicas == 1 or not parts:
            return np.zeros(choices)
        rows, which = np.unique(holders.reshape(choices, -1), axis=0, return_inverse=True)
        each = np.zeros(len(rows))
        for k, row in enumerate(rows):
            looked_at()
            each[k] = self._one_s(row.reshape(replicas, parts))
        return each[which.reshape(-1)]

    def _one_s(self, holders: Ints) -> float:
        begins = np.flatnonzero(np.append(True, (holders[:, 1:] != holders[:, :-1]).any(axis=0)))
        return together_s(
            self._sum_time((tuple(holders[:, first].tolist()), int(first), int(end)))
            for first, end in zip(begins, np.append(begins[1:], holders.shape[1]), strict=True)
        )

    def _sum_time(self, part: Part) -> SumTime:
        if part not in self._times:
            members, first, end = part
            numbers = int(self._count[first:end].sum()) + 1
            group = SyncGroup(
                devices=tuple(self._network.names[d] for d in members),
                parameters=(),
                iterations=(0,),
                size_bytes=int(self._size[first:end].sum()) + FLOAT32_BYTES * numbers,
            )
            self._times[part] = sum_time(self._fleet, fastest(self._fleet, group))
        return self._times[part]

    def nearly_s(self, holders: Ints) -> Floats:
        """[choices] seconds if every group took a sharded server, or a ring in the order of the replicas."""
        choices, replicas, parts = holders.shape
        total = np.zeros(choices)
        if replicas == 1 or not parts:
            return total
        devices, byte_s, latency_s = len(self._network.names), self._network.byte_s, self._network.latency
        a, b = np.nonzero(~np.eye(replicas, dtype=bool))
        turn = np.roll(np.arange(replicas), -1)
        rows, members, size = self._groups(holders)
        shard = (size / replicas)[:, None]
        hop_s = byte_s[members[:, a], members[:, b]] * shard
        around_s = byte_s[members, members[:, turn]] * shard + latency_s[members, members[:, turn]]
        server_s = 2 * (hop_s + latency_s[members[:, a], members[:, b]]).max(axis=1)
        np.maximum.at(total, rows, np.minimum(server_s, 2 * (replicas - 1) * around_s.max(axis=1)))
        link = (rows[:, None] * devices + members[:, a]) * devices + members[:, b]
        used, load = np.unique(link, return_inverse=True)
        loads = np.bincount(load.ravel(), weights=2 * hop_s.ravel())
        np.maximum.at(total, used // devices**2, loads)
        return total

    def _groups(self, holders: Ints) -> tuple[Ints, Ints, Floats]:
        """Return the choice that each group is in, its members and its bytes."""
        parts = holders.shape[2]
        begins = np.ones((len(holders), parts), dtype=bool)
        begins[:, 1:] = (holders[:, :, 1:] != holders[:, :, :-1]).any(axis=1)
        next_begin = np.full((len(holders), parts + 1), parts)
        next_begin[:, :-1] = np.minimum.accumulate(np.where(begins, np.arange(parts), parts)[:, ::-1], axis=1)[:, ::-1]
        rows, part = np.nonzero(begins)
        before = np.concatenate([[0.0], np.cumsum(self._size)])
        return rows, holders[rows, :, part], before[next_begin[rows, part + 1]] - before[part]


def balanced_s(network: FleetNetwork, orders: Sequence[Sequence[int]], gradient_bytes: float) -> float:
    """For replicas whose devices hold gradients in proportion to their speed: a sharded server per part."""
    if len(orders) < 2:
        return 0.0
    ends = [np.cumsum(network.speed[list(o)]) / network.speed[list(o)].sum() for o in orders]
    marks = np.unique(np.concatenate(ends).round(9))
    lengths = np.diff(marks, prepend=0.0)
    middles = marks - lengths / 2
    parts = [np.minimum(np.searchsorted(e, middles), len(e) - 1) for e in ends]
    holders = np.stack([np.asarray(o)[p] for o, p in zip(orders, parts, strict=True)], axis=1)
    a, b = holders[:, :, None], holders[:, None, :]
    shard = (2 * lengths * gradient_bytes / len(orders))[:, None, None]
    loads = np.zeros_like(network.byte_s)
    np.add.at(loads, (a, b), shard * network.byte_s[a, b])
    return float(loads.max() + 2 * network.latency[a, b].max())
