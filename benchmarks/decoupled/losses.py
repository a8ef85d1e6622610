"""Losses at equal tokens and at equal seconds: each mode's arithmetic in one process, with modelled times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from jobs import PERIOD, SHARES
from times import times
from torch import Tensor, nn

import isthmus
from isthmus.api.decoupled import fragment_bytes, replica_models, replica_plans
from isthmus.data import Dataset, SampleOrder, load_dataset
from isthmus.fleet import Fleet, resolve_fleet
from isthmus.graph.outputs import loss_and_count
from isthmus.job import prepare
from isthmus.protocol.decoupled_events import MergeChanges
from isthmus.runtime.decoupled.merged_run import evaluated, merge_rules, merged_fragments, seeded_model
from isthmus.simulator import Fault
from isthmus.simulator.merging import MergingSimulation
from isthmus.training.decoupled import delta_codec, fragments_of
from isthmus.training.optim import Optimizers, OuterStep, clip, gradient_norms
from isthmus_testing.decoupled_replay import ReplicasTogether
from isthmus_testing.replica_trainer import ReplicaTrainer

POINTS = 10
"""Evaluations of a run."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out losses of one run."""

    samples: list[int]
    seconds: list[float]
    losses: list[float]
    bytes: int = 0
    """Of changes, both ways."""

    def at_second(self, second: float) -> float | None:
        """The newest loss at that time."""
        found = [loss for s, loss in zip(self.seconds, self.losses, strict=True) if s <= second]
        return found[-1] if found else None


def decoupled(job: isthmus.Job, faults: Sequence[Fault] = ()) -> Curve:
    """On the virtual clock, with what replicas compute. Every codec has the times of int4, so that the same changes are
    merged in the same order, and losses differ by the codec alone."""
    fleet, data, heldout = resolve_fleet(job.fleet), load_dataset(job.data, "train"), load_dataset(job.data, "heldout")
    together = _Evaluated(job, data, heldout, fleet)
    prepared = prepare(job)
    models = replica_models(prepared, fleet, replica_plans(prepared, fleet))
    rules = msgspec.structs.replace(job.sync.decoupled, codec="int4", ratio=1.0)
    timed = msgspec.structs.replace(job, sync=msgspec.structs.replace(job.sync, decoupled=rules))
    as_timed = fragment_bytes(timed, together.merged)
    simulation = MergingSimulation(merge_rules(job), models, as_timed, faults, together)
    run = simulation.run()
    seconds = {merge.merge: time_s for time_s, merge in run.merges}
    return Curve(
        samples=[samples for _, samples, _ in together.points],
        seconds=[seconds[merge] for merge, _, _ in together.points],
        losses=[loss for _, _, loss in together.points],
        bytes=together.sent_bytes,
    )


class _Evaluated(ReplicasTogether):
    """Evaluates the merged model now and then."""

    def __init__(self, job: isthmus.Job, data: Dataset, heldout: Dataset, fleet: Fleet) -> None:
        names = fleet.names
        super().__init__(
            merged_fragments(job),
            delta_codec(job.sync.decoupled),
            lambda name: ReplicaTrainer(job, data, names.index(name), len(names)),
        )
        self.sent_bytes = 0
        """Of changes, both ways: as packed."""
        self.points: list[tuple[int, int, float]] = []
        """Merge, samples, loss."""
        self._job, self._heldout, self._model = job, heldout, seeded_model(job)
        self._done = 0

    def give(self, replica: str, fragment: int, number: int) -> None:
        super().give(replica, fragment, number)
        self.sent_bytes += self.payload(replica, fragment, number).nbytes

    def merge(self, merge: MergeChanges) -> None:
        super().merge(merge)
        self.sent_bytes += sum(self.changes[f.fragment].nbytes for f in merge.fragments) * len(self.trainers)
        training = self._job.training
        whole = training.steps * training.batch_size
        done, last = merge.samples * POINTS // whole, len(merge.fragments) > 1
        if done > self._done or last:
            self._done = done
            self.merged.fill(fragments_of(self._model, self._job.sync.decoupled.fragments))
            loss = evaluated(self._model, self._heldout, training.eval_samples, 64)[0]
            self.points.append((merge.merge, merge.samples, loss))


