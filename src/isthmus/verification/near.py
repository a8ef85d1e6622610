"""Plans that differ from a document's in one thing: a cut, a device, a swap, a merger, a share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from isthmus.verification.closed_form import Setup
from isthmus.verification.reading import GraphReading

MOST_NEAR = 240


def near(reading: GraphReading, setups: Sequence[Setup]) -> Iterator[list[Setup]]:
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


def _moved(reading: GraphReading, setup: Setup) -> Iterator[Setup]:
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
