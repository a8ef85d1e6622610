"""The certificate: its arithmetic, and an attempt to refute its lower bound with plans made here.

Small instances are settled by brute force over all pipelines. Elsewhere plans near the document's are tried, and a
bound of our own says what is proven without trusting the document's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from isthmus.errors import UserError
from isthmus.plan import Certificate
from isthmus.verify.bound import own_bound_s, own_price_bound
from isthmus.verify.cutting import CutGraph, Part, cut
from isthmus.verify.packing import as_asked
from isthmus.verify.price import paid
from isthmus.verify.reading import Reading
from isthmus.verify.sums import in_shards, sums_s
from isthmus.verify.timing import Timed
from isthmus.verify.verdict import CLOSE, BoundCheck, Ledger

MOST_DEVICES = 5
MOST_PLACES = 12
"""Up to here every order of every subset and every cut are tried: at most 90,000 pipelines."""
MOST_NEAR = 240
MOST_SUBSETS = 5
"""Stages short of memory up to which every set of them is tried as the set that recomputes; beyond, the first k."""
GAP_ROUNDING = 1e-7
"""Absolute: planners call a gap of rounding errors none."""
CLASSIC_SCOPE = "memory of the classic schedule"
"""Words of a scope that leaves out pipelines which hold fewer micro-batches than the classic schedule."""


class Setup(NamedTuple):
    """One replica: a device per stage, the first position of each (the first is 0), and its micro-batches."""

    devices: tuple[str, ...]
    starts: tuple[int, ...]
    micro_batches: int
    recompute: tuple[bool, ...] | None = None
    """Which stages compute their forward twice; None for the best choice found."""


class Found(NamedTuple):
    """What a plan takes per step, as computed here: seconds, and money."""

    step_s: float
    price: float


def check_certificate(
    ledger: Ledger, reading: Reading, certificate: Certificate | None, found: Found, setups: Sequence[Setup]
) -> BoundCheck:
    own_s, step_s = own_bound_s(reading), found.step_s
    if certificate is None:
        proven = f"at most {step_s / own_s - 1:.2%} above the best of any plan" if own_s > 0 else "nothing"
        told = f"the plan states no bound; the simple one of this check proves {proven}"
        return BoundCheck(method="none", own_bound=own_s, told=told)
    priced = certificate.objective == "cost"
    stated, own, reached = certificate.lower_bound, own_s, step_s
    if priced:
        own, reached = own_price_bound(reading), found.price
    bounds = ledger.judge("certificate.lower_bound", stated > 0, stated, "above 0: nothing proves nothing")
    most = f"at most the {'price of a step' if priced else 'step time'}, {reached:.9g}"
    ledger.judge("certificate.lower_bound", stated <= reached * (1 + CLOSE), stated, most)
    if certificate.objective == "stage":
        told = "the stated bound is one on the largest stage: checked was that it is above 0 and below the step time"
        return BoundCheck(method="none", own_bound=own_s, told=told)
    if bounds:
        gap = reached / stated - 1
        ledger.judge("certificate.gap", abs(certificate.gap - gap) <= GAP_ROUNDING, certificate.gap, gap)
    check = _refutation(_Maker(reading, CLASSIC_SCOPE in certificate.scope, priced), setups, own)
    if check.best is not None:
        ledger.judge(
            "certificate.lower_bound", stated <= check.best * (1 + CLOSE), stated,
            f"at most {check.best:.9g}: a plan within its scope {'costs no more' if priced else 'takes that long'}",
        )  # fmt: skip
    return check


def _refutation(maker: _Maker, setups: Sequence[Setup], own: float) -> BoundCheck:
    reading, unit = maker.reading, "in money" if maker.priced else "s"
    small = len(reading.question.fleet.names) <= MOST_DEVICES and len(reading.places) <= MOST_PLACES
    tried = [maker.judged(plan) for plan in (_every_pipeline(reading) if small else _near(reading, setups))]
    best = min([maker.judged(setups), *tried])
    return BoundCheck(
        method="brute force" if small else "own bound and near plans",
        plans_tried=len(tried),
        best=None if best == float("inf") else best,
        own_bound=own,
        told=(
            f"brute force: every order, every subset and every cut, {len(tried)} pipelines, the best of them "
            f"{best:.6g} {unit}; plans of several replicas were not tried"
            if small
            else f"the stated bound was not proven again: {len(tried)} plans near this one were tried against it, the "
            f"best of them {best:.6g} {unit}; the simple bound of this check, {own:.6g} {unit}, holds for any plan"
        ),
    )


class _Maker:
    """Times or prices of plans by the closed form, each stage holding as many micro-batches as its memory allows.

    Infinite where a buffer would be written in two stages, memory does not hold a device's stages, or data or labels
    would be read elsewhere.
    """

    def __init__(self, reading: Reading, classic: bool, priced: bool) -> None:
        self.reading, self._question, self._classic, self.priced = reading, reading.question, classic, priced
        self._cut = cache(self._cut_graph)
        self._best_s = float("inf")

    def judged(self, setups: Sequence[Setup]) -> float:
        if not all(self._respects(setup) for setup in setups):
            return float("inf")
        graphs = [self._cut(setup.starts) for setup in setups]
        if None in graphs:
            return float("inf")
        cuts = [as_asked(self._question, g, s.devices) for s, g in zip(setups, graphs, strict=True) if g is not None]
        slowest_s = max(self._pipeline_s(s, g) for s, g in zip(setups, cuts, strict=True))
        sync = in_shards([(s.devices, g) for s, g in zip(setups, cuts, strict=True)])
        sync = msgspec.structs.replace(sync, period=self._question.period)  # once in so many steps
        step_s = slowest_s + sums_s(self._question.fleet, sync)
        if not self.priced:
            self._best_s = min(self._best_s, step_s)
        if not self.priced or step_s == float("inf"):
            return step_s
        none = [(False,) * len(s.devices) for s in setups]  # what is sent does not depend on it
        timed = [Timed(self._question, g, s.devices, n) for s, g, n in zip(setups, cuts, none, strict=True)]
        return paid(self._question.fleet, timed, [s.micro_batches for s in setups], sync, step_s)

    def _respects(self, setup: Setup) -> bool:
        holders, labels_from = self._question.terms.data_holders, self.reading.labels_from
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

    def _pipeline_s(self, setup: Setup, graph: CutGraph) -> float:
        if setup.recompute is not None:
            return self._chosen_s(setup, graph, setup.recompute)
        none = (False,) * len(setup.devices)
        found_s = self._chosen_s(setup, graph, none)
        if not self._question.recompute:
            return found_s
        timed = Timed(self._question, graph, setup.devices, none)
        unhindered_s = timed.step_s([setup.micro_batches] * len(none), setup.micro_batches)
        if unhindered_s >= min(found_s * (1 - CLOSE), self._best_s):  # no choice makes it the best
            return found_s
        return min([found_s, *(self._chosen_s(setup, graph, again) for again in self._choices(setup, graph))])

    def _choices(self, setup: Setup, graph: CutGraph) -> Iterator[tuple[bool, ...]]:
        """Sets of stages that recompute, of those that hold fewer than all micro-batches otherwise."""
        scarce = [
            stage for stage, (device, part) in enumerate(zip(setup.devices, graph.parts, strict=True))
            if setup.devices.count(device) > 1 or self._most(setup, device, part, False) < setup.micro_batches
        ]  # fmt: skip
        for count in range(1, len(scarce) + 1):
            few = len(scarce) <= MOST_SUBSETS
            for chosen in itertools.combinations(scarce, count) if few else [scarce[:count]]:
                yield tuple(stage in chosen for stage in range(len(setup.devices)))

    def _chosen_s(self, setup: Setup, graph: CutGraph, recompute: tuple[bool, ...]) -> float:
        limits = self._limits(setup, graph, recompute)
        if limits is None:
            return float("inf")
        return Timed(self._question, graph, setup.devices, recompute).step_s(limits, setup.micro_batches)

    def _most(self, setup: Setup, device: str, part: Part, recompute: bool) -> int:
        """Micro-batches that the device holds of this stage alone; below 0 where it does not fit at all."""
        room = self._question.fleet.device(device).memory_bytes - part.memory_bytes(0, recompute)
        each = part.kept_bytes(recompute)
        return -1 if room < 0 else min(setup.micro_batches, room // each) if each else setup.micro_batches

    def _limits(self, setup: Setup, graph: CutGraph, recompute: tuple[bool, ...]) -> list[int] | None:
        """As many as fit, the least for all stages first; where stages share a device, the first takes what is left."""
        least = [self._least(setup, stage) for stage in range(len(setup.devices))]
        free = {device: self._question.fleet.device(device).memory_bytes for device in setup.devices}
        for device, part, count, again in zip(setup.devices, graph.parts, least, recompute, strict=True):
            free[device] -= part.memory_bytes(count, again)
        if min(free.values()) < 0:
            return None
        found: list[int] = []
        for device, part, count, again in zip(setup.devices, graph.parts, least, recompute, strict=True):
            more, each = setup.micro_batches - count, part.kept_bytes(again)
            if each:
                more = min(more, free[device] // each)
                free[device] -= more * each
            found.append(count + more)
        return found

    def _least(self, setup: Setup, stage: int) -> int:
        if self._question.schedule == "gpipe":
            return setup.micro_batches
        return min(setup.micro_batches, len(setup.devices) - stage) if self._classic else 1


def _every_pipeline(reading: Reading) -> Iterator[list[Setup]]:
    names, micro_batches = reading.question.fleet.names, reading.question.micro_batches
    for size in range(1, min(len(names), len(reading.places) + 1) + 1):
        for inner in itertools.combinations(reading.places, size - 1):
            for order in itertools.permutations(names, size):
                yield [Setup(order, (0, *inner), micro_batches)]
    if reading.labels_from is None:
        return
    for size in range(3, min(len(names) + 1, len(reading.places) + 1) + 1):  # back to where the labels are
        for inner in itertools.combinations(reading.places, size - 1):
            for order in itertools.permutations(names, size - 1):
                yield [Setup((*order, order[0]), (0, *inner), micro_batches)]


def _near(reading: Reading, setups: Sequence[Setup]) -> Iterator[list[Setup]]:
    """Plans that differ from the document's in one thing, of all kinds in turn; each with its best choice of stages
    that recompute."""
    setups = [setup._replace(recompute=None) for setup in setups]
    kinds: list[Iterable[list[Setup]]] = []
    used = {device for setup in setups for device in setup.devices}
    idle = [name for name in reading.question.fleet.names if name not in used]
    for number, setup in enumerate(setups):
        for changes in (_moved(reading, setup), _swapped(setup), _merged(setup), _replaced(setup, idle)):
            kinds.append(_with(setups, number, changes))
    kinds += [_shared_otherwise(setups), [setups]]
    in_turn = (plan for row in itertools.zip_longest(*kinds) for plan in row if plan is not None)
    return itertools.islice(in_turn, MOST_NEAR)


def _with(setups: Sequence[Setup], number: int, changes: Iterable[Setup]) -> Iterator[list[Setup]]:
    for change in changes:
        yield [*setups[:number], change, *setups[number + 1 :]]


def _moved(reading: Reading, setup: Setup) -> Iterator[Setup]:
    """One cut moved by a few places."""
    index = {place: k for k, place in enumerate(reading.places)}
    for by in (1, -1, 2, -2, 4, -4, 8, -8):
        for stage in range(1, len(setup.starts)):
            at = index.get(setup.starts[stage], -len(index)) + by
            if 0 <= at < len(index):
                moved = (*setup.starts[:stage], reading.places[at], *setup.starts[stage + 1 :])
                if all(a < b for a, b in itertools.pairwise(moved)):
                    yield setup._replace(starts=moved)


def _swapped(setup: Setup) -> Iterator[Setup]:
    for a, b in itertools.combinations(range(len(setup.devices)), 2):
        devices = list(setup.devices)
        devices[a], devices[b] = devices[b], devices[a]
        yield setup._replace(devices=tuple(devices))


def _merged(setup: Setup) -> Iterator[Setup]:
    """Two neighbouring stages on one of their devices."""
    for stage in range(1, len(setup.starts)):
        starts = (*setup.starts[:stage], *setup.starts[stage + 1 :])
        for gone in (stage - 1, stage):
            yield setup._replace(starts=starts, devices=(*setup.devices[:gone], *setup.devices[gone + 1 :]))


def _replaced(setup: Setup, idle: Sequence[str]) -> Iterator[Setup]:
    for device in idle:
        for stage in range(len(setup.devices)):
            yield setup._replace(devices=(*setup.devices[:stage], device, *setup.devices[stage + 1 :]))


def _shared_otherwise(setups: Sequence[Setup]) -> Iterator[list[Setup]]:
    """One micro-batch given from one replica to another."""
    for giver, taker in itertools.permutations(range(len(setups)), 2):
        if setups[giver].micro_batches > 1:
            changed = list(setups)
            changed[giver] = setups[giver]._replace(micro_batches=setups[giver].micro_batches - 1)
            changed[taker] = setups[taker]._replace(micro_batches=setups[taker].micro_batches + 1)
            yield changed
