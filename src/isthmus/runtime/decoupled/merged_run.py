"""A run of decoupled replicas of any kind has a merger, and the model that the merger makes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from isthmus.fleet import Link
from isthmus.job import Job
from isthmus.protocol.decoupled import Merger
from isthmus.protocol.decoupled_events import FinishMerges, MergeRules
from isthmus.runtime.decoupled.merger import MergerHost, MergerWatch
from isthmus.runtime.decoupled.outgoing import Outgoing
from isthmus.runtime.decoupled.trainer import merged_fragments, seeded_model
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
    sent_bytes: int
    """Bytes of changes that were sent, to all replicas."""
    received_bytes: int
    """Bytes of contributions."""
    plain_bytes: int
    """Bytes of both, if they were sent as float32."""
    whole_bytes: int
    """Bytes of fragments that were sent whole: to a replica that begins, or missed a change."""
    seconds: float


class MergedRun:
    """Replicas may be processes here or devices of a fleet."""

    def __init__(self, job: Job, replicas: int, timeout_s: float | None = None) -> None:
        """Without a replica it ends after `timeout_s`, None: that of the job. UserError for a model that cannot be
        merged."""
        torch.set_num_threads(job.runtime.threads)
        self._job = job
        self.model: nn.Module = seeded_model(job)
        check_model(self.model)
        rules = merge_rules(job, replicas)
        self.machine = Merger(rules if timeout_s is None else msgspec.structs.replace(rules, timeout_s=timeout_s))
        self.merged: MergedFragments = merged_fragments(job)
        self._run = secrets.token_hex(16)

    def _host(
        self,
        links: Mapping[str, Link | None],
        watch: MergerWatch,
        begin: Callable[[str], Outgoing] | None = None,
    ) -> MergerHost:
        """As `MergerHost`."""
        job = self._job
        return MergerHost(
            self.machine,
            self.merged,
            delta_codec(job.sync.decoupled),
            links,
            self._run,
            job.timeout_s,
            watch,
            begin=begin,
        )

    def _outcome(self, host: MergerHost, finish: FinishMerges) -> DecoupledOutcome:
        """Return the outcome of a run that is over, and fill `model` with the merged weights."""
        self.fill()
        return DecoupledOutcome(
            finish=finish,
            samples=self.machine.samples,
            merges=self.machine.merge,
            late=self.machine.late,
            sent_bytes=host.sent_bytes,
            received_bytes=host.received_bytes,
            plain_bytes=host.plain_bytes,
            whole_bytes=host.whole_bytes,
            seconds=host.now_s,
        )

    def fill(self) -> None:
        """Put what is merged into `model`."""
        self.merged.fill(fragments_of(self.model, self._job.sync.decoupled.fragments))
