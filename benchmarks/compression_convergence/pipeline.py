"""Stages of a replica one after another in this process: the engines and codecs of a run, without its transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.graph import Flow, Ref
from isthmus.job import Prepared
from isthmus.plans import Compression, Plan
from isthmus.runtime.coordinator.stages import stage_pairs
from isthmus.training.compression import SampleFeedback, codec_of
from isthmus.training.engine import EngineConfig, TorchEngine
from isthmus.training.weights import initial_weights

Batch = Mapping[str, Tensor]


class Stages:
    """A chain: values pass from each stage to later ones, and no parameter is shared."""

    def __init__(self, prepared: Prepared, plan: Plan, replica: int = 0, config: EngineConfig | None = None) -> None:
        """Of the plan's replica of this number; `config` is the job's if not given."""
        captured, config = prepared.captured, config or prepared.job.engine()
        first, count = sum(len(r.stages) for r in plan.replicas[:replica]), len(plan.replicas[replica].stages)
        pairs = stage_pairs(plan, captured, clips=config.clip_norm > 0)[first : first + count]
        weights = initial_weights(prepared.build, captured, config.seed)
        self._engines = [TorchEngine(p.train, p.evaluation, config, _copied(weights)) for p in pairs]
        self._placeholders = {op.target: op.name for op in captured.train.ops if op.kind == "placeholder"}
        edges = {(first + e.source, first + e.target): e for e in plan.replicas[replica].edges}
        self._forward = {ends: e.forward_compression for ends, e in edges.items()}
        self._backward = {ends: e.backward_compression for ends, e in edges.items()}
        self._feedback = {ends: SampleFeedback() for ends in edges}
        assert Flow(captured.train).graph.count is None, "the loss is a mean"

    def step(self, number: int, micro_batches: Sequence[Batch], samples: Sequence[Sequence[int]]) -> float:
        """The loss of one step, after which the stages are updated. `samples` are each micro-batch's."""
        for m, (batch, its) in enumerate(zip(micro_batches, samples, strict=True)):
            self._run("train", number, m, batch)
            self._return(m, its)
        norms = torch.cat([engine.collect(None) for engine in self._engines])
        for engine in self._engines:
            engine.update(number, norms)
        return self._told([engine.take_loss() for engine in self._engines])

    def evaluate(self, micro_batches: Sequence[Batch], *, packed: bool) -> float:
        """Mean loss; of the model as it is, or with values packed as in training."""
        for m, batch in enumerate(micro_batches):
            self._run("eval", 0, m, batch, packed=packed)
        return self._told([engine.take_evaluation_loss() for engine in self._engines])

    def parameters(self) -> dict[str, Tensor]:
        """By the module's own names. They share the engines' memory."""
        return {
            engine.trainable[name]: value
            for engine in self._engines
            for name, value in engine.parameters(tuple(engine.trainable)).items()
        }

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        for engine in self._engines:
            engine.set_parameters({name: values[own] for name, own in engine.trainable.items()})

    def _run(self, mode: str, step: int, m: int, batch: Batch, *, packed: bool = True) -> None:
        arrived: dict[tuple[Ref, int], Tensor] = {}
        for engine in self._engines:
            stage = engine.train if mode == "train" else engine.evaluation
            inputs = {Ref(self._placeholders[c]): batch[c] for c in stage.columns}
            inputs |= {c.value: arrived[c.value, stage.index] for c in stage.receives}
            out = engine.forward(step, m, inputs) if mode == "train" else engine.evaluate(m, inputs)
            for c in stage.sends:
                how = self._forward[c.source, c.target] if packed and out[c.value].is_floating_point() else None
                arrived[c.value, c.target] = _crossed(out[c.value], how, c.value.op)

    def _return(self, m: int, samples: Sequence[int]) -> None:
        back: dict[int, list[dict[Ref, Tensor]]] = {engine.train.index: [] for engine in self._engines}
        for engine in reversed(self._engines):
            gradients = engine.backward(m, back[engine.train.index])
            for source in sorted({c.source for c in engine.train.receives}):
                ends = source, engine.train.index
                due = [c.value for c in engine.train.receives if c.source == source and c.gradient]
                back[source].append({ref: self._back(gradients[ref], ends, ref.op, samples) for ref in due})

    def _back(self, gradient: Tensor, ends: tuple[int, int], name: str, samples: Sequence[int]) -> Tensor:
        packed = self._backward[ends]
        if packed is None or not packed.feedback:
            return _crossed(gradient, packed, name)
        codec, gradient = codec_of(packed.packing), gradient.contiguous()
        payload = self._feedback[ends].encode(codec, samples, gradient, name)
        return codec.decode(payload, gradient.shape, gradient.dtype, name)

    @staticmethod
    def _told(losses: Sequence[Sequence[float] | None]) -> float:
        ((total, count),) = [told for told in losses if told is not None]
        return total / count


def _crossed(tensor: Tensor, packed: Compression | None, name: str) -> Tensor:
    if packed is None:
        return tensor.clone()
    codec = codec_of(packed.packing)
    return codec.decode(codec.encode(tensor, name), tensor.shape, tensor.dtype, name)


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.clone(value) for name, value in weights.items()}
