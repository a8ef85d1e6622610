"""A run of decoupled replicas of any kind has a merger, and the model that the merger makes."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from isthmus.fleet import Link
from isthmus.job import Job
from isthmus.protocol.decoupled import Merger
from isthmus.protocol.decoupled_events import FinishMerges, MergeRules
from isthmus.runtime.coordinator.backend import DevicesAtWork
from isthmus.runtime.decoupled.merger import MergerHost, MergerWatch, MergeTraffic
from isthmus.runtime.decoupled.trainer import merged_fragments, seeded_model
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.lanes import Outgoing
from isthmus.training.decoupled import MergedFragments, check_model, delta_codec, fragments_of


def merge_rules(job: Job, replicas: int = 1) -> MergeRules:
    """Return the job's rules of merges and of its end, with so many replicas. A period that is not planned yet is 1."""
    training, rules = job.training, job.sync.decoupled
    period = 1 if job.sync.period == "auto" else job.sync.period
    return MergeRules(
        samples=training.steps * training.batch_size,
        merge_every=period * training.batch_size / rules.fragments,
        fragments=rules.fragments,
        quorum=rules.quorum,
        grace=rules.grace,
        timeout_s=job.timeout_s,
        step_samples=training.batch_size // replicas,
    )


@dataclass(frozen=True, kw_only=True)
class DecoupledOutcome:
    """The outcome of a run."""

    finish: FinishMerges
    samples: int
    merges: int
    late: int
    """Contributions that came after their merge had ended, and were part of the next."""
    traffic: MergeTraffic
    seconds: float


class MergedRun:
    """Replicas may be processes here or devices of a fleet."""

    def __init__(self, job: Job, replicas: Collection[str], *, calls: bool = False) -> None:
        """`calls`: as `Merger`. UserError for a model that cannot be merged."""
        torch.set_num_threads(job.runtime.threads)
        self._job = job
        self.model: nn.Module = seeded_model(job)
        check_model(self.model)
        rules = merge_rules(job, len(replicas))
        if calls:
            rules = msgspec.structs.replace(rules, timeout_s=math.inf)  # devices may be away for long
        self.machine = Merger(rules, replicas, calls=calls)
        self.merged: MergedFragments = merged_fragments(job)
        self._run = secrets.token_hex(16)

    def _host(
        self,
        links: Mapping[str, Link | None],
        watch: MergerWatch,
        begin: Callable[[str], Outgoing | None] = lambda _: None,
        has_data: Callable[[str], bool] = lambda _: True,
    ) -> MergerHost:
        """As `MergerHost`."""
        return MergerHost(
            self.machine,
            self.merged,
            delta_codec(self._job.sync.decoupled),
            links,
            self._run,
            self._job.timeout_s,
            watch,
            begin=begin,
            has_data=has_data,
        )

    def _coordinate(self, host: MergerHost, devices: DevicesAtWork, stop: Stop) -> DecoupledOutcome:
        """Run to the end, and fill `model` with the merged weights."""
        finish = host.coordinate(devices, stop)
        self.fill()
        return DecoupledOutcome(
            finish=finish,
            samples=self.machine.samples,
            merges=self.machine.merge,
            late=self.machine.late,
            traffic=host.traffic,
            seconds=host.now_s,
        )

    def fill(self) -> None:
        """Put what is merged into `model`."""
        self.merged.fill(fragments_of(self.model, self._job.sync.decoupled.fragments))
