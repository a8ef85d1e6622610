"""All replicas and their merger in one process: what they compute, in whatever order a simulation or a record says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from isthmus.data import Dataset
from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.plans import OuterOptimizer
from isthmus.protocol.decoupled_events import FragmentSent, MergeChanges
from isthmus.runtime.decoupled.trainer import ReplicaTrainer, seeded_model
from isthmus.training.compression import Codec
from isthmus.training.decoupled import MergedFragments, ReplicaFragments, change_codec, delta_codec, flat_fragments


def merged_fragments(job: Job) -> MergedFragments:
    """The merger's side at the start."""
    rules = job.sync.decoupled
    outer = OuterOptimizer(rate=rules.rate, momentum=rules.momentum)
    return MergedFragments(flat_fragments(seeded_model(job), rules.fragments), outer, change_codec(rules))


class Trainer(Protocol):
    """One replica's steps."""

    steps: int
    """That were made."""
    fragments: ReplicaFragments

    def step(self, samples: int) -> float:
        """One step, where all replicas had trained on so many samples; returns the loss."""
        ...


def job_together(job: Job, data: Dataset, names: Sequence[str]) -> ReplicasTogether:
    """The replicas of a job."""
    numbers = {name: number for number, name in enumerate(names)}
    return ReplicasTogether(
        merged_fragments(job),
        delta_codec(job.sync.decoupled),
        lambda name: ReplicaTrainer(job, data, numbers[name], len(numbers)),
    )


class ReplicasTogether:
    """A simulation's `Computing`."""

    def __init__(self, merged: MergedFragments, codec: Codec, trainer_of: Callable[[str], Trainer]) -> None:
        """`merged` is at the start; `codec` packs what replicas give."""
        self.merged = merged
        self.trainers: dict[str, Trainer] = {}
        self._codec, self._trainer_of = codec, trainer_of
        self._versions = {(fragment, 0): values for fragment, values in enumerate(self.merged.known)}
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
