"""The certificate: its arithmetic, and an attempt to refute its lower bound with plans made here.

Small instances are settled by brute force over all pipelines. Elsewhere plans near the document's are tried, and a
bound of our own says what is proven without trusting the document's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from isthmus.errors import UserError
from isthmus.plan import Certificate
from isthmus.verify.bound import own_bound_s
from isthmus.verify.cutting import CutGraph, cut
from isthmus.verify.reading import Reading
from isthmus.verify.sums import in_shards, sums_s
from isthmus.verify.timing import Timed
from isthmus.verify.verdict import CLOSE, BoundCheck, Ledger

MOST_DEVICES = 5
MOST_PLACES = 12
"""Up to here every order of every subset and every cut are tried: at most 90,000 pipelines."""
MOST_NEAR = 240
GAP_ROUNDING = 1e-7
"""Absolute: planners call a gap of rounding errors none."""
CLASSIC_SCOPE = "memory of the classic schedule"
"""Words of a scope that leaves out pipelines which hold fewer micro-batches than the classic schedule."""


class Setup(NamedTuple):
    """One replica: a device per stage, the first position of each (the first is 0), and its micro-batches."""

    devices: tuple[str, ...]
    starts: tuple[int, ...]
    micro_batches: int


def check_certificate(
    ledger: Ledger, reading: Reading, certificate: Certificate | None, step_s: float, setups: Sequence[Setup]
) -> BoundCheck:
    """`step_s` is the plan's as computed here."""
    own_s = own_bound_s(reading)
    if certificate is None:
        proven = f"at most {step_s / own_s - 1:.2%} above the best of any plan" if own_s > 0 else "nothing"
        told = f"the plan states no bound; the simple one of this check proves {proven}"
        return BoundCheck(method="none", own_bound_s=own_s, told=told)
    stated_s = certificate.lower_bound_s
    bounds = ledger.judge("certificate.lower_bound_s", stated_s > 0, stated_s, "above 0: no time proves nothing")
    ledger.judge(
        "certificate.lower_bound_s", stated_s <= step_s * (1 + CLOSE), stated_s, f"at most the step time, {step_s:.9g}"
    )
    if certificate.objective != "step":
        told = "the stated bound is one on the largest stage: checked was that it is above 0 and below the step time"
        return BoundCheck(method="none", own_bound_s=own_s, told=told)
    if bounds:
        gap = step_s / stated_s - 1
        ledger.judge("certificate.gap", abs(certificate.gap - gap) <= GAP_ROUNDING, certificate.gap, gap)
    found = _refutation(reading, CLASSIC_SCOPE in certificate.scope, setups, own_s)
    if found.best_s is not None:
        ledger.judge(
            "certificate.lower_bound_s", stated_s <= found.best_s * (1 + CLOSE), stated_s,
            f"at most {found.best_s:.9g}: a plan within its scope takes that long",
        )  # fmt: skip
    return found


def _refutation(reading: Reading, classic: bool, setups: Sequence[Setup], own_s: float) -> BoundCheck:
    maker = _Maker(reading, classic)
    small = len(reading.question.fleet.names) <= MOST_DEVICES and len(reading.places) <= MOST_PLACES
    tried = [maker.step_s(plan) for plan in (_every_pipeline(reading) if small else _near(reading, setups))]
    best_s = min([maker.step_s(setups), *tried])
    return BoundCheck(
        method="brute force" if small else "own bound and near plans",
        plans_tried=len(tried),
        best_s=None if best_s == float("inf") else best_s,
        own_bound_s=own_s,
        told=(
            f"brute force: every order, every subset and every cut, {len(tried)} pipelines, the best of them "
            f"{best_s:.6g} s; plans of several replicas were not tried"
            if small
            else f"the stated bound was not proven again: {len(tried)} plans near this one were tried against it, the "
            f"best of them {best_s:.6g} s; the simple bound of this check, {own_s:.6g} s, holds for any plan"
        ),
    )


class _Maker:
    """Times of plans by the closed form, each stage holding as many micro-batches as its memory allows."""

    def __init__(self, reading: Reading, classic: bool) -> None:
        self._reading, self._question, self._classic = reading, reading.question, classic
        self._cut = cache(self._cut_graph)

    def step_s(self, setups: Sequence[Setup]) -> float:
        """Infinite where a buffer would be written in two stages, or memory does not hold a stage."""
        graphs = [self._cut(setup.starts) for setup in setups]
        if None in graphs:
            return float("inf")
        cuts = [graph for graph in graphs if graph is not None]
        slowest_s = max(self._pipeline_s(s, g) for s, g in zip(setups, cuts, strict=True))
        sync = in_shards([(s.devices, g) for s, g in zip(setups, cuts, strict=True)])
        return slowest_s + sums_s(self._question.fleet, sync) / self._question.period

    def _cut_graph(self, starts: tuple[int, ...]) -> CutGraph | None:
        try:
            return cut(self._reading, starts)
        except UserError:
            return None

    def _pipeline_s(self, setup: Setup, graph: CutGraph) -> float:
        limits = self._limits(setup, graph)
        if limits is None:
            return float("inf")
        return Timed(self._question, graph, setup.devices).step_s(limits, setup.micro_batches)

    def _limits(self, setup: Setup, graph: CutGraph) -> list[int] | None:
        found: list[int] = []
        for stage, (device, part) in enumerate(zip(setup.devices, graph.parts, strict=True)):
            room = self._question.fleet.device(device).memory_bytes - part.memory_bytes(0)
            if room < 0:
                return None
            limit = min(setup.micro_batches, room // part.kept_bytes) if part.kept_bytes else setup.micro_batches
            if self._question.schedule == "gpipe":
                least = setup.micro_batches
            else:
                least = min(setup.micro_batches, len(setup.devices) - stage) if self._classic else 1
            if limit < least:
                return None
            found.append(limit)
        return found


def _every_pipeline(reading: Reading) -> Iterator[list[Setup]]:
    names, micro_batches = reading.question.fleet.names, reading.question.micro_batches
    for size in range(1, min(len(names), len(reading.places) + 1) + 1):
        for inner in itertools.combinations(reading.places, size - 1):
            for order in itertools.permutations(names, size):
                yield [Setup(order, (0, *inner), micro_batches)]


def _near(reading: Reading, setups: Sequence[Setup]) -> Iterator[list[Setup]]:
    """Plans that differ from the document's in one thing, of all kinds in turn."""
    kinds: list[Iterable[list[Setup]]] = []
    used = {device for setup in setups for device in setup.devices}
    idle = [name for name in reading.question.fleet.names if name not in used]
    for number, setup in enumerate(setups):
        for changes in (_moved(reading, setup), _swapped(setup), _merged(setup), _replaced(setup, idle)):
            kinds.append(_with(setups, number, changes))
    kinds.append(_shared_otherwise(setups))
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
