"""Times and prices of plans made here, by the closed form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from isthmus.errors import UserError
from isthmus.plans import Collective
from isthmus.verification.bound import Bounds
from isthmus.verification.cutting import CutGraph, cut
from isthmus.verification.feeding import copies_sums
from isthmus.verification.packing import as_requested, is_exact
from isthmus.verification.price import SECONDS_PER_HOUR, paid
from isthmus.verification.question import CLOSE
from isthmus.verification.reading import GraphReading
from isthmus.verification.sums import Summed, groups_soonest, summed_soonest, sums_s
from isthmus.verification.timing import PipelineCheck

NEVER = float("inf")


class Setup(NamedTuple):
    """One replica: a device per stage, the first position of each (the first is 0), and its micro-batches."""

    devices: tuple[str, ...]
    starts: tuple[int, ...]
    micro_batches: int
    recompute: tuple[bool, ...] | None = None
    """Which stages compute their forward twice; None for the best choice found."""


class ClosedForm:
    """Times or prices of plans by the closed form, each stage holding as many micro-batches as its memory allows.

    Infinite beyond a limit of the terms, where a buffer would be written in two stages, memory does not hold a device's
    stages, or data or labels would be read elsewhere. With `least`, what no such plan undercuts where this check does
    not know to the last byte what a planner would send: shortest messages, sums of parameters at their least, and of
    several replicas no price of what leaves a site.
    """

    def __init__(self, reading: GraphReading, *, priced: bool, least: bool = False) -> None:
        self.reading, self.question, self.priced, self._least = reading, reading.question, priced, least
        self._bounds = Bounds(reading)
        self._graph = cache(self._cut_graph)
        self._summed: dict[Summed, Collective] = {}

    def is_exact(self, *, several: bool) -> bool:
        """Return whether this is what a plan takes, rather than something that it does not undercut or exceed."""
        question = self.question
        egress = any(site.egress_price_per_gb for site in question.fleet.region_info)
        money = self.priced or question.constraints.max_price is not None
        known = not several or (question.gradients and not (money and egress))
        return known and is_exact(question.constraints.compression)

    def judged(self, setups: Sequence[Setup]) -> float:
        """Seconds, or money, of a step."""
        replicas = [self.pipeline(setup) for setup in setups]
        allowed = [replica for replica in replicas if replica is not None]
        return self.of(allowed, [s.micro_batches for s in setups]) if len(allowed) == len(replicas) else NEVER

    def of(self, replicas: Sequence[PipelineCheck], shares: Sequence[int], below: float = NEVER) -> float:
        """Return a step's time or price with so many micro-batches per replica; from `below` on possibly more."""
        below_s = NEVER if self.priced else below
        slowest_s = max(replica.step_s(share, below_s) for replica, share in zip(replicas, shares, strict=True))
        if slowest_s == NEVER or slowest_s >= below_s:
            return slowest_s
        constraints, several = self.question.constraints, len(replicas) > 1
        roughly = self._least and several and not self.is_exact(several=True)
        held = [(p.devices, p.graph) for p in replicas]
        sync = summed_soonest(self.question.fleet, held, self._summed)
        sync = msgspec.structs.replace(sync, period=self.question.period)
        if self.question.fed is not None:
            step_s = slowest_s + self.copies_s(replicas[0].graph)
        elif roughly and not self.question.gradients:
            step_s = slowest_s + self._bounds.averaging_s(len(replicas))
        else:
            step_s = slowest_s + sums_s(self.question.fleet, sync)
        if constraints.max_step_s is not None and step_s > constraints.max_step_s * (1 + CLOSE):
            return NEVER
        if not self.priced and constraints.max_price is None:
            return step_s
        if roughly:
            price = self.hourly({name for p in replicas for name in p.devices}) * step_s / SECONDS_PER_HOUR
        else:
            timed = [p.timed() for p in replicas]  # what is sent does not depend on what computes twice
            price = paid(self.question.fleet, timed, shares, sync, step_s)
        if constraints.max_price is None:
            return price
        return step_s if 1000 * price <= constraints.max_price * (1 + CLOSE) else NEVER

    def copies_s(self, graph: CutGraph, stages: Sequence[int] | None = None) -> float:
        """Seconds of the sums of several holders whose chain is timed on one device in their place: of all stages that
        have copies, or of some of these alone, which take no longer."""
        fed = self.question.fed
        if fed is None:
            return 0.0
        summed = copies_sums(fed, graph)
        groups = [
            (fed.constraints.feeders, names) for stage, names in summed.items() if stages is None or stage in stages
        ]
        return sums_s(fed.fleet, groups_soonest(fed.fleet, graph, groups, self._summed))

    def first_sum_s(self, end: int) -> float:
        """Return the time of the sums between copies of a first stage alone that ends before this position."""
        if self.question.fed is None:
            return 0.0
        graph = self._graph((0, end) if end < len(self.reading.operators) else (0,))
        return self.copies_s(graph, (0,)) if graph is not None else 0.0

    def hourly(self, names: set[str]) -> float:
        return sum(self.question.fleet.device(name).price_per_hour for name in names)

    def pipeline(self, setup: Setup) -> PipelineCheck | None:
        """The replica for any number of micro-batches, with the bytes that cross links; None where the terms or the
        graph do not allow it."""
        graph = self._graph(setup.starts) if self._meets_constraints(setup) else None
        if graph is None:
            return None
        sent = as_requested(self.question, graph, setup.devices, least=self._least)
        return PipelineCheck(self.question, sent, setup.devices, setup.recompute)

    def _meets_constraints(self, setup: Setup) -> bool:
        holders, labels_from = self.question.constraints.data_holders, self.reading.labels_from
        if any(a == b for a, b in itertools.pairwise(setup.devices)):
            return False
        if not holders:
            return True
        begins = setup.devices[0] in holders
        if labels_from is None or len(setup.devices) == 1:
            return begins
        return begins and setup.devices[-1] in holders and setup.starts[-1] <= labels_from

    def _cut_graph(self, starts: tuple[int, ...]) -> CutGraph | None:
        try:
            return cut(self.reading, starts)
        except UserError:
            return None
