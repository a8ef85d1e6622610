"""A device that has the model's graph makes the same steps as a process that has its code, with the same bits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.accelerators import HOST
from isthmus.data import load_dataset
from isthmus.data.replica_share import ReplicaSamples
from isthmus.errors import PeerError
from isthmus.job import Job
from isthmus.models import ModelSpec
from isthmus.protocol.decoupled_events import NEVER
from isthmus.runtime.decoupled.device_replica import GraphTrainer
from isthmus.runtime.decoupled.run import DecoupledRun
from isthmus.runtime.messages.decoupled import TrainReplica
from isthmus.training import compiled
from isthmus_testing.replica_trainer import ReplicaTrainer
from tests.tiers import represented_by

from .small import NAMES, job_of, replicas_of
from .test_real_run import FLEET


def ordered(job: Job, replica: str) -> tuple[DecoupledRun, TrainReplica, dict[str, torch.Tensor]]:
    """What a device is told, as the merger of this job tells it."""
    run = DecoupledRun(replicas_of(job, FLEET), Path())
    order, tensors = run.first(replica) or (None, [])
    assert isinstance(order, TrainReplica)
    return run, order, {header.name: tensor for header, tensor in zip(order.tensors, tensors, strict=True)}


def samples_of(job: Job, order: TrainReplica) -> ReplicaSamples:
    assert order.assignment.replica is not None
    return ReplicaSamples(load_dataset(job.used_data, "train"), order.assignment.replica)


def test_steps_have_the_same_bits() -> None:
    job = job_of()
    training = msgspec.structs.replace(job.training, clip_norm=0.5)
    job = msgspec.structs.replace(job, training=training, model=ModelSpec(name="cnn"))
    data = load_dataset(job.used_data, "train")
    run, order, kept = ordered(job, "c")
    ours = GraphTrainer(order, kept, samples_of(job, order), HOST)
    theirs = ReplicaTrainer(job, data, NAMES.index("c"), len(NAMES))
    assert (ours.samples, ours.batch) == (theirs.samples, theirs.batch)
    for trainer in (ours, theirs):
        for fragment, values in enumerate(run.merged.known):
            trainer.fragments.take(fragment, values, whole=True, included=NEVER, first=True)
    for step in range(3):
        assert ours.step(16 * step) == pytest.approx(theirs.step(16 * step), rel=1e-6)
    for fragment in range(len(run.merged.known)):
        assert torch.equal(ours.fragments.give(fragment, 1), theirs.fragments.give(fragment, 1))


@pytest.mark.parametrize("by", represented_by(["jax", "compile"], "compile"))
def test_steps_by_jax_and_compiled_ones_are_those_of_torch(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "jax":
        pytest.importorskip("jax", reason="the extra jax")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    by_torch, times = compiled.by_torch, iter([2.0, 1.0] * compiled.PASSES)
    monkeypatch.setattr(compiled, "by_torch", lambda _: by_torch("eager"))
    monkeypatch.setattr(compiled, "_seconds", lambda engine, act: next(times))
    job = job_of(codec="none")
    job = msgspec.structs.replace(job, runtime=msgspec.structs.replace(job.runtime, compile=by == "compile"))
    run, order, kept = ordered(job, "c")
    plain, other = (GraphTrainer(order, kept, samples_of(job, order), HOST) for _ in range(2))
    assert other.compile("jax" if by == "jax" else "torch").startswith("comp")  # computed by, or compiled in
    for trainer in (plain, other):
        for fragment, values in enumerate(run.merged.known):
            trainer.fragments.take(fragment, values, whole=True, included=NEVER, first=True)
    for step in range(3):
        assert other.step(16 * step) == pytest.approx(plain.step(16 * step), rel=1e-5)
    for fragment in range(len(run.merged.known)):
        given = (trainer.fragments.give(fragment, 1).view(torch.float32) for trainer in (plain, other))
        assert torch.allclose(*given, rtol=1e-4, atol=1e-6)


def test_a_parameter_that_is_in_no_fragment_is_refused() -> None:
    job = job_of()
    _, order, kept = ordered(job, "a")
    first, *others = order.fragments
    name = next(iter(first))
    order = msgspec.structs.replace(order, fragments=({n: s for n, s in first.items() if n != name}, *others))
    kept = {**kept, name: torch.zeros(first[name])}
    with pytest.raises(PeerError, match=f"named no fragment with {name}"):
        GraphTrainer(order, kept, samples_of(job, order), HOST)
