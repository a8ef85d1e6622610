"""Seconds that stages take at least, by class of devices, and which may follow which."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from isthmus.verification.device_classes import NO_LINK, DeviceClasses
from isthmus.verification.question import FLOAT32_BYTES
from isthmus.verification.reading import GraphReading
from isthmus.verification.stage_figures import Bools, Floats, Ints, StageFigures

NEVER = 1e30  # seconds; sums of a few stay finite


class Relaxation(NamedTuple):
    """How much is distinguished: more proves more, and takes longer."""

    cells: int  # of places to cut
    states: int  # numbers of devices of each class


class StagesBehind(NamedTuple):
    """Stages that may follow another, on devices of one class: flat arrays, in the order of `into`."""

    before: Ints  # which sender's end: rows of the prefix's array
    begin: Ints
    end: Ints
    starts: Ints  # where `into` changes
    into: Ints


class StageSeconds:
    """One number of micro-batches of a question."""

    def __init__(self, reading: GraphReading, relaxation: Relaxation) -> None:
        self.question = question = reading.question
        self.figures = figures = StageFigures(reading, relaxation.cells)
        # Several replicas take devices together, however few stages each has.
        used = len(figures.edges) - 1 if reading.one_only else len(question.fleet.names)
        self.classes = classes = DeviceClasses(question, relaxation.states, used)
        self.labels_from = reading.labels_from
        self._sums_s = dict[tuple[int, int, int], Floats]()
        self._allowed: Bools = np.array([figures.allowed] * len(classes.speed))
        for op, position in reading.position.items() if question.constraints.lacking else ():
            lacking = classes.lacks(reading.by_name[op].target)
            holds = (figures.last <= position)[:, None] & (figures.first > position)[None, :]
            self._allowed[lacking] &= ~holds

    @cached_property
    def ends(self) -> tuple[list[Ints], Ints, Ints]:
        """[end][begin]: which row of a prefix's array; and of each row the end, and a begin that stands for all."""
        sent, count = self.figures.messages, self.figures.count
        rows, ends, begins, number = list[Ints](), list[int](), list[int](), 0
        for end in range(count):
            known, of_begin = dict[bytes, int](), np.zeros(count, dtype=np.int64)
            for begin in range(end + 1):
                key = (
                    b"" if end in (0, count - 1) else sent.there[begin, end].tobytes() + sent.back[begin, end].tobytes()
                )
                if key not in known:
                    known[key] = number + len(known)
                    ends.append(end)
                    begins.append(begin)
                of_begin[begin] = known[key]
            number += len(known)
            rows.append(of_begin)
        return rows, np.array(ends), np.array(begins)

    @cached_property
    def trunk_s(self) -> Floats:
        """[class, cell]: what crosses the cell along the trunk, at least, into a device of the class."""
        near = self.classes.latency_s + self.classes.latency_s.T
        both = self.classes.byte_s + self.classes.byte_s.T
        sizes = self.figures.trunk_bytes
        messages = near[:, :, None] + both[:, :, None] * sizes
        return np.where(sizes > 0, messages.min(axis=0), 0.0)

    @cached_property
    def _rest_s(self) -> Floats:
        """[cell]: what a micro-batch takes at least from there on, along the trunk, there and back."""
        figures, least_s = self.figures, self.trunk_s.min(axis=0)
        least_s = np.where(least_s < NO_LINK, least_s, 0.0)
        found = np.zeros(figures.count)
        messages_s = np.repeat(least_s[:, None], figures.count, axis=1)
        if self.labels_from is not None:
            messages_s[:, -1] = 0.0  # the last stage may be on the device of the first
        each = np.where(figures.on_trunk, self._least_s + messages_s, 0.0)
        for cell in range(figures.count - 2, -1, -1):
            found[cell] = (each[cell, cell + 1 :] + found[cell + 1 :]).min()
        return found

    @cached_property
    def _least_s(self) -> Floats:
        """[begin, end]: seconds of a micro-batch on the fastest class that has memory for such a stage."""
        figures = self.figures
        need = figures.state + figures.working + figures.received + figures.saved  # it may save them a second time only
        return np.where(need <= self.classes.room[:, None, None], self.compute_s[0], NEVER).min(axis=0)

    @cached_property
    def compute_s(self) -> tuple[Floats, Floats]:
        """[class, begin, end]: forward and backward, and with a second forward."""
        speed = self.classes.speed[:, None, None]
        return self.figures.work / speed, (self.figures.work + self.figures.forward) / speed

    def needs(self, count: int) -> tuple[Floats, Floats]:
        """[class, begin, end]: seconds that a stage takes for so many micro-batches, without and with recomputing."""
        figures, room = self.figures, self.classes.room[:, None, None] - self.figures.working
        kept = figures.received + figures.saved, figures.received + figures.columns
        found = list[Floats]()
        for compute_s, each, more in zip(self.compute_s, kept, (0.0, figures.saved), strict=True):
            held = np.floor((room - figures.state - more) / np.maximum(each, 1e-9))
            held = np.where(figures.state + more <= room, np.minimum(held, count), 0)
            trip_s = compute_s + np.where(figures.on_trunk, self._rest_s, 0.0)
            turns = np.ceil(count / np.maximum(held, 1))
            need_s = np.maximum(count * compute_s, np.where(turns > 1, turns * trip_s, 0.0))
            fits = held >= (count if self.question.schedule == "gpipe" else 1)
            found.append(np.where(fits & self._allowed, need_s, NEVER))
        return found[0], found[1] if self.question.recompute else np.full_like(found[1], NEVER)

    def sums_s(self, fewest: int, most: int, cuts: int) -> Floats:
        """[class, begin, end]: the messages that a stage waits for at least in the sum of the largest group of its
        gradients, over so many replicas, by the collective that takes the least. `cuts` of others lie within the
        stage, so it has one group more at most. With R replicas over k regions:

            sharded        two rounds of an R-th part to each of R - 1 others
            ring           2 (R - 1) rounds of an R-th part: of two neighbours one is not the nearest
            hierarchical   two rounds of a k-th part between regions; but for one device of each region, the whole
                           to another one and back besides
        """
        if (fewest, most, cuts) not in self._sums_s:
            self._sums_s[fewest, most, cuts] = self._sum_s(fewest, most, cuts)
        return self._sums_s[fewest, most, cuts]

    def _sum_s(self, fewest: int, most: int, cuts: int) -> Floats:
        elements, classes = self._summed, self.classes
        group = FLOAT32_BYTES * np.floor(elements / (1 + cuts))
        regions = min(most, len(set().union(*classes.regions)))
        found = 2 * self._nearest_s(fewest - 1, group / most)
        if fewest > 2:
            found = np.minimum(found, 2 * (fewest - 1) * self._nearest_s(2, group / most))
        if regions > 1:
            leader = 2 * self._nearest_s(1, group / regions, across=True)
            near = np.array([[bool(a & b) for b in classes.regions] for a in classes.regions])
            leads = np.where(near[:, :, None, None], leader[None], NEVER).min(axis=1)
            found = np.minimum(found, np.minimum(leader, 2 * self._nearest_s(1, group) + leads))
        return np.where(elements > 0, found, 0.0)

    def _nearest_s(self, number: int, size: Floats, *, across: bool = False) -> Floats:
        """[class, begin, end]: seconds to so many of other devices, nearest first; `across`: in other regions."""
        classes = self.classes
        sizes = np.array([len(own) for own in classes.members])
        partners = sizes[None, :] - np.eye(len(sizes), dtype=np.int64)
        if across:
            apart = [[len(a | b) > 1 for b in classes.regions] for a in classes.regions]
            partners = np.where(apart, np.maximum(partners, 1), 0)

        def least(table: Floats, number: int) -> Floats:
            each = np.minimum(table, table.T)
            order = np.argsort(each, axis=1)
            so_far = np.cumsum(np.take_along_axis(partners, order, axis=1), axis=1)
            nearest_first = np.take_along_axis(each, order, axis=1)
            return np.where(so_far >= number, nearest_first, NEVER).min(axis=1)[:, None, None]

        latency_s, byte_s = classes.latency_s, classes.byte_s
        return np.maximum(
            least(latency_s, 1) + size[None] * least(byte_s, number),
            least(latency_s, number) + size[None] * least(byte_s, 1),
        )

    @cached_property
    def _summed(self) -> Floats:
        return self.figures.summed(len(self.question.fleet.names))

    def behind(self, needs: tuple[Floats, Floats], limit_s: float, kind: int) -> StagesBehind:
        """Stages that fit below the limit behind some other."""
        rows, ends, _ = self.ends
        fits = np.minimum(needs[0][kind], needs[1][kind]) < limit_s
        if self.labels_from is not None:
            late = (self.figures.first > self.labels_from) | (not self.classes.holds[kind])
            fits[late, -1] = False
        before, end = np.nonzero(fits[ends])
        inner = (ends[before] > 0) & (ends[before] < self.figures.count - 1)
        before, end = before[inner], end[inner]
        begin = ends[before]
        into = np.array([rows[e][b] for b, e in zip(begin.tolist(), end.tolist(), strict=True)], dtype=np.int64)
        order = np.argsort(into, kind="stable")
        into = into[order]
        starts = np.flatnonzero(np.diff(into, prepend=-1))
        return StagesBehind(before[order], begin[order], end[order], starts, into[starts])
