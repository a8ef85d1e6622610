"""One stage on several ranks of a process group: a machine or a cluster that is one device to all others.

Data-parallel: every rank computes its share of the samples of each micro-batch. Rank 0 is the engine that the rest of
the program sees. It hands out the shares of what arrives, puts together what leaves, and owns the parameters:

    rank 0    forward, backward ── shares ──►  others    the same on their samples
              collect           ◄── sum ────             gradients of the whole micro-batches
              update            ── values ─►             parameters as computing takes them

Reduce and broadcast move the bytes of an all-reduce; so the optimizer, clipping and averaging between replicas are
rank 0's alone, and the others hold no state. (Rejected: an update on each rank. All code that changes parameters would
have to run on every rank.) Where a stage is too large for one rank, each rank owns a part of it: `sharded_island`.

Batch norm over all samples of a micro-batch, where each rank has a share of them (as torch's SyncBatchNorm).

    mean = sum over ranks of sum(x) / N      var = sum over ranks of sum((x - mean)^2) / N      N: of all ranks

Both sums are differentiated: the gradient of a sum over ranks is the sum over ranks of its gradients. Kept statistics
become the same on every rank.

An island whose ranks own the parameters together: a stage may be larger than one of them can hold.

Rank 0 is the engine that the rest of the program sees, as of any island. What changes parts is said to all ranks, and
what somebody wants whole is put together on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import torch
from torch import Tensor

from isthmus.accelerators.copies import all_to_device
from isthmus.combinations import refused
from isthmus.errors import RankLost, StepError, UserError
from isthmus.graph.label_means import is_even
from isthmus.graph.mixing import mixes
from isthmus.graph.operators import operator_of
from isthmus.graph.opgraph import Ref, TensorSpec
from isthmus.graph.partition import StageGraph
from isthmus.training.collectives import Collectives
from isthmus.training.engine import Engine, EngineConfig, TorchEngine
from isthmus.training.ranks import Command, Ranks, StageSetUp, Tensors
from isthmus.training.sharded import ShardedEngine, Whole
from isthmus.training.stored import Sent, in_memory

NORMS = "norms"
Result = tuple[dict[str, Tensor], tuple[float, ...] | None]
"""Values by label; loss and count, where the stage has the loss."""


def check_shares(config: EngineConfig, train: StageGraph, ranks: int) -> None:
    """UserError for a stage whose samples cannot be shared out."""
    if config.micro_batch_size % ranks:
        raise UserError(
            f"island of {ranks} ranks: got micro-batches of {config.micro_batch_size} samples, expected a multiple "
            f"of {ranks}"
        )
    mixing = mixes(train, synchronised=True)
    if mixing is not None:
        where = f" ({mixing.source})" if mixing.source else ""
        raise refused("statistics over samples", "several ranks", f"{mixing.target}{where} in stage {train.index}")
    if not is_even(train):
        raise refused("a mean as loss", "several ranks", "a loss that is a mean of its own")


def batch_axis(spec: TensorSpec, size: int, ranks: int) -> int | None:
    """The axis along which a value of `size` samples is shared out; None for one that is of no sample. UserError where
    there is no telling."""
    whole, share = spec.shape_at(size), spec.shape_at(size // ranks)
    axes = [axis for axis, (a, b) in enumerate(zip(whole, share, strict=True)) if a != b]
    if not axes:
        return None
    if len(axes) > 1 or whole[axes[0]] != ranks * share[axes[0]]:
        raise UserError(f"island of {ranks} ranks: a value of shape {list(whole)} cannot be shared out by samples")
    return axes[0]


def _specs(train: StageGraph, evaluation: StageGraph) -> dict[str, TensorSpec]:
    """Return the specs of values that other stages send or receive, by label."""
    crossing = (c for graph in (train, evaluation) for c in (*graph.receives, *graph.sends))
    return {_label(c.value): c.spec for c in crossing}


def _label(ref: Ref) -> str:
    return f"{ref.op}:{ref.index}"


def _labelled(values: Mapping[Ref, Tensor]) -> dict[str, Tensor]:
    return {_label(ref): tensor for ref, tensor in values.items()}


def _by_ref(values: Mapping[str, Tensor]) -> dict[Ref, Tensor]:
    parted = {name: name.rpartition(":") for name in values}
    return {Ref(op, int(index)): values[name] for name, (op, _, index) in parted.items()}


class _Share:
    """A rank's engine, on its share of the samples."""

    def __init__(self, made: StageSetUp, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
        config = msgspec.structs.replace(
            made.config,
            micro_batch_size=made.config.micro_batch_size // ranks.count,
            micro_batches=made.config.micro_batches * ranks.count,  # a mean over its samples counts as so much less
        )
        kind = ShardedEngine if made.sharded else TorchEngine
        self.engine = kind(
            made.train,
            made.evaluation,
            config,
            weights,
            accelerator=ranks.accelerator,
            recompute=made.recompute,
            frozen=made.frozen,
            replaced={BATCH_NORM: batch_norm_of(ranks.collectives)},
        )
        self.meets = made.sharded or any(op.target == BATCH_NORM for op in made.train.ops)
        """Whether ranks wait for each other in a forward or a backward."""
        self._ranks = ranks

    def run(self, command: Command, given: Tensors) -> Result:
        """A forward, a backward or an evaluation."""
        number = command.micro_batch * self._ranks.count + self._ranks.rank  # no two draw the same random numbers
        inputs = [_by_ref(all_to_device(self._ranks.accelerator, group)) for group in given]
        match command.kind:
            case "forward":
                return _labelled(self.engine.forward(command.step, number, inputs[0])), self.engine.take_loss()
            case "evaluate":
                return _labelled(self.engine.evaluate(number, inputs[0])), self.engine.take_evaluation_loss()
            case _:
                if self.engine.loss_scale is not None:
                    self.engine.loss_scale.value = command.loss_scale
                return _labelled(self.engine.backward(number, inputs)), None

    def sum(self, names: Sequence[str]) -> None:
        """Add the gradients of these parameters to those of rank 0, which keeps the sum."""
        found = {name: g for name, g in self.engine.take_gradients(names).items() if g is not None}
        for dtype in dict.fromkeys(g.dtype for g in found.values()):
            alike = {name: g for name, g in found.items() if g.dtype == dtype}
            flat = torch.cat([g.reshape(-1) for g in alike.values()])
            flat = self._ranks.collectives.sum_to_first(flat)
            if self._ranks.rank == 0:
                parts = zip(alike.items(), flat.split([g.numel() for g in alike.values()]), strict=True)
                self.engine.add_gradients({name: part.view_as(g) for (name, g), part in parts})

    def keep(self, command: Command, given: Tensors) -> None:
        """Change the parts of a `ShardedEngine`, or put them together."""
        engine = self.engine
        assert isinstance(engine, ShardedEngine), f"{command.kind} is for parts"
        tensors = all_to_device(self._ranks.accelerator, given[0]) if given else {}
        match command.kind:
            case "collect":
                engine.collect(command.count)
            case "update":
                engine.update(command.step, tensors.get(NORMS))
            case "skip":
                engine.skip_update()
            case "state":
                engine.state()
            case "whole":
                engine.whole(command.what, command.names)
            case "add":
                engine.add_gradients(tensors)
            case _:
                engine.set_parameters(tensors)


def serve(ranks: Ranks) -> None:
    """The part of a rank other than 0: until that one ends it. RankLost where a rank is gone; errors of this one are
    left for rank 0 to find before they are raised."""
    try:
        _obey(ranks)
    except RankLost:
        raise
    except Exception as e:
        ranks.leave(e)
        raise


def _obey(ranks: Ranks) -> None:
    share: _Share | None = None
    while (heard := ranks.receive(0))[0].kind != "end":
        command, groups = heard
        if command.stage is not None:
            torch.set_num_threads(command.stage.threads)
            command.stage.config.kernels.use(ranks.accelerator)
            share = _Share(command.stage, groups[0], ranks)
            continue
        assert share is not None, "a stage comes first"
        match command.kind:
            case "sum":
                share.sum(command.names)
            case "values":
                share.engine.set_shared(all_to_device(ranks.accelerator, groups[0]))
            case "forward" | "backward" | "evaluate":
                try:
                    values, loss_count = share.run(command, groups)
                except StepError as e:  # every island would say the same: it is no reason to end this one
                    if share.meets:
                        raise  # but the others may be waiting for this rank
                    ranks.send(0, Command(kind="answer", failed=(e.what, e.reason)), [{}])
                else:
                    ranks.send(0, Command(kind="answer", loss_count=loss_count), [values])
            case _:
                share.keep(command, groups)


class IslandEngine:
    """An `Engine` on rank 0."""

    def __init__(self, made: StageSetUp, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
        """UserError where the stage cannot be shared out. `weights` as those of `TorchEngine`."""
        check_shares(made.config, made.train, ranks.count)
        size = made.config.micro_batch_size
        specs = _specs(made.train, made.evaluation)
        self._axes = {name: batch_axis(spec, size, ranks.count) for name, spec in specs.items()}
        self._ranks = ranks
        self._tell(Command(kind="stage", stage=made), [weights])
        self._own = _Share(made, weights, ranks)
        self._engine = self._own.engine
        self.accelerator = self._engine.accelerator
        self.loss_scale = self._engine.loss_scale
        self.owned = self._engine.owned
        self._counts = {"forward": made.train.count is not None, "evaluate": made.evaluation.count is not None}
        self._loss_counts: dict[str, list[tuple[float, ...]]] = {"forward": [], "evaluate": []}
        self._summed = True  # whether what the ranks have added up is at rank 0

    def _tell(self, command: Command, tensors: Tensors = ()) -> None:
        for rank in range(1, self._ranks.count):
            self._ranks.send(rank, command, tensors)

    def forward(self, step: int, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        return self._on_all(Command(kind="forward", step=step, micro_batch=micro_batch), [inputs])

    def backward(self, micro_batch: int, gradients: Sequence[Mapping[Ref, Tensor]]) -> dict[Ref, Tensor]:
        self._summed = False
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        return self._on_all(Command(kind="backward", micro_batch=micro_batch, loss_scale=scale), gradients)

    def evaluate(self, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        return self._on_all(Command(kind="evaluate", micro_batch=micro_batch), [inputs])

    def _on_all(self, command: Command, given: Sequence[Mapping[Ref, Tensor]]) -> dict[Ref, Tensor]:
        backward = command.kind == "backward"
        groups = [self._shares(_labelled(group), once=backward) for group in given]
        for rank in range(1, self._ranks.count):
            self._ranks.send(rank, command, [group[rank] for group in groups])
        failed: StepError | None = None
        results: list[Result] = []
        try:
            results.append(self._own.run(command, [group[0] for group in groups]))
        except StepError as e:
            if self._own.meets:
                self._ranks.broken = True
                raise
            failed = e
        for rank in range(1, self._ranks.count):  # all answers, so that none is taken for that of a later command
            answer, (values,) = self._ranks.receive(rank)
            failed = failed or (StepError(*answer.failed) if answer.failed else None)
            results.append((all_to_device(self.accelerator, values), answer.loss_count))
        if failed is not None:
            raise failed
        loss_count = [one for _, one in results if one is not None]
        if loss_count:
            loss, count, *metrics = (sum(column) for column in zip(*loss_count, strict=True))
            of = 1 if self._counts[command.kind] else len(loss_count)
            self._loss_counts[command.kind].append((loss / of, count / of, *metrics))
        return _by_ref(self._together([values for values, _ in results], adds=backward))

    def _shares(self, values: Mapping[str, Tensor], *, once: bool) -> list[dict[str, Tensor]]:
        """One for each rank. What is of no sample goes to all; if it counts `once` the others get zeros."""
        found: list[dict[str, Tensor]] = [{} for _ in range(self._ranks.count)]
        for name, value in values.items():
            axis = self._axes.get(name, 0)  # else a column of the batch: samples come first
            for rank, share in enumerate(found):
                if axis is not None:
                    share[name] = value.chunk(self._ranks.count, axis)[rank]
                else:
                    share[name] = torch.zeros_like(value) if once and rank else value
        return found

    def _together(self, found: Sequence[Mapping[str, Tensor]], *, adds: bool) -> dict[str, Tensor]:
        """Join the ranks' results. A tensor without samples is the same on all ranks, or adds up."""
        whole: dict[str, Tensor] = {}
        for name in found[0]:
            axis, parts = self._axes[name], [each[name] for each in found]
            if axis is not None:
                whole[name] = torch.cat(parts, axis)
            else:
                whole[name] = torch.stack(parts).sum(0) if adds else parts[0]
        return whole

    def _sum(self) -> None:
        """Once between the last backward of a step and whatever takes gradients."""
        if self._summed:
            return
        self._summed = True
        engine = self._engine
        names = [n for n in engine.trainable if not (isinstance(engine, ShardedEngine) and engine.is_shared_out(n))]
        found = self._engine.take_gradients(names)
        there = {name: g for name, g in found.items() if g is not None}
        self._engine.add_gradients(there)
        if there:
            self._tell(Command(kind="sum", names=tuple(there)))
            self._own.sum(tuple(there))

    def _spread(self, names: Sequence[str]) -> None:
        """The others compute with these parameters from now on."""
        self._tell(Command(kind="values"), [self._engine.shared_values(names)])

    def count(self, step: int) -> float:
        return sum(count for _, count, *_ in self._loss_counts["forward"])

    @property
    def loss(self) -> float:
        return sum(loss for loss, *_ in self._loss_counts["forward"])

    @property
    def last_loss(self) -> Tensor:
        return torch.full((), self._loss_counts["forward"][-1][0], device=self.accelerator.device)

    def take_loss(self) -> tuple[float, float] | None:
        return self._take("forward")[:2] if self._engine.train.loss is not None else None

    def take_evaluation_loss(self) -> tuple[float, ...] | None:
        return self._take("evaluate") if self._engine.evaluation.loss is not None else None

    def _take(self, kind: Literal["forward", "evaluate"]) -> tuple[float, float, *tuple[float, ...]]:
        loss_count, self._loss_counts[kind] = self._loss_counts[kind], []
        loss, count, *metrics = map(sum, zip(*loss_count, strict=True)) if loss_count else (0.0, 0.0)
        return loss, count, *metrics

    def shared_values(self, names: Sequence[str], step: int | None = None) -> dict[str, Tensor]:
        return self._engine.shared_values(names, step)

    def set_shared(self, values: Mapping[str, Tensor]) -> None:
        self._engine.set_shared(values)
        self._spread(tuple(values))

    def take_shared_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        self._sum()
        return self._engine.take_shared_gradients(names)

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        self._sum()
        self._engine.add_gradients(gradients)

    def take_gradients(self, names: Sequence[str]) -> dict[str, Tensor | None]:
        self._sum()
        return self._engine.take_gradients(names)

    def parameters(self, names: Sequence[str]) -> dict[str, Tensor]:
        return self._engine.parameters(names)

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        self._engine.set_parameters(values)
        self._spread(tuple(values))

    def collect(self, count: float | None) -> Tensor:
        self._sum()
        return self._engine.collect(count)

    def gradients(self) -> dict[str, Tensor]:
        return self._engine.gradients()

    def update(self, step: int, norms: Tensor | None) -> None:
        self._engine.update(step, norms)
        self._spread([name for name in self._engine.trainable if name not in self._engine.train.shared_from])

    def skip_update(self) -> None:
        self._engine.skip_update()

    def state(self) -> dict[str, Tensor]:
        return self._engine.state()


BATCH_NORM = "aten.batch_norm.default"


class _BatchNormSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Collectives) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradients[0]), None


def batch_norm_of(ranks: Collectives) -> Callable[..., Tensor]:
    """In place of the operator, with its arguments; all ranks have equally many samples."""
    alone = cast("Callable[..., Tensor]", operator_of(BATCH_NORM))

    def batch_norm(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
        training: bool,
        momentum: float,
        *options: object,
    ) -> Tensor:
        if not training:
            return alone(x, weight, bias, mean, variance, training, momentum, *options)
        return _normalised(x, (weight, bias), (mean, variance), momentum, cast(float, options[0]), ranks)

    return batch_norm


def _normalised(
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    kept: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
    ranks: Collectives,
) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    others = [dim for dim in range(x.dim()) if dim != 1]
    along = [1, -1, *[1] * (x.dim() - 2)]
    count = ranks.count * x.numel() // x.shape[1]

    def over_all(values: Tensor) -> Tensor:
        return cast(Tensor, _BatchNormSum.apply(values.sum(others), ranks)) / count

    mean = over_all(wide)
    centred = wide - mean.view(along)
    variance = over_all(centred.square())
    _keep(kept, mean, variance * (count / max(count - 1, 1)), momentum)
    found = centred * torch.rsqrt(variance + eps).view(along)
    weight, bias = affine
    if weight is not None:
        found = found * weight.to(found.dtype).view(along)
    if bias is not None:
        found = found + bias.to(found.dtype).view(along)
    return found.to(x.dtype)


@torch.no_grad()
def _keep(kept: tuple[Tensor | None, Tensor | None], mean: Tensor, variance: Tensor, momentum: float) -> None:
    for statistic, value in zip(kept, (mean, variance), strict=True):
        if statistic is not None:
            statistic.mul_(1 - momentum).add_(value.to(statistic.dtype), alpha=momentum)


class ShardedIsland(IslandEngine):
    """An `Engine` on rank 0."""

    @property
    def _parts(self) -> ShardedEngine:
        return cast(ShardedEngine, self._engine)

    def _split(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those that are shared out, and those that each rank has whole."""
        apart = [n for n in names if self._parts.is_shared_out(n)]
        return apart, [n for n in names if not self._parts.is_shared_out(n)]

    def _whole(self, what: Whole, names: Sequence[str]) -> dict[str, Tensor | None]:
        if names:
            self._tell(Command(kind="whole", what=what, names=tuple(names)))
        return self._parts.whole(what, names)

    def _put(self, command: Command, values: Mapping[str, Tensor], own: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Each rank's parts of these values."""
        for rank in range(1, self._ranks.count):
            parts = {name: self._parts.part_of(value, rank) for name, value in values.items()}
            self._ranks.send(rank, command, [parts])
        own({name: self._parts.part_of(value, 0) for name, value in values.items()})

    def _spread(self, names: Sequence[str]) -> None:
        _, whole = self._split(names)
        if whole:
            super()._spread(whole)

    def shared_values(self, names: Sequence[str], step: int | None = None) -> dict[str, Tensor]:
        apart, whole = self._split(names)
        found = _there(self._whole("values", apart)) | self._engine.shared_values(whole)
        return {name: found[name] for name in names}

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        self._sum()
        self._put(Command(kind="add"), gradients, self._engine.add_gradients)

    def take_gradients(self, names: Sequence[str]) -> dict[str, Tensor | None]:
        self._sum()
        return self._whole("sums", names)

    def parameters(self, names: Sequence[str]) -> dict[str, Tensor]:
        return _there(self._whole("parameters", names))

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        self._put(Command(kind="put"), values, self._engine.set_parameters)

    def collect(self, count: float | None) -> Tensor:
        self._sum()
        self._tell(Command(kind="collect", count=count))
        return self._engine.collect(count)

    def gradients(self) -> dict[str, Tensor]:
        own = self._engine.trainable
        apart, _ = self._split(list(own))
        return {own[name]: value for name, value in _there(self._whole("gradients", apart)).items()}

    def update(self, step: int, norms: Tensor | None) -> None:
        self._tell(Command(kind="update", step=step), [{NORMS: norms}] if norms is not None else [])
        self._engine.update(step, norms)

    def skip_update(self) -> None:
        self._tell(Command(kind="skip"))
        self._engine.skip_update()

    def state(self) -> dict[str, Tensor]:
        self._tell(Command(kind="state"))
        return self._engine.state()


def _there(found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if value is not None}


def island_engine(made: StageSetUp, weights: Mapping[str, Sent], ranks: Ranks) -> Engine:
    """UserError where the stage cannot be shared out. `weights` as those of `TorchEngine`."""
    here = {name: in_memory(value) for name, value in weights.items()}
    return (ShardedIsland if made.sharded else IslandEngine)(made, here, ranks)
