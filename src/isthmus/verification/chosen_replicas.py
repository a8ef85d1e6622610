"""Replicas whose devices are chosen: their tables, and what was proven of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from isthmus.verification.device_sets import Tracked
from isthmus.verification.group_times import GroupTimes
from isthmus.verification.pipelines import SearchedPipelines
from isthmus.verification.replica_search import JointSearch, PeriodTerms, PeriodWalks, ReplicaTables
from isthmus.verification.sent import Floats, Ints
from isthmus.verification.walks import Terms

CONTINUED, MOST_CONTINUED = 1000, 64_000
"""Replicas of one choice that are continued, at first and at most: twice as many each time it was not settled."""
MOST_BYTES = 400_000_000  # memory of the walks that are kept, and of tables

Choice = tuple[int, ...]  # a state for each replica: its devices


class _Settled(NamedTuple):
    """No plan whose sums take so long takes less than the limit."""

    limit_s: float
    low_s: float
    high_s: float


class ChosenReplicas:
    """The search of one problem. All kinds of devices are tracked."""

    def __init__(self, pipelines: SearchedPipelines) -> None:
        walks = pipelines.walks
        self.pipelines = pipelines
        names = [kind.names for kind in walks.kinds.all]
        self._groups = GroupTimes(pipelines.question, names, walks.arrays.gradients[:, 0], pipelines.parameters)
        self._walked: dict[Hashable, tuple[Floats, Floats]] = {}
        self._tables: dict[Hashable, ReplicaTables] = {}
        self._settled: dict[Hashable, list[_Settled]] = {}
        self._continued = dict[Hashable, int]()
        self._bytes = 0

    @cached_property
    def _tracked(self) -> Tracked:
        kinds = self.pipelines.walks.kinds
        return Tracked(kinds, range(len(kinds.all)))

    def none_below(
        self,
        choice: Choice,
        intervals: Sequence[Sequence[PeriodTerms]],
        limit_s: float,
        sums_s: tuple[float, float],
        home: Hashable,
        ended: Callable[[], bool],
    ) -> bool:
        """Return whether no plan of these replicas, whose sums take so long, takes less than the limit; False where
        that was not settled. `intervals`: of each replica, the periods that it may have. `home`: where their terms have
        the largest block summed."""
        low_s, high_s = sums_s
        asked = choice, home
        settled = self._settled.setdefault(asked, [])
        if any(limit_s <= known.limit_s and known.low_s <= low_s and high_s <= known.high_s for known in settled):
            return True
        tables = [self._table(state, each) for state, each in zip(choice, intervals, strict=True)]
        most = self._continued.get(asked, CONTINUED)
        search = JointSearch(self.pipelines, self._groups, tables, most)
        found = search.none_below(limit_s, low_s, high_s, ended)
        if found:
            settled.append(_Settled(limit_s, low_s, high_s))
        else:
            self._continued[asked] = min(2 * most, MOST_CONTINUED)
        return found

    def _table(self, state: int, intervals: Sequence[PeriodTerms]) -> ReplicaTables:
        walks = self.pipelines.walks
        key = state, *(each.key for each in intervals)
        if key not in self._tables:
            walked = [PeriodWalks(each, *self._walk(each.terms)) for each in intervals]
            devices: Ints = np.zeros(len(walks.kinds.all), dtype=np.int64)
            devices[list(self._tracked.kinds)] = self._tracked.used[state]
            made = ReplicaTables(self.pipelines, devices, self._tracked, walked)
            self._make_room(made.bytes)
            self._tables[key] = made
        return self._tables[key]

    def _walk(self, terms: Terms) -> tuple[Floats, Floats]:
        """The stages that the terms allow, and the least fill of each set of devices."""
        walks = self.pipelines.walks
        key = walks.alike(terms)
        if key not in self._walked:
            stages = walks.stages(terms)
            found = walks.solve(self._tracked, terms, stages)
            self._make_room(found.nbytes)
            self._walked[key] = stages, found
        return self._walked[key]

    def _make_room(self, needed: int) -> None:
        self._bytes += needed
        if self._bytes > MOST_BYTES:
            self._walked.clear()
            self._tables.clear()
            self._bytes = needed
