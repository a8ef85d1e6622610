"""What decoupled replicas compute: replayed from the record of merges, and against plain training."""

from __future__ import annotations

import pytest
import torch

from isthmus.data import load_dataset
from isthmus.errors import UserError
from isthmus.plans import OuterOptimizer
from isthmus.protocol.decoupled_events import MergeChanges
from isthmus.runtime.decoupled.merged_run import seeded_model
from isthmus.simulator import Fault
from isthmus.training.compression import NoCodec
from isthmus.training.decoupled import MergedFragments, flat_fragments, fragments_of
from isthmus_testing.decoupled_replay import replay
from isthmus_testing.replica_trainer import ReplicaTrainer
from tests.tiers import represented_by

from .small import NAMES, computed, job_of

PLAIN_MEAN = OuterOptimizer(rate=1.0, momentum=0.0)


def same(one: MergedFragments, other: MergedFragments) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.known, other.known, strict=True))


@pytest.mark.parametrize("codec", represented_by(["none", "int4", "bf16", "sparse2bit"], "sparse2bit"))
def test_a_replay_from_the_record_gives_the_same_bits(codec: str) -> None:
    job = job_of(codec=codec, ratio=8.0 if codec == "sparse2bit" else 1.0, quorum=1, grace=0.0)
    faults = [Fault(kind="silent", device="d", time_s=1, lasts_s=1), Fault(kind="lost", device="b", time_s=2)]
    run, together = computed(job, faults)
    merges = [merge for _, merge in run.merges]
    assert run.finish.outcome == "done"
    assert run.late > 0  # contributions that their merge did not wait for
    again = replay(job, load_dataset(job.used_data, "train"), NAMES, merges)
    assert same(again, together.merged)
    assert not same(replay(job, load_dataset(job.used_data, "train"), NAMES, merges[:-1]), together.merged)


def test_a_record_of_other_replicas_is_refused() -> None:
    job = job_of()
    run, _ = computed(job)
    merges: list[MergeChanges] = [merge for _, merge in run.merges]
    with pytest.raises(UserError, match="got contributions of d"):
        replay(job, load_dataset(job.used_data, "train"), NAMES[:3], merges)


def test_one_replica_whose_changes_are_merged_as_they_are_trains_as_alone() -> None:
    job = job_of(fragments=1, codec="none", rate=1.0, momentum=0.0)
    data = load_dataset(job.used_data, "train")
    alone, own = ReplicaTrainer(job, data, 0, 1), ReplicaTrainer(job, data, 0, 1)
    merged = MergedFragments(flat_fragments(seeded_model(job), 1), PLAIN_MEAN, NoCodec())
    own.fragments.take(0, merged.known[0], whole=True, included=-1, first=True)
    for number in range(1, 9):
        for trainer in (alone, own):
            trainer.step(0)
        payload = own.fragments.give(0, number)
        own.step(0)  # on the way
        alone.step(0)
        delta = merged.unpacked(0, payload, NoCodec())
        assert delta is not None
        change = merged.merge(0, [(delta, own.fragments.account.samples(0))])
        own.fragments.take(0, change, whole=False, included=number, first=False)
    found, expected = (torch.cat([p.detach().reshape(-1) for p in t.parameters]) for t in (own, alone))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_change_that_a_lost_connection_took_away_is_given_again() -> None:
    job = job_of(fragments=1, codec="none", rate=1.0, momentum=0.0)
    own = ReplicaTrainer(job, load_dataset(job.used_data, "train"), 0, 1)
    merged = MergedFragments(flat_fragments(seeded_model(job), 1), PLAIN_MEAN, NoCodec())
    start = merged.known[0]
    own.fragments.take(0, start, whole=True, included=-1, first=True)
    own.step(0)
    first = merged.unpacked(0, own.fragments.give(0, 1), NoCodec())
    own.fragments.take(0, start, whole=True, included=-1, first=True)  # it never arrived
    assert not own.fragments.account.waits(0)
    second = merged.unpacked(0, own.fragments.give(0, 2), NoCodec())
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert own.fragments.account.samples(0) == own.samples


def test_more_fragments_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="fragments: got 99, expected at most"):
        fragments_of(seeded_model(job_of()), 99)
