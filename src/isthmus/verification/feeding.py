"""Chains that several holders feed: the first stage, and the last where labels stay, has a copy on each of them.

A micro-batch goes one holder's way and takes what the slowest way takes. What a copy, its links and its memory hold up
the chain by counts for its holder's part of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from isthmus.plans import Replica
from isthmus.verification.cutting import CutGraph
from isthmus.verification.question import DifferenceList, Question
from isthmus.verification.reading import GraphReading
from isthmus.verification.timing import Moved, StepTiming


def copied_stages(question: Question, count: int) -> tuple[int, ...]:
    """Return those stages, in a chain of so many, of which every holder has a copy."""
    if not question.constraints.copied:
        return ()
    return (0, count - 1) if question.constraints.labels_stay and count > 1 else (0,)


def check_copies(ledger: DifferenceList, where: str, replica: Replica, reading: GraphReading) -> Iterator[bool]:
    """Check that every holder has its copies and no other stage, and that copies share no state."""
    question, stages = reading.question, replica.stages
    feeders, copied = question.constraints.feeders, copied_stages(question, len(stages))
    expected = [(stages[k].first, stages[k].last, name) for k in copied for name in feeders[1:]]
    stated = [(copy.first, copy.last, copy.device) for copy in replica.copies]
    yield ledger.same(f"{where}.copies", _places(stated), _places(expected))
    for index, stage in enumerate(stages if copied else ()):
        name = f"{where}.stages[{index}]"
        if index not in copied:
            other = stage.device not in feeders
            yield ledger.judge(f"{name}.device", other, stage.device, "a device that does not feed the chain")
            continue
        yield ledger.same(f"{name}.device", stage.device, feeders[0])
        written = next(
            (v.op for v in reading.variables if v.written and v.uses and stage.first <= v.uses[0] <= stage.last), "none"
        )
        yield ledger.same(f"{name}: buffers that copies would write", written, "none")


def copies_sums(question: Question, graph: CutGraph) -> dict[int, list[str]]:
    """Return the parameters whose gradients the copies sum in every step, by stage."""
    copied = copied_stages(question, len(graph.parts))
    held = {stage: [op for op, (owner, _) in graph.owners.items() if owner == stage] for stage in copied}
    return {stage: names for stage, names in held.items() if names}


class FedTimed(StepTiming):
    """`devices` are those of the first holder's way."""

    def __init__(self, question: Question, graph: CutGraph, devices: Sequence[str], recompute: Sequence[bool]) -> None:
        super().__init__(question, graph, devices, recompute)
        self._copied, self._shares = copied_stages(question, len(devices)), question.constraints.shares
        self._ways = [
            StepTiming(question, graph, [name if k in self._copied else d for k, d in enumerate(devices)], recompute)
            for name in question.constraints.feeders
        ]

    @cached_property
    def fill_s(self) -> float:
        return max(way.fill_s for way in self._ways)

    @cached_property
    def shared_s(self) -> float:
        return sum(self.moved_s(*moved) for moved in self._shared_uses())

    @cached_property
    def occupied_s(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for way, share in zip(self._ways, self._shares, strict=True):
            for name, seconds in way.occupied_s.items():
                found[name] = found.get(name, 0.0) + share * seconds
        return found

    def round_trip_s(self, stage: int) -> float:
        """Return the longest of all ways; a copy's times its holder's part: the step completes so many more."""
        return max(
            way.round_trip_s(stage) * (share if stage in self._copied else 1.0)
            for way, share in zip(self._ways, self._shares, strict=True)
        )

    def eq3_s(self, micro_batches: int) -> float:
        """Return the time of the slowest way: the paper knows no copies."""
        return max(way.eq3_s(micro_batches) for way in self._ways)

    @property
    def used(self) -> frozenset[str]:
        return frozenset(name for way in self._ways for name in way.devices)

    def sent(self, micro_batches: int) -> Iterator[Moved]:
        for way, share in zip(self._ways, self._shares, strict=True):
            yield from way.flowing(micro_batches * share)
        yield from self._shared_uses()

    def _shared_uses(self) -> Iterator[Moved]:
        """The first holder's copy sends a shared parameter to every copy that uses it."""
        for p in self.graph.shared_uses:
            for user in p.users:
                owner = self.devices[p.owner]
                for user in dict.fromkeys(way.devices[user] for way in self._ways):
                    yield Moved(owner, user, p.size_bytes)
                    yield Moved(user, owner, p.gradient_bytes)


def timed(question: Question, graph: CutGraph, devices: Sequence[str], recompute: Sequence[bool]) -> StepTiming:
    return (FedTimed if question.constraints.copied else StepTiming)(question, graph, devices, recompute)


def _places(copies: Iterable[tuple[int, int, str]]) -> str:
    return ", ".join(f"{first} to {last} on {name}" for first, last, name in copies) or "none"
