"""The highest lower bound that decisions prove: of the time of a step by bisection, of its price by intervals of steps.

A decision (`decision`) answers for one limit. Those of few cells and few classes of devices come first; what they leave
open is asked of larger ones. Each may be so much work and no more: what a document states, its check can decide.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from isthmus.verification.decision import Decision
from isthmus.verification.prefixes import OutOfWork, Work
from isthmus.verification.question import Question
from isthmus.verification.reading import GraphReading
from isthmus.verification.stage_seconds import Relaxation

RELAXATIONS = (Relaxation(12, 64), Relaxation(24, 300), Relaxation(40, 4_000), Relaxation(64, 70_000))
MOST_WORK = 6e8  # entries of arrays of one decision; a second has two to five times 10^8
MOST_DEVICES = 256  # beyond, work over all devices is the bound
FINE, COARSE = 1.002, 1.02  # between what is proven and what is not, when a bisection ends; where a finer one follows
ROUNDING = 1e-7  # relative: between a bound and the plan that attains it
SECONDS_PER_HOUR = 3600


class ProofProgress(NamedTuple):
    bound: float
    distinguished: str  # in words


def unproven(question: Question) -> str | None:
    """Why nothing is proven of such plans, in words; None where bounds are known."""
    if question.schedule == "delayed":
        return "no proof: steps overlap"
    if question.schedule not in ("1f1b", "gpipe"):
        return "no proof: bounds count each backward whole"
    if question.constraints.copied:
        return "no proof: several holders feed one chain"
    return None


class Prover:
    """Bounds of one question, over all its numbers of micro-batches: seconds, or money where it has a price."""

    def __init__(self, question: Question, *, priced: bool) -> None:
        self._question, self._priced = question, priced
        self._readings = [
            GraphReading(question if n == question.micro_batches else question.cut_into(n)) for n in question.counts
        ]
        fleet = question.fleet
        self._together = sum(question.flops_per_s(name) for name in fleet.names)
        self._rates = {d.name: d.price_per_hour / SECONDS_PER_HOUR for d in fleet.devices}

    def simple(self) -> float:
        """Return the time of all work on all devices together, or the price of each FLOP where it is cheapest."""
        work = min(r.lasting_flops * r.question.micro_batches for r in self._readings)
        if self._priced:
            per_flop = min(rate / self._question.flops_per_s(name) for name, rate in self._rates.items())
            return work * per_flop
        return work / self._together

    def proves(self, bound: float, ended: Callable[[], bool] = bool) -> bool:
        """Whether no plan takes less. Raises OutOfWork where that takes more than a decision may."""
        if bound <= self.simple():
            return True
        spent = False
        for decisions in self._levels():
            works = [Work(most=MOST_WORK, ended=ended) for _ in decisions]
            try:
                if self._asked(decisions, bound, works) >= bound:
                    return True
            except OutOfWork:
                spent = True
                if ended():
                    break
        if spent:
            raise OutOfWork
        return False

    def run(
        self, goal: float, most_work: float, ended: Callable[[], bool], tell: Callable[[ProofProgress], None]
    ) -> float:
        """The highest bound that was proven, up to the goal, which a known plan takes: until nothing more can be, or
        it is ended, by work or otherwise."""
        best, left = min(goal, self.simple()), most_work
        for decisions, finer in itertools.pairwise(itertools.chain(self._levels(), [None])):
            if best >= goal or decisions is None:
                break
            low, high, asked = best, goal, goal * (1 - ROUNDING / 100)
            while asked > best and high > low * (COARSE if finer else FINE):
                works = [Work(most=min(MOST_WORK, left), ended=ended) for _ in decisions]
                proven = 0.0
                with contextlib.suppress(OutOfWork):
                    proven = self._asked(decisions, asked, works)
                left -= sum(work.spent for work in works)
                if left <= 0 or ended():
                    return best
                if proven > low:
                    best = low = proven
                    tell(ProofProgress(best, _distinguished(decisions[0])))
                if proven < asked:
                    high = asked
                if self._priced:
                    break
                asked = math.sqrt(low * high)
        return best

    def _asked(self, decisions: list[Decision], limit: float, works: list[Work]) -> float:
        """The limit if it is proven; of prices, what is proven up to it; else 0."""
        pairs = list(zip(decisions, works, strict=True))
        if self._priced:
            return min(self._price(d, limit, w) for d, w in pairs)
        return 0.0 if any(d.below(limit, w) for d, w in pairs) else limit

    def _levels(self) -> Iterator[list[Decision]]:
        if len(self._question.fleet.names) > MOST_DEVICES:
            return
        distinguished: object = None
        for relaxation in RELAXATIONS:
            decisions = [Decision(reading, relaxation) for reading in self._readings]
            same, distinguished = distinguished, [(d.figures.count, len(d.classes.speed)) for d in decisions]
            if same != distinguished:
                yield decisions

    def _price(self, decision: Decision, goal: float, work: Work) -> float:
        """A bound on the price, up to the goal: of plans with a step between two limits, the shorter one times what
        devices cost that take less than the longer one."""
        rate = decision.rates(self._rates)
        cheapest = float(rate.min())
        if not cheapest:
            return 0.0
        work_s = decision.whole_flops * decision.question.micro_batches / self._together
        if not work_s:
            return 0.0
        longest_s = max(goal / cheapest, work_s) * FINE  # `max_step` says nothing of it: it limits the formula's step
        intervals = [(work_s * cheapest, work_s, longest_s)]
        while intervals[0][0] < goal and intervals[0][2] > intervals[0][1] * FINE:
            bound, low_s, high_s = heapq.heappop(intervals)
            middle_s = math.sqrt(low_s * high_s)
            below = decision.least_rate(middle_s, rate, work)
            heapq.heappush(intervals, (max(bound, low_s * below), low_s, middle_s))
            heapq.heappush(intervals, (max(bound * middle_s / low_s, bound), middle_s, high_s))
        return min(goal, intervals[0][0])


def _distinguished(decision: Decision) -> str:
    return f"{len(decision.classes.speed)} classes of devices, {decision.figures.count} places to cut"
