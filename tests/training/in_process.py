"""A pipeline run stage after stage in this process: the engines of a cut model, without transport or protocol."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from isthmus.data import ColumnSpec
from isthmus.graph import Flow, Ref, StageGraph, assign, cuts, partition
from isthmus.graph.capture import Captured, Column, capture
from isthmus.graph.captured import read_captured, write_captured
from isthmus.graph.metrics import MetricSums
from isthmus.graph.partition import align
from isthmus.models import as_eager, build_model
from isthmus.plans import Packing
from isthmus.training.compression import SampleFeedback, codec_of
from isthmus.training.engine import EngineConfig, TorchEngine
from isthmus.training.layout import bytes_of, header_of, in_a_row, pack, receive_buffer, unpack
from isthmus.training.optim import Optimizers
from isthmus.training.split_backward import SplitEngine
from isthmus.training.weights import initial_weights

Packings = Callable[[int, int], Packing | None]
"""How what one stage sends another is packed."""


def wire(tensor: Tensor, packing: Packing | None = None) -> Tensor:
    """What arrives when the tensor is sent."""
    header = header_of("t", tensor, packing)
    flat, buffer = receive_buffer(header)
    buffer[:] = pack(tensor) if packing is None else bytes_of(codec_of(packing).encode(in_a_row(tensor)))
    return unpack(flat, header)


class Pipeline:
    """Stages in order; all forwards of a step run before its first backward, as in GPipe."""

    def __init__(
        self,
        captured: Captured,
        boundaries: Sequence[int],
        weights: Mapping[str, Tensor],
        config: EngineConfig,
        packings: Packings = lambda source, target: None,
        *,
        recompute: Sequence[bool] = (),
        split: bool = False,
        engine: type[TorchEngine] = TorchEngine,
    ) -> None:
        """Stage k recomputes if `recompute[k]` says so, none without it. With `split` weight gradients come after all
        backwards of a step."""
        flow, eval_flow = Flow(captured.train), Flow(captured.eval)
        stage_of = assign(flow, boundaries)
        self.captured = captured
        self.packings = packings
        self.stages: tuple[StageGraph, ...] = partition(flow, stage_of)
        evaluation = partition(eval_flow, align(flow, eval_flow, stage_of))
        nothing = [
            StageGraph(index=k, ops=(), columns=(), receives=(), sends=(), shared_from={}, shared_with={})
            for k in range(len(evaluation), len(self.stages))
        ]
        self.eval_stages = (*evaluation, *nothing)
        placed = [{k: v.clone() for k, v in weights.items()} for _ in self.stages]
        again = recompute or [False] * len(self.stages)
        parts = list(zip(self.stages, self.eval_stages, placed, again, strict=True))
        self.engines: list[TorchEngine] = [
            SplitEngine(t, e, config, w) if split else engine(t, e, config, w, recompute=r) for t, e, w, r in parts
        ]
        both = (*captured.train.ops, *captured.eval.ops)
        self.placeholders = {op.target: op.name for op in both if op.kind == "placeholder"}
        self.config = config
        self.feedback = {stage.index: SampleFeedback() for stage in self.stages}
        self.norms: dict[str, Tensor] = {}
        self.metrics = list[float]()
        """Sums and counts of the last evaluation."""

    @property
    def sums_in_order(self) -> bool:
        """Whether every sum has the order of eager autograd: no value goes to two stages, no parameter is shared."""
        sent = [c.value for s in self.stages for c in s.sends if c.gradient]
        return len(sent) == len(set(sent)) and not any(s.shared_from for s in self.stages)

    def _forward(self, mode: str, step: int, m: int, batch: Mapping[str, Tensor]) -> None:
        arrived: dict[tuple[Ref, int], Tensor] = {}
        for stage, engine in zip(self.stages if mode == "train" else self.eval_stages, self.engines, strict=True):
            inputs = {Ref(self.placeholders[c]): batch[c] for c in stage.columns}
            inputs |= {c.value: arrived[c.value, stage.index] for c in stage.receives}
            out = engine.forward(step, m, inputs) if mode == "train" else engine.evaluate(m, inputs)
            for c in stage.sends:
                assert out[c.value].shape == c.spec.shape_at(self.config.micro_batch_size)
                assert str(out[c.value].dtype) == f"torch.{c.spec.dtype}"
                packed = mode == "train" and c.gradient
                arrived[c.value, c.target] = wire(out[c.value], self.packings(c.source, c.target) if packed else None)

    def _backward(self, m: int, samples: Sequence[int]) -> None:
        back: dict[int, dict[int, dict[Ref, Tensor]]] = {s.index: {} for s in self.stages}
        for stage, engine in reversed(list(zip(self.stages, self.engines, strict=True))):
            given = [back[stage.index][target] for target in sorted(back[stage.index], reverse=True)]
            gradients = engine.backward(m, given)
            for c in stage.receives:
                if c.gradient:
                    packing, gradient = self.packings(stage.index, c.source), gradients[c.value]
                    if packing is not None and packing.feedback:
                        name, codec, gradient = f"{c.value}", codec_of(packing), gradient.contiguous()
                        payload = self.feedback[stage.index].encode(codec, samples, gradient, name)
                        arrived = codec.decode(payload, gradient.shape, gradient.dtype, name)
                    else:
                        arrived = wire(gradient, packing)
                    back[c.source].setdefault(stage.index, {})[c.value] = arrived

    def share(self) -> None:
        """Give borrowers the values of shared parameters."""
        for owner, engine in enumerate(self.engines):
            for user in self.engines:
                names = [n for n, o in user.train.shared_from.items() if o == owner]
                user.set_shared(engine.shared_values(names))

    def step(
        self, number: int, micro_batches: Sequence[Mapping[str, Tensor]], samples: Sequence[Sequence[int]] = ()
    ) -> tuple[float, dict[str, Tensor]]:
        """(loss, gradients by parameter name) of one step; nothing is updated. `samples` are each micro-batch's."""
        self.share()
        for m, batch in enumerate(micro_batches):
            self._forward("train", number, m, batch)
        for m in range(len(micro_batches)):
            self._backward(m, samples[m] if samples else ())
        for engine in self.engines:
            for m in range(len(micro_batches)):
                if isinstance(engine, SplitEngine):
                    engine.weight_gradients(m)
        counted = self.captured.train.count is not None
        total = sum(e.count(number) for e in self.engines) if counted else None
        for owner, engine in enumerate(self.engines):
            for user in reversed(self.engines):
                borrowed = [n for n, o in user.train.shared_from.items() if o == owner]
                engine.add_gradients(user.take_shared_gradients(borrowed))
            self.norms |= dict(zip(engine.owned, engine.collect(total), strict=False))
        ((loss, count),) = [told for e in self.engines if (told := e.take_loss()) is not None]
        return loss / (count or 1.0), {n: g for e in self.engines for n, g in e.gradients().items()}

    def update(self, number: int) -> None:
        norms = None
        if self.config.clip_norm:
            norms = torch.stack([self.norms[name] for name in self.captured.train.trainable])
        for engine in self.engines:
            engine.update(number, norms)

    def evaluate(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> float:
        self.share()
        for m, batch in enumerate(micro_batches):
            self._forward("eval", 0, m, batch)
        ((loss, count, *self.metrics),) = [told for e in self.engines if (told := e.take_evaluation_loss()) is not None]
        return loss / (count or 1.0)

    def state(self) -> dict[str, Tensor]:
        return {name: value for e in self.engines for name, value in e.state().items()}


def capture_of(
    build: Callable[[], nn.Module],
    columns: Mapping[str, ColumnSpec],
    dtype: torch.dtype = torch.float32,
    metrics: MetricSums | None = None,
) -> Captured:
    """As a job captures its model: Hugging Face's masks as in an eager forward.

    A class, or `build_model` of a spec, is captured once: a capture follows from these, and takes half a second.
    """
    plain = {n: Column(c.dtype, c.shape) for n, c in columns.items()}
    key = None if metrics is not None else _key(build, plain, dtype)
    if key is None:
        return _captured(build, columns, plain, dtype, metrics)
    if key not in _MADE:
        _MADE[key] = _of_the_session(key, lambda: _captured(build, columns, plain, dtype, None))
    return _MADE[key]


_MADE: dict[tuple[object, str], Captured] = {}


def _key(
    build: Callable[[], nn.Module], columns: Mapping[str, Column], dtype: torch.dtype
) -> tuple[object, str] | None:
    more = f"{msgspec.json.encode(dict(columns)).decode()} {dtype}"
    if isinstance(build, functools.partial) and build.func is build_model:
        (spec,) = build.args
        return msgspec.json.encode(spec).decode(), more
    return (build, more) if isinstance(build, type) else None


def _of_the_session(key: tuple[object, str], make: Callable[[], Captured]) -> Captured:
    """Of a model that a spec names, what another worker of the suite has captured."""
    spec, more = key
    if not isinstance(spec, str):
        return make()
    name = hashlib.sha256(f"{spec} {more}".encode()).hexdigest()
    path = Path(os.environ["XDG_CACHE_HOME"]) / "tests" / f"{name}.safetensors"
    if (found := read_captured(path)) is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_captured(path, make(), spec)
        found = read_captured(path)
    assert found is not None
    return found[0]


def _captured(
    build: Callable[[], nn.Module],
    columns: Mapping[str, ColumnSpec],
    plain: Mapping[str, Column],
    dtype: torch.dtype,
    metrics: MetricSums | None,
) -> Captured:
    with contextlib.ExitStack() as stack:

        def build_and_patch() -> nn.Module:
            module = build()
            stack.enter_context(as_eager(columns))
            return module

        return capture(build_and_patch, plain, batch=2, dtype=dtype, metrics=metrics)


def weights_of(build: Callable[[], nn.Module], captured: Captured, seed: int = 1) -> dict[str, Tensor]:
    return initial_weights(build, captured, seed)


def module_of(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    """The eager twin of `weights_of` under the same seed."""
    torch.manual_seed(seed)
    return build().train()


def random_cut(captured: Captured, generator: random.Random, most: int = 6) -> list[int]:
    """A legal cut into 2 to `most` stages."""
    legal = [c.position for c in cuts(Flow(captured.train))]
    return sorted(generator.sample(legal, min(generator.randint(1, most - 1), len(legal))))


def optimizers_of(module: nn.Module, config: EngineConfig) -> Optimizers:
    return Optimizers(
        config.optimizers,
        {n: p for n, p in module.named_parameters() if p.requires_grad},
        config.learning_rate,
        config.steps,
    )


def batches(columns: Mapping[str, ColumnSpec], count: int, size: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random micro-batches; ids and classes stay below their limit."""
    generator = torch.Generator().manual_seed(seed)

    def draw(column: ColumnSpec) -> Tensor:
        shape = (size, *column.shape)
        if column.dtype == "float32":
            return torch.randn(shape, generator=generator)
        return torch.randint(0, column.limit or 2, shape, generator=generator)

    return [{name: draw(column) for name, column in columns.items()} for _ in range(count)]


def copies(micro_batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """A forward may write its inputs."""
    return [{name: tensor.clone() for name, tensor in batch.items()} for batch in micro_batches]
