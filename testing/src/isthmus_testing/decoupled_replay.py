"""Replicas of a decoupled run and their merger in one process: what they compute, in the order that a simulation gives
or that the record of a run has (`merges.jsonl`). From its record a run is made again, bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from isthmus.data import Dataset
from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.protocol.decoupled_events import (
    NEVER,
    NOTHING_MERGED,
    Contribution,
    FragmentSent,
    MergeChanges,
    MergesDone,
)
from isthmus.protocol.decoupled_replica import SamplesKnown
from isthmus.runtime.decoupled.merged_run import MERGES, MergedRun
from isthmus.training.compression import Codec
from isthmus.training.decoupled import MergedFragments, ReplicaFragments, delta_codec
from isthmus_testing.replica_trainer import ReplicaTrainer

__all__ = ["ReplicasTogether", "replay", "replay_together"]


class Trainer(Protocol):
    """One replica's steps."""

    steps: int  # that were made
    fragments: ReplicaFragments

    def step(self, samples: int) -> float:
        """One step, where all replicas had trained on so many samples; returns the loss."""
        ...


def job_together(job: Job, data: Dataset, names: Sequence[str], checkpoint: Path | None = None) -> ReplicasTogether:
    """The replicas of a job, at the start or as they go on from a checkpoint."""
    numbers = {name: number for number, name in enumerate(names)}
    begun = MergedRun(job, {name: (name,) for name in names}, checkpoint)
    return ReplicasTogether(
        begun.merged,
        delta_codec(job.sync.decoupled),
        lambda name: ReplicaTrainer(job, data, numbers[name], len(numbers), steps=begun.machine.steps(name)),
        begun.machine.begun,
    )


class ReplicasTogether:
    """A simulation's `Computing`."""

    def __init__(
        self,
        merged: MergedFragments,
        codec: Codec,
        trainer_of: Callable[[str], Trainer],
        begun: MergesDone = NOTHING_MERGED,
    ) -> None:
        """`merged` is at the start, or as the run goes on from `begun`; `codec` packs what replicas give."""
        self.merged, self.begun = merged, begun
        self.trainers: dict[str, Trainer] = {}
        self._codec, self._trainer_of = codec, trainer_of
        self._versions = {(fragment, begun.merge): values for fragment, values in enumerate(self.merged.known)}
        self._payloads: dict[tuple[str, int, int], Tensor] = {}
        self.changes: dict[int, Tensor] = {}
        """The payload of each fragment's newest change."""

    def start(self, replica: str) -> None:
        self.trainers[replica] = self._trainer_of(replica)

    def step(self, replica: str, samples: int) -> float:
        return self.trainers[replica].step(samples)

    def take(self, replica: str, sent: FragmentSent) -> None:
        """UserError for a version that no merge has made."""
        if (values := self._versions.get((sent.fragment, sent.merge))) is None:
            raise UserError(f"merges: fragment {sent.fragment} has no version {sent.merge} yet")
        own = self.trainers[replica].fragments
        own.take(sent.fragment, values, whole=True, included=sent.included, first=sent.first)

    def give(self, replica: str, fragment: int, number: int) -> None:
        self._payloads[replica, fragment, number] = self.trainers[replica].fragments.give(fragment, number)

    def payload(self, replica: str, fragment: int, number: int) -> Tensor:
        """Return the payload of a contribution that is not merged yet."""
        return self._payloads[replica, fragment, number]

    def has_given(self, replica: str, fragment: int, number: int) -> bool:
        return (replica, fragment, number) in self._payloads

    def merge(self, merge: MergeChanges) -> None:
        for merged in merge.fragments:
            deltas: list[tuple[Tensor, int]] = []
            for c in merged.contributions:
                payload = self._payloads.pop((c.replica, merged.fragment, c.number))
                delta = self.merged.unpacked(merged.fragment, payload, self._codec)
                assert delta is not None, "a codec refuses what is not finite"
                deltas.append((delta, c.samples))
            self.changes[merged.fragment] = self.merged.merge(merged.fragment, deltas)
            self._versions[merged.fragment, merge.merge] = self.merged.known[merged.fragment]