class _Replica:
    def __init__(self, job: isthmus.Job, data: Dataset) -> None:
        self.model, self.data = seeded_model(job), data
        self.parameters = list(self.model.parameters())
        named = dict(self.model.named_parameters())
        self.optimizers = Optimizers(job.optimizer, named, job.learning_rate, job.training.steps)

    def step(self, job: isthmus.Job, batch: dict[str, Tensor], step: int) -> None:
        loss, count, _ = loss_and_count(self.model, batch, uneven=False)
        (loss if count is None else loss / count).backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        clip(gradients, gradient_norms(gradients), job.training.clip_norm)
        self.optimizers.step(step)


def waiting(job: isthmus.Job) -> Curve:
    """Replicas that wait for each other: one model in `every-step`, else one for each device."""
    training, mode = job.training, job.sync.mode
    data, heldout = load_dataset(job.data, "train"), load_dataset(job.data, "heldout")
    order, columns = SampleOrder(len(data), training.seed), list(data.columns)
    shares = [training.batch_size] if mode == "every-step" else [job.micro_batch_size * n for n in SHARES.values()]
    replicas = [_Replica(job, data) for _ in shares]
    average = _AVERAGES[mode](job, replicas, [share / sum(shares) for share in shares])
    step_s = times().together_s[mode]
    curve = Curve(samples=[], seconds=[], losses=[])
    for step in range(training.steps):
        start = step * training.batch_size
        for replica, share in zip(replicas, shares, strict=True):
            replica.step(job, data.batch(order.indices(start, share), columns), step)
            start += share
        average(step)
        if (step + 1) % (training.steps // POINTS) == 0:
            curve.samples.append((step + 1) * training.batch_size)
            curve.seconds.append((step + 1) * step_s)
            model = _mean(job, replicas, [share / sum(shares) for share in shares])
            curve.losses.append(evaluated(model, heldout, training.eval_samples, 64)[0])
    return curve


Average = Callable[[int], None]


@torch.no_grad()
def _mean(job: isthmus.Job, replicas: Sequence[_Replica], weights: Sequence[float]) -> nn.Module:
    """The replicas' mean: within a period they differ."""
    model = seeded_model(job)
    for number, parameter in enumerate(model.parameters()):
        parameter.copy_(_weighted([replica.parameters[number] for replica in replicas], weights))
    return model


def _weighted(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return sum((w * t for t, w in zip(tensors, weights, strict=True)), torch.zeros_like(tensors[0]))


def _parts(replicas: Sequence[_Replica], weights: Sequence[float], chosen: Callable[[int, int], bool]) -> Average:
    """Average the parameters that `chosen(step, number)` says."""

    @torch.no_grad()
    def average(step: int) -> None:
        for number in range(len(replicas[0].parameters)):
            if chosen(step, number):
                own = [replica.parameters[number] for replica in replicas]
                mean = _weighted(own, weights)
                for parameter in own:
                    parameter.copy_(mean)

    return average


def _outer(job: isthmus.Job, replicas: Sequence[_Replica], weights: Sequence[float]) -> Average:
    config = job.sync.outer
    assert config is not None, "mode 'outer'"
    outer = OuterStep([p.detach().clone() for p in replicas[0].parameters], config)

    @torch.no_grad()
    def average(step: int) -> None:
        if (step + 1) % PERIOD == 0:
            deltas = [outer.deltas([p.detach() for p in replica.parameters]) for replica in replicas]
            outer.step([_weighted(own, weights) for own in zip(*deltas, strict=True)])
            for replica in replicas:
                outer.mix_into([p.data for p in replica.parameters])

    return average


_AVERAGES: dict[str, Callable[[isthmus.Job, Sequence[_Replica], Sequence[float]], Average]] = {
    "every-step": lambda job, replicas, weights: lambda step: None,
    "local": lambda job, rs, ws: _parts(rs, ws, lambda step, number: (step + 1) % PERIOD == 0),
    "dreamddp": lambda job, rs, ws: _parts(rs, ws, lambda step, number: number % PERIOD == step % PERIOD),
    "outer": _outer,
}
