"""Determines which values leave data holders under a plan, which of them each stage must clip first, and whether noise
can cover them.

A stage is raw where it computes on samples as they are: it reads columns that are no labels, or takes values of such a
stage that were not covered. Raw stages run on data holders; what they send to other holders stays as it is.

How much a run's messages have disclosed of its samples: kept in its folder, from session to session.

Every item counts that devices hear of, before they do: whatever is done again after a loss counts again. On record is
more than that, the rest of the pass, until the session ends: who is killed leaves no less there than was sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.combinations import refused
from isthmus.data import ColumnSpec
from isthmus.disclosure import SPENT, ActivationNoise, PrivacySpent, SampleRange, format_epsilon, read_spent
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.graph import Flow, OpGraph, StageGraph
from isthmus.graph.cuts import label_columns
from isthmus.graph.mixing import mixes, sample_axis
from isthmus.graph.opgraph import Op
from isthmus.graph.partition import Crossing
from isthmus.job import Prepared, constraints_of
from isthmus.plans import Plan
from isthmus.plans.schedule import had_before
from isthmus.protocol.run_messages import Item
from isthmus.run_files import write_json
from isthmus.runtime.coordinator.stages import StagePair, stage_pairs
from isthmus.training.local_privacy import (
    Boundary,
    Released,
    epsilon_of,
    noise_multiplier_for,
    spent_by_epoch,
    squared_mu,
)
from isthmus.units import format_count

FIELD = "privacy.activations"
FLOATS = ("float16", "bfloat16", "float32", "float64")
MOST_NAMED = 3


class Protection(NamedTuple):
    """The protection of a plan; stages are numbered as workers."""

    raw: frozenset[int]
    released: Mapping[int, Released]
    noise: ActivationNoise | None
    noise_multiplier: float
    train: int  # releases of a training sample in one pass: stages of a replica whose values leave
    heldout: int  # releases of a held-out sample in one evaluation

    def freezes(self, worker: int) -> bool:
        """Return whether the stage's weights do not learn."""
        return worker in self.raw and self.noise is not None and self.noise.weights == "frozen"

    def trains_raw(self, worker: int) -> bool:
        """Return whether the stage's weights learn from raw samples that noise is to protect."""
        return worker in self.raw and self.noise is not None and self.noise.weights == "trained"


NONE = Protection(frozenset(), {}, None, 0.0, 0, 0)  # the protection of a job that asks for no noise


class _Graph(NamedTuple):
    graph: OpGraph
    stages: Sequence[StageGraph]
    inputs: frozenset[str]  # operators and columns that depend on more than labels


def protection(prepared: Prepared, plan: Plan, pairs: Sequence[StagePair], holders: Sequence[str]) -> Protection:
    """Return the protection that the plan needs. UserError where noise on the plan's messages would not cover the
    values that leave, or the accounting not what they disclose."""
    privacy = prepared.job.privacy
    if privacy is None:
        return NONE
    noise = privacy.activations
    labels = _labels(prepared)
    _check_labels(labels, prepared.samples.columns)
    graphs = [
        _Graph(graph, stages, _telling(graph, labels))
        for graph, stages in (
            (prepared.captured.train, [pair.train for pair in pairs]),
            (prepared.captured.eval, [pair.evaluation for pair in pairs]),
        )
    ]
    devices = plan.devices
    held = [device in holders for device in devices]
    # Of holders with data of their own none may have another's.
    trusted = [False] * len(devices) if prepared.job.plan.feeders else held
    raw = _raw(graphs, labels, held, trusted)
    for worker in sorted(raw):
        _check_gradients(pairs[worker].train, graphs[0], devices, trusted)
        _check_stage(pairs[worker], devices[worker], noise)
    if noise.weights == "trained":
        _check_trained(prepared, plan, pairs, raw, trusted)
    leaves = {
        worker: tuple(
            tuple(_sent_values(each, worker, devices, trusted, noise, is_raw=worker in raw)) for each in graphs
        )
        for worker in range(len(devices))
        if held[worker]
    }
    train, heldout = (_most_per_replica(plan, {w for w in raw if leaves[w][mode]}) for mode in (0, 1))
    if not train:
        raise UserError(f"{FIELD}: by the plan nothing leaves {', '.join(holders)}, expected another device to compute")
    multiplier = noise.noise_multiplier or _multiplier(prepared, noise, train, heldout)
    released = {
        worker: Released(
            train=_boundary(leaves[worker][0], noise, multiplier),
            evaluation=_boundary(leaves[worker][1], noise, multiplier),
        )
        for worker in sorted(raw)
        if any(leaves[worker])
    }
    return Protection(raw, released, noise, multiplier, train, heldout)


