"""Devices that may be exchanged for each other, and sets of them as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.verification.bound import kinds_of
from isthmus.verification.question import Question

Ints = NDArray[np.int64]
INFINITE = float("inf")


class DeviceKind(NamedTuple):
    """Devices that may be exchanged for each other."""

    names: Sequence[str]
    speed: float
    room: float  # bytes, of the largest; infinite where it holds the model with all micro-batches


class DeviceKinds:
    """The kinds of a fleet's devices, and the links between them as arrays [source, target].

    The diagonal joins two devices of one kind; it is infinite for a kind of one device.
    """

    def __init__(self, question: Question, ample_bytes: float, *, rooms: bool = True) -> None:
        """Without `rooms` all devices of a kind have the largest room of any: fewer kinds, and no plan is lost."""
        fleet = question.fleet
        found: dict[tuple[int, float, float], dict[str, float]] = {}
        for number, names in enumerate(kinds_of(fleet)):
            for name in names:
                room = float(question.room_bytes(name))
                room = INFINITE if room >= ample_bytes else room
                key = number, question.flops_per_s(name), room if rooms else 0.0
                found.setdefault(key, {})[name] = room
        self.all = tuple(DeviceKind(tuple(of), speed, max(of.values())) for (_, speed, _), of in found.items())
        self.counts = np.array([len(kind.names) for kind in self.all])
        self.speed = np.array([kind.speed for kind in self.all])
        self.room = np.array([kind.room for kind in self.all])
        count = len(self.all)
        self.latency, self.byte_s = np.full((2, count, count), INFINITE)
        self.uplink_s = np.zeros((count, count))
        """Seconds per byte of the source's site where the link leaves it and its links share an uplink."""
        for a, source in enumerate(self.all):
            for b, target in enumerate(self.all):
                if a != b or len(source.names) > 1:
                    link = fleet.link(source.names[0], target.names[-1])
                    self.latency[a, b], self.byte_s[a, b] = link.latency_s, 1 / link.bandwidth_bytes_per_s
                    site = fleet.uplink(source.names[0], target.names[-1])
                    if site is not None and site.uplink_bytes_per_s is not None:
                        self.uplink_s[a, b] = 1 / site.uplink_bytes_per_s


def set_count(kinds: DeviceKinds, tracked: Iterable[int]) -> int:
    return math.prod(int(kinds.counts[kind]) + 1 for kind in tracked)


class SetParts(NamedTuple):
    """Pairs, by state, of a state and a part of it: a state, not empty, whose devices are among its own."""

    part: Ints
    rest: Ints  # the state of the devices that are not in the part
    starts: Ints  # where those of each state but the first begin


class Tracked:
    """The states of the kinds whose devices are counted: mixed-radix numbers."""

    def __init__(self, kinds: DeviceKinds, tracked: Sequence[int], counts: Sequence[int] | None = None) -> None:
        """`counts`: of each kind's devices; by default all."""
        self.kinds = tuple(sorted(tracked))
        numbers = kinds.counts.tolist() if counts is None else counts
        sizes = [numbers[k] + 1 for k in self.kinds]
        self.size = int(np.prod(sizes, dtype=np.float64)) if sizes else 1
        grid = np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), dtype=np.int64)
        self.strides = np.array([int(np.prod(sizes[k + 1 :])) for k in range(len(sizes))], dtype=np.int64)
        """[tracked kind]: between a state and one with a device more."""
        self.used = grid.T  # [state, tracked kind]: how many devices
        self.devices = self.used.sum(axis=1)
        self.steps: dict[int, tuple[Ints, Ints]] = {}
        """The states that have a device of a kind left and the states after it is taken, by kind."""
        for kind in range(len(kinds.all)):
            if kind in self.kinds:
                at = self.kinds.index(kind)
                before = np.flatnonzero(grid[at] < numbers[kind])
                self.steps[kind] = before, before + self.strides[at]
            else:
                self.steps[kind] = np.arange(self.size), np.arange(self.size)
        self.before = np.concatenate([before for before, _ in self.steps.values()])
        """[step]: the states before all steps, in the order of `steps`."""
        self.after = np.concatenate([after for _, after in self.steps.values()])
        self.kind = np.concatenate([np.full(len(before), kind) for kind, (before, _) in self.steps.items()])

    @cached_property
    def parts(self) -> SetParts:
        found = [np.flatnonzero((self.used <= row).all(axis=1))[1:] for row in self.used]
        counts = [len(part) for part in found]
        part = np.concatenate(found)
        return SetParts(part, np.repeat(np.arange(self.size), counts) - part, np.cumsum(counts)[:-1])

    def parts_of(self, state: int) -> Ints:
        """Return the parts of a state that is not the first."""
        part, _, starts = self.parts
        return part[starts[state - 1] : starts[state] if state < self.size - 1 else None]


class Counted(Tracked):
    """The states count devices, whichever they are."""

    def __init__(self, kinds: DeviceKinds) -> None:
        super().__init__(kinds, ())
        devices, every = int(kinds.counts.sum()), len(kinds.all)
        self.size, self.devices = devices + 1, np.arange(devices + 1)
        self.used = self.devices[:, None]
        self.steps = dict.fromkeys(range(every), (self.devices[:-1], self.devices[1:]))
        self.before, self.after = np.tile(self.devices[:-1], every), np.tile(self.devices[1:], every)
        self.kind = np.repeat(np.arange(every), devices)


def grown(tracked: Tracked, kinds: DeviceKinds, walk: Mapping[int, int]) -> list[int]:
    """Kinds of which a walk uses more devices than there are, and that are not tracked; the most overused first."""
    over = {k: n - int(kinds.counts[k]) for k, n in walk.items() if k not in tracked.kinds}
    return sorted((k for k, excess in over.items() if excess > 0), key=lambda k: (-over[k], k))