class _Act(NamedTuple):
    """After so many steps a replica takes a version, or gives a contribution."""

    steps: int
    gives: bool
    merge: int
    fragment: int


def _acts(contributions: Iterable[tuple[int, Contribution]]) -> deque[_Act]:
    """In the order in which they were done: what a replica takes between two steps comes before what it gives."""
    found, seen = deque[_Act](), 0
    for fragment, contribution in sorted(contributions, key=lambda pair: (pair[1].steps, pair[1].number, pair[0])):
        new = contribution.taken[max(0, seen - contribution.taken_before) :]
        found += [_Act(taken.steps, False, taken.merge, taken.fragment) for taken in new]
        seen = max(seen, contribution.taken_before + len(contribution.taken))
        found.append(_Act(contribution.steps, True, contribution.number, fragment))
    return found


class _Replay:
    def __init__(
        self, together: ReplicasTogether, names: Sequence[str], per_step: int, merges: Sequence[MergeChanges]
    ) -> None:
        self.together, begun = together, together.begun
        self._merges = merges = [merge for merge in merges if merge.merge > begun.merge]
        merged = [fragment for merge in merges for fragment in merge.fragments]
        self._acts: dict[str, deque[_Act]] = {}
        for name in names:
            self.together.start(name)
            own = [(f.fragment, c) for f in merged for c in f.contributions if c.replica == name]
            self._acts[name] = _acts(own)
        self._samples = {merge.merge: merge.samples for merge in merges} | {begun.merge: begun.samples}
        """Samples of all replicas at each version."""
        self._known = {name: SamplesKnown(per_step) for name in names}
        """The same, as far as each replica knows."""
        self._included: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """The versions with a contribution of a replica to a fragment, and the contribution's number."""

    def run(self) -> MergedFragments:
        for merge in self._merges:
            for merged in merge.fragments:
                for contribution in merged.contributions:
                    self._until(contribution.replica, merged.fragment, contribution.number)
            self.together.merge(merge)
            for merged in merge.fragments:
                for c in merged.contributions:
                    self._included.setdefault((c.replica, merged.fragment), []).append((merge.merge, c.number))
        return self.together.merged

    def _until(self, replica: str, fragment: int, number: int) -> None:
        """Have the replica do all that comes before this contribution, and give it."""
        while not self.together.has_given(replica, fragment, number):
            self._act(replica, self._acts[replica].popleft())

    def _act(self, replica: str, act: _Act) -> None:
        while (steps := self.together.trainers[replica].steps) < act.steps:
            self.together.step(replica, self._known[replica].after(steps))
        if act.gives:
            self.together.give(replica, act.fragment, act.merge)
            return
        samples = self._samples.get(act.merge, 0)
        numbers = [n for merge, n in self._included.get((replica, act.fragment), ()) if merge <= act.merge]
        sent = FragmentSent(
            fragment=act.fragment,
            merge=act.merge,
            whole=True,
            included=max(numbers, default=NEVER),
            first=False,
            samples=samples,
        )
        self.together.take(replica, sent)
        self._known[replica].heard(samples, act.steps)


def replay(
    job: Job, data: Dataset, names: Sequence[str], merges: Sequence[MergeChanges], checkpoint: Path | None = None
) -> MergedFragments:
    """The merged fragments after these merges of a job's run, the same bits. `names` are those of all replicas, in
    their order. A run that was resumed is made again from the `checkpoint` that it went on from. UserError for merges
    that are no run's of theirs."""
    return replay_together(job_together(job, data, names, checkpoint), names, job.training.batch_size, merges)


def replay_together(
    together: ReplicasTogether, names: Sequence[str], per_step: int, merges: Sequence[MergeChanges]
) -> MergedFragments:
    """Return the same as `replay`, of any replicas, which have not started. `per_step`: samples of all in a step of
    each."""
    strange = {c.replica for merge in merges for f in merge.fragments for c in f.contributions} - set(names)
    if strange:
        raise UserError(f"{MERGES}: got contributions of {', '.join(sorted(strange))}, expected those of {names}")
    return _Replay(together, names, per_step, merges).run()