def protection_text(prepared: Prepared, plan: Plan, fleet: Fleet) -> list[str]:
    """For people: what becomes of what leaves data holders, and what it is to tell. UserError as `protection`."""
    if prepared.job.privacy is None:
        return []
    pairs = stage_pairs(plan, prepared.captured, clips=False)
    found = protection(prepared, plan, pairs, constraints_of(prepared.job, fleet).data_holders)
    return list(_described(prepared, plan, found))


def _described(prepared: Prepared, plan: Plan, found: Protection) -> Iterator[str]:
    noise = found.noise
    if noise is None:
        return
    for worker, released in found.released.items():
        boundary = released.train
        takers = ", ".join(dict.fromkeys(plan.devices[target] for target in boundary.targets))
        yield (
            f"Values that leave {plan.devices[worker]} for {takers} are clipped to {boundary.clip:.4g} per sample "
            f"({boundary.per_sample} numbers) and noised with sigma {boundary.deviation:.4g}."
        )
    passes, evaluations = planned_passes(prepared)
    one, all_passes = (
        epsilon_of(squared_mu(found.noise_multiplier, found.train * count), noise.delta) for count in (1, passes)
    )
    yield (
        f"Local privacy of each training sample at delta {noise.delta:g}: epsilon "
        f"{format_epsilon(one)} per epoch, {format_epsilon(all_passes)} after {passes}."
    )
    if evaluations:
        spent = epsilon_of(squared_mu(found.noise_multiplier, found.heldout * evaluations), noise.delta)
        after = format_count(evaluations, "evaluation")
        yield f"Of each held-out sample: epsilon {format_epsilon(spent)} after {after}."
    names = ", ".join(dict.fromkeys(plan.devices[worker] for worker in sorted(found.raw)))
    if noise.weights == "frozen":
        yield f"Weights on {names} stay as they are; those behind the noise learn."
    else:
        yield (
            f"Weights on {names} are trained on samples without noise, and leave in checkpoints and snapshots: epsilon "
            "does not cover what these weights reveal."
        )
    what = "are public here" if noise.labels == "public" else "stay"
    yield (
        f"Labels {what}. What gradients and losses reveal about labels is not covered. "
        "Plans do not count the time that noise takes."
    )


