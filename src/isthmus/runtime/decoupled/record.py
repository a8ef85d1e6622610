"""The record of a run of decoupled replicas, and the same run made again from it, bit for bit, in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.data import Dataset
from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.protocol.decoupled_events import NEVER, Contribution, FragmentSent, MergeChanges
from isthmus.protocol.decoupled_replica import SamplesKnown
from isthmus.run_files import LinesFile
from isthmus.runtime.decoupled.together import ReplicasTogether, job_together
from isthmus.training.decoupled import MergedFragments

MERGES = "merges.jsonl"


class MergeLine(msgspec.Struct, frozen=True, kw_only=True):
    """One merge."""

    seconds: float
    """Since the run began."""
    merge: MergeChanges


def merges_file(run: Path) -> LinesFile[MergeLine]:
    """Return the merges' file in a run's folder."""
    return LinesFile(run / MERGES, MergeLine, "merges")


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
        self.together = together
        self._merges = merges
        merged = [fragment for merge in merges for fragment in merge.fragments]
        self._acts: dict[str, deque[_Act]] = {}
        for name in names:
            self.together.start(name)
            own = [(f.fragment, c) for f in merged for c in f.contributions if c.replica == name]
            self._acts[name] = _acts(own)
        self._samples = {merge.merge: merge.samples for merge in merges} | {0: 0}
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


def replay(job: Job, data: Dataset, names: Sequence[str], merges: Sequence[MergeChanges]) -> MergedFragments:
    """The merged fragments after these merges of a job's run, the same bits. `names` are those of all replicas, in
    their order. UserError for merges that are no run's of theirs."""
    return replay_together(job_together(job, data, names), names, job.training.batch_size, merges)


def replay_together(
    together: ReplicasTogether, names: Sequence[str], per_step: int, merges: Sequence[MergeChanges]
) -> MergedFragments:
    """As `replay`, of any replicas, which have not started. `per_step`: samples of all in a step of each."""
    strange = {c.replica for merge in merges for f in merge.fragments for c in f.contributions} - set(names)
    if strange:
        raise UserError(f"{MERGES}: got contributions of {', '.join(sorted(strange))}, expected those of {names}")
    return _Replay(together, names, per_step, merges).run()
