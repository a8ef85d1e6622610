"""The best of all plans by trying them: slow, plain, and with no code of the planners.

Pipelines are cut, weighed and timed by the verifier's code; only what averaging takes is the cost model's, which
chooses the collective.

Every way to put some of the devices into ordered groups, every cut of each, every split of the micro-batches. A step
only gets longer with a replica's share, so of all splits only one number matters: how many micro-batches each replica
ends within a time. A choice whose replicas do not end the batch within the best time known is passed over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from isthmus.api.make_plan import question_of as asked_of
from isthmus.cost import Problem
from isthmus.cost.sync import fastest, sync_s
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.plans import ReplicaSync, SyncGroup
from isthmus.verification import Question
from isthmus.verification.cutting import CutGraph, cut
from isthmus.verification.reading import GraphReading
from isthmus.verification.sums import averaging_groups, buffer_bytes
from isthmus.verification.timing import StepTiming


def question_of(problem: Problem) -> Question:
    """The problem in the verifier's words."""
    return asked_of(problem, (problem.micro_batches,))


def best_step_s(problem: Problem) -> float:
    """Seconds of the fastest plan; infinite where none fits."""
    return _Brute(question_of(problem)).run()


class _Pipeline:
    """With the best choice of stages that recompute, for each share."""

    def __init__(self, question: Question, graph: CutGraph, devices: tuple[str, ...]) -> None:
        self.graph, self.devices = graph, devices
        self._question, self._steps_s = question, dict[int, float]()

    @cached_property
    def _choices(self) -> list[tuple[list[int], StepTiming]]:
        """Micro-batches held per stage, and times."""
        stages = len(self.devices)
        plain = self._held([False] * stages)
        short = [held < self._question.micro_batches for held in plain] if self._question.recompute else []
        choices = itertools.product(*((False, True) if s else (False,) for s in short)) if any(short) else ()
        found = [(plain, StepTiming(self._question, self.graph, self.devices, [False] * stages))]
        return found + [
            (self._held(again), StepTiming(self._question, self.graph, self.devices, again))
            for again in choices
            if any(again)
        ]

    def _held(self, recompute: Sequence[bool]) -> list[int]:
        found: list[int] = []
        for name, part, again in zip(self.devices, self.graph.parts, recompute, strict=True):
            free = self._question.fleet.device(name).memory_bytes - part.memory_bytes(0, again)
            each = part.kept_bytes(again)
            found.append(-1 if free < 0 else free // each if each else self._question.micro_batches)
        return found

    def step_s(self, micro_batches: int) -> float:
        """Of this share; infinite where it does not fit."""
        if micro_batches not in self._steps_s:
            least = micro_batches if self._question.schedule == "gpipe" else 1
            self._steps_s[micro_batches] = min(
                (
                    timed.step_s([min(micro_batches, h) for h in held], micro_batches)
                    for held, timed in self._choices
                    if min(held) >= least
                ),
                default=math.inf,
            )
        return self._steps_s[micro_batches]

    def count(self, time_s: float) -> int:
        """The largest share that ends by then."""
        low, high = 0, self._question.micro_batches
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step_s(middle) <= time_s else (low, middle - 1)
        return low


class _Brute:
    def __init__(self, question: Question) -> None:
        self._question, self._best_s = question, math.inf
        reading = GraphReading(question)
        self._cuts: dict[int, list[CutGraph]] = {}
        for stages in range(1, min(len(question.fleet.names), len(reading.places) + 1) + 1):
            self._cuts[stages] = [
                graph
                for inner in itertools.combinations(reading.places, stages - 1)
                if (graph := _cut(reading, (0, *inner))) is not None
            ]

    def run(self) -> float:
        whole = self._question.micro_batches
        pipelines = {
            frozenset(members): [
                _Pipeline(self._question, graph, order)
                for order in itertools.permutations(members)
                for graph in self._cuts[size]
            ]
            for size in self._cuts
            for members in itertools.combinations(self._question.fleet.names, size)
        }
        for several in pipelines.values():
            self._best_s = min([self._best_s, *(p.step_s(whole) for p in several)])
        for groups in _groupings(self._question.fleet.names):
            if 1 < len(groups) <= whole and all(group in pipelines for group in groups):
                for ordered in itertools.permutations(groups):  # collectives depend on who is counted first
                    self._look([pipelines[group] for group in ordered])
        return self._best_s

    def _look(self, choices: Sequence[Sequence[_Pipeline]]) -> None:
        whole = self._question.micro_batches
        counted = [[(p, n) for p in several if (n := p.count(self._best_s))] for several in choices]
        for choice in itertools.product(*counted):
            if sum(n for _, n in choice) < whole:
                continue
            replicas = [p for p, _ in choice]
            averaging_s = _averaging_s(self._question.fleet, replicas)
            if self._ends(replicas, self._best_s - averaging_s):
                self._best_s = averaging_s + self._split_s(replicas, self._best_s - averaging_s)

    def _ends(self, replicas: Sequence[_Pipeline], time_s: float) -> bool:
        counts = [p.count(time_s) for p in replicas]
        return min(counts) > 0 and sum(counts) >= self._question.micro_batches

    def _split_s(self, replicas: Sequence[_Pipeline], time_s: float) -> float:
        """The earliest of the times at which a replica ends a share, by which all can be ended."""
        shares = range(1, self._question.micro_batches + 1)
        times = sorted(t for p in replicas for m in shares if (t := p.step_s(m)) <= time_s)
        low, high = 0, len(times) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._ends(replicas, times[middle]) else (middle + 1, high)
        return times[low] if times else time_s


def _averaging_s(fleet: Fleet, replicas: Sequence[_Pipeline]) -> float:
    held = [(p.devices, p.graph) for p in replicas]
    groups = tuple(
        fastest(
            fleet,
            SyncGroup(
                devices=devices,
                stages=stages,
                parameters=tuple(names),
                size_bytes=buffer_bytes(replicas[0].graph, names, "gradients"),
            ),
        )
        for (devices, stages), names in averaging_groups(held).items()
    )
    return sync_s(fleet, ReplicaSync(groups=groups))


def _cut(reading: GraphReading, starts: tuple[int, ...]) -> CutGraph | None:
    try:
        return cut(reading, starts)
    except UserError:  # a buffer would be written in two stages
        return None


def _groupings(devices: Sequence[str]) -> Iterator[tuple[frozenset[str], ...]]:
    """Groups of some of the devices, in no order."""
    if not devices:
        yield ()
        return
    device, rest = devices[0], devices[1:]
    for groups in _groupings(rest):
        yield groups
        yield (*groups, frozenset({device}))
        for k, group in enumerate(groups):
            yield (*groups[:k], group | {device}, *groups[k + 1 :])