def planned_passes(prepared: Prepared) -> tuple[int, int]:
    """Return how often a run uses a training sample at most, and a held-out one."""
    t, samples = prepared.job.training, counted_samples(prepared)
    evaluations = -(-t.steps // t.eval_every) if t.eval_every else 0
    turns = had_before(samples, t.steps * prepared.job.micro_batches)
    passes = max(-(-had * prepared.job.micro_batch_size // size) for had, size in zip(turns, samples, strict=True))
    return passes, evaluations


def counted_samples(prepared: Prepared) -> tuple[int, ...]:
    """Training samples of each holder with data of its own, or of all together."""
    return tuple(own.train for own in prepared.samples.holders.values()) or (prepared.samples.train,)


def _multiplier(prepared: Prepared, noise: ActivationNoise, train: int, heldout: int) -> float:
    assert noise.epsilon is not None, "one measure of noise is given"
    passes, evaluations = planned_passes(prepared)
    return noise_multiplier_for(noise.epsilon, noise.delta, max(train * passes, heldout * evaluations))


def _labels(prepared: Prepared) -> frozenset[str]:
    flow = Flow(prepared.captured.train)
    return frozenset(flow.by_name[name].target for name in label_columns(flow))


def _check_labels(labels: frozenset[str], columns: Mapping[str, ColumnSpec]) -> None:
    """UserError for labels that are the samples themselves, as next tokens are: gradients reveal labels."""
    for label in sorted(labels & columns.keys()):
        spec = columns[label]
        alike = [name for name, other in columns.items() if name not in labels and other == spec]
        if alike and spec.dtype not in FLOATS:
            raise UserError(
                f"{FIELD}: labels {label!r} have the shape and type of {alike[0]!r}, as next tokens have: gradients "
                "reveal labels, and so the samples themselves, which noise on values does not cover"
            )


def _telling(graph: OpGraph, labels: frozenset[str]) -> frozenset[str]:
    found: set[str] = set()
    for op in graph.ops:
        own = op.kind == "placeholder" and op.target not in labels
        if own or any(ref.op in found for ref in op.refs()):
            found.add(op.name)
    return frozenset(found)


def _raw(
    graphs: Sequence[_Graph], labels: frozenset[str], held: Sequence[bool], trusted: Sequence[bool]
) -> frozenset[int]:
    raw: set[int] = set()
    for worker, is_held in enumerate(held):
        for each in graphs:
            stage = each.stages[worker]
            reads = any(column not in labels for column in stage.columns)
            if reads and not is_held:
                raise UserError(f"{FIELD}: stage {worker} reads samples, expected data holders alone to")
            takes = any(c.source in raw and c.value.op in each.inputs for c in stage.receives)
            if (is_held and reads) or (trusted[worker] and takes):
                raw.add(worker)
    return frozenset(raw)


def _most_per_replica(plan: Plan, workers: set[int]) -> int:
    """Stages of one replica among these workers: a sample passes one copy of each."""
    first, most = 0, 0
    for replica in plan.replicas:
        most = max(most, len({stage for worker, stage in enumerate(replica.stage_of, first) if worker in workers}))
        first += len(replica.workers)
    return most


def _check_stage(pair: StagePair, device: str, noise: ActivationNoise) -> None:
    """A sample's values must be its own, and nothing but them may leave."""
    for stage in (pair.train, pair.evaluation):
        mixing = mixes(stage)
        if mixing is not None:
            raise refused("statistics over samples", "activation noise", f"{_at(mixing)} on {device}")
        if stage.loss is not None:
            raise UserError(
                f"{FIELD}: the plan computes the loss of raw samples on {device}, where no noise covers it, expected a "
                "stage on another device before"
            )
    written = next((op for op in pair.train.ops if op.mutates), None)
    if written is not None and noise.weights == "frozen":
        raise refused("running statistics", "frozen weights", f"{_at(written)} on {device}")


def _check_gradients(stage: StageGraph, whole: _Graph, devices: Sequence[str], held: Sequence[bool]) -> None:
    for c in stage.receives:
        if c.gradient and not held[c.source]:
            raw = next(r for r in stage.receives if r.value.op in whole.inputs and held[r.source])
            raise UserError(
                f"{FIELD}: {devices[stage.index]} takes {_value(raw)} as it is and sends gradients to "
                f"{devices[c.source]}, which would reveal it, expected a plan whose holders run neighbouring stages"
            )


def _check_trained(
    prepared: Prepared, plan: Plan, pairs: Sequence[StagePair], raw: frozenset[int], held: Sequence[bool]
) -> None:
    """Gradients of weights that learn from raw samples stay where they are."""
    if prepared.job.plan.feeders:
        raise refused("own data", "trained weights", "'own'")
    t = prepared.job.training
    if t.exchanges_norms:
        field, got = ("clip_norm", t.clip_norm) if t.clip_norm > 0 else ("non_finite", t.non_finite)
        field, got = ("precision", t.precision) if t.loss_scaling is not None else (field, got)
        raise refused("norms of gradients", "trained weights", repr(got), f"training.{field}")
    for worker in sorted(raw):
        train, device = pairs[worker].train, plan.devices[worker]
        others = {**{n: (o,) for n, o in train.shared_from.items()}, **train.shared_with}
        for name, stages in others.items():
            if not all(held[stage] for stage in stages):
                raise refused("shared parameters", "trained weights", f"{name!r} of {device}")
        for group in plan.sync.groups:
            members = plan.members(group)
            outside = [plan.devices[m] for m in members if worker in members and not held[m]]
            if outside:
                raise refused("several replicas", "trained weights", f"{device}, which sums with {outside[0]},")


def _sent_values(
    whole: _Graph, worker: int, devices: Sequence[str], held: Sequence[bool], noise: ActivationNoise, *, is_raw: bool
) -> Iterator[Crossing]:
    """Yield the values that the stage sends to devices that hold no data, and that must be covered."""
    for c in whole.stages[worker].sends:
        if held[c.target]:
            continue
        if c.value.op in whole.inputs:
            if is_raw:  # else it was covered before
                _check_value(c, devices)
                yield c
        elif noise.labels == "stay":
            raise UserError(
                f"{FIELD}.labels: got 'stay', and {_value(c)} goes from {devices[worker]} to {devices[c.target]}, "
                'expected plan.labels_stay = true, or labels = "public"'
            )


def _check_value(c: Crossing, devices: Sequence[str]) -> None:
    where = f"{_value(c)}, which goes from {devices[c.source]} to {devices[c.target]},"
    if c.spec.dtype not in FLOATS:
        raise UserError(f"{FIELD}: {where} is {c.spec.dtype}, expected floating point: noise cannot cover it")
    if sample_axis(c.spec) is None:
        raise UserError(
            f"{FIELD}: {where} has shape {[str(s) for s in c.spec.shape_at(1)]} per sample, expected one axis of "
            "samples: a sample's values cannot be distinguished from others'"
        )


def _boundary(crossings: Sequence[Crossing], noise: ActivationNoise, multiplier: float) -> Boundary:
    specs = {c.value: c.spec for c in crossings}
    axes = ((ref, sample_axis(spec)) for ref, spec in specs.items())
    numbers = sum(math.prod(spec.shape_at(1)) for spec in specs.values())
    clip = noise.norm(numbers)
    return Boundary(
        values=tuple((ref, axis) for ref, axis in axes if axis is not None),
        per_sample=numbers,
        targets=tuple(sorted({c.target for c in crossings})),
        clip=clip,
        deviation=multiplier * clip,
    )


def _at(op: Op) -> str:
    return f"{op.target} ({op.source})" if op.source else op.target


def _value(c: Crossing) -> str:
    return f"value {c.value.op!r}"


def opened_ledger(folder: Path, noise: ActivationNoise | None, samples: Sequence[int]) -> PrivacyLedger | None:
    """None where nothing is to be counted. UserError where a run that was counted would go on without noise."""
    if noise is not None:
        return PrivacyLedger(folder, noise.delta, samples)
    if (before := read_spent(folder)) is not None:
        raise UserError(f"privacy.activations: got none, expected the run's, which promises {before}")
    return None


class _SentSamples:
    """Samples that one holder sent, in the order of its own data."""

    def __init__(self, size: int, before: tuple[SampleRange, ...]) -> None:
        self._size, self.stretches = size, before
        self._begun = len(before)  # where this session's stretches begin

    def send(self, new: SampleRange) -> None:
        last = self.stretches[-1] if len(self.stretches) > self._begun else None
        if last is not None and (last.end, last.mu_squared) == (new.first, new.mu_squared):
            self.stretches = (*self.stretches[:-1], msgspec.structs.replace(last, end=new.end))
        else:
            self.stretches = (*self.stretches, new)

    @property
    def state(self) -> tuple[int, int]:
        """While it is the same, no sample has more to count."""
        return len(self.stretches), -(-max((s.end for s in self.stretches), default=0) // self._size)

    def reserved(self) -> tuple[SampleRange, ...]:
        """Return the ledger as if the pass of the last stretch were sent to its end."""
        if len(self.stretches) == self._begun:
            return self.stretches
        last = self.stretches[-1]
        end = -(-last.end // self._size) * self._size
        return (*self.stretches[:-1], msgspec.structs.replace(last, end=end))


class PrivacyLedger:
    """The ledger of one run: samples that were sent in this session and those before."""

    def __init__(self, folder: Path, delta: float, samples: Sequence[int]) -> None:
        """`samples` of each holder with data of its own, in their order, or of all together. UserError for a record
        that cannot be read, or counts other data."""
        before = read_spent(folder)
        if before is not None and before.samples != tuple(samples):
            raise UserError(f"{folder / SPENT}: counts {before.samples} training samples, expected {tuple(samples)}")
        self._path, self._delta, self._samples = folder / SPENT, delta, tuple(samples)
        known = before.stretches if before is not None else ((),) * len(samples)
        self._sent = [_SentSamples(size, stretches) for size, stretches in zip(samples, known, strict=True)]
        self._heldout = before.heldout_mu_squared if before is not None else 0.0
        self._recorded: tuple[list[tuple[int, int]], float] | None = None

    def opened(self, item: Item, micro_batch_size: int, protection: Protection) -> None:
        """The item's samples are about to be sent, under this protection."""
        if item.kind == "train":
            one = squared_mu(protection.noise_multiplier, protection.train)
            number = item.first_sample // micro_batch_size
            turns = (had_before(self._samples, n) for n in (number, number + item.micro_batches))
            for sent, first, end in zip(self._sent, *turns, strict=True):
                if first < end:
                    sent.send(SampleRange(first=first * micro_batch_size, end=end * micro_batch_size, mu_squared=one))
        elif item.kind == "eval" and not item.first_sample:  # an evaluation's other items are of other samples
            self._heldout += squared_mu(protection.noise_multiplier, protection.heldout)
        now = [sent.state for sent in self._sent], self._heldout
        if now != self._recorded:
            self._recorded = now
            self._write(self._spent([sent.reserved() for sent in self._sent]))

    def after(self, item: Item, batch: int) -> str:
        """Return a line about a finished item; empty unless it ends a pass over the data."""
        size = sum(self._samples)
        passes = (item.step + 1) * batch // size
        if item.kind != "train" or passes == item.step * batch // size:
            return ""
        text = format_epsilon(self._spent([sent.stretches for sent in self._sent]).by_epoch[passes - 1])
        return f"epoch {passes}: each sample's local epsilon is {text} at delta {self._delta:g}"

    def close(self) -> PrivacySpent:
        """Exactly what was sent is on record."""
        spent = self._spent([sent.stretches for sent in self._sent])
        if self._recorded is not None:
            self._write(spent)
        return spent

    def _spent(self, stretches: Sequence[tuple[SampleRange, ...]]) -> PrivacySpent:
        each = [spent_by_epoch(own, size) for own, size in zip(stretches, self._samples, strict=True)]
        passes = max(map(len, each))
        worst = [max(own[min(k, len(own) - 1)] for own in each if own) for k in range(passes)]
        by_epoch = tuple(epsilon_of(spent, self._delta) for spent in worst)
        return PrivacySpent(
            delta=self._delta,
            epsilon=by_epoch[-1] if by_epoch else 0.0,
            heldout_epsilon=epsilon_of(self._heldout, self._delta),
            by_epoch=by_epoch,
            samples=self._samples,
            stretches=tuple(stretches),
            heldout_mu_squared=self._heldout,
        )

    def _write(self, spent: PrivacySpent) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, spent)
