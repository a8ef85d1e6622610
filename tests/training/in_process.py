"""A pipeline run stage after stage in this process: the engines of a cut model without transport or protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from isthmus.graph import Flow, Ref, StageGraph, assign, partition
from isthmus.graph.align import align
from isthmus.graph.capture import Captured
from isthmus.training.engine import EngineConfig, TorchEngine


def weights_of(module: nn.Module, captured: Captured) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(captured.constants)
    found |= dict(module.named_buffers())
    found |= {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)}
    for op in (*captured.train.ops, *captured.eval.ops):
        if op.kind == "constant" and op.target not in found:
            value: object = module
            for part in op.target.split("."):
                value = getattr(value, part)
            assert isinstance(value, Tensor)
            found[op.target] = value
    return found


class Pipeline:
    def __init__(
        self, captured: Captured, boundaries: Sequence[int], weights: Mapping[str, Tensor], config: EngineConfig
    ) -> None:
        flow = Flow(captured.train)
        stage_of = assign(flow, boundaries)
        self.stages: tuple[StageGraph, ...] = partition(flow, stage_of)
        eval_flow = Flow(captured.eval)
        self.eval_stages = partition(eval_flow, align(flow, eval_flow, stage_of))
        self.engines = [
            TorchEngine(t, e, config, {k: v.clone() for k, v in weights.items()})
            for t, e in zip(self.stages, self.eval_stages, strict=True)
        ]
        self.columns = {op.target: op.name for op in captured.train.ops if op.kind == "placeholder"}
        self.config = config

    def step(self, number: int, micro_batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
        engines = self.engines
        for owner, engine in enumerate(engines):
            for user in engines:
                names = [n for n, o in user.train.borrows.items() if o == owner]
                user.set_shared(engine.shared_values(names))
        for m, batch in enumerate(micro_batches):
            wire: dict[tuple[Ref, int], Tensor] = {}
            for stage, engine in zip(self.stages, engines, strict=True):
                inputs = {Ref(self.columns[c]): batch[c] for c in stage.columns}
                inputs |= {c.value: wire[c.value, stage.index] for c in stage.receives}
                out = engine.forward(number, m, inputs)
                wire |= {(c.value, c.target): out[c.value] for c in stage.sends}
            back: dict[int, dict[int, dict[Ref, Tensor]]] = {s.index: {} for s in self.stages}
            for stage, engine in reversed(list(zip(self.stages, engines, strict=True))):
                given = [back[stage.index][t] for t in sorted(back[stage.index], reverse=True)]
                gradients = engine.backward(m, given)
                for crossing in stage.receives:
                    if crossing.gradient:
                        back[crossing.source].setdefault(stage.index, {})[crossing.value] = gradients[crossing.value]
        counted = any(s.count is not None for s in self.stages)
        total = sum(e.count for e in engines) if counted else None
        for owner, engine in enumerate(engines):
            shared = [
                user.take_shared_gradients([n for n, o in user.train.borrows.items() if o == owner]) for user in engines
            ]
            engine.collect(total, shared)
        (told,) = [t for e in engines if (t := e.take_loss()) is not None]
        return told[0] / told[1], {n: g for e in engines for n, g in e.gradients().items()}


def batches(columns: Mapping[str, object], count: int, size: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random micro-batches for columns of `ColumnSpec`s with a `limit`."""
    generator = torch.Generator().manual_seed(seed)
    out: list[dict[str, Tensor]] = []
    for _ in range(count):
        batch: dict[str, Tensor] = {}
        for name, column in columns.items():
            shape = (size, *column.shape)  # type: ignore[attr-defined]
            if column.dtype == "float32":  # type: ignore[attr-defined]
                batch[name] = torch.randn(shape, generator=generator)
            else:
                batch[name] = torch.randint(0, getattr(column, "limit", None) or 2, shape, generator=generator)
        out.append(batch)
    return out
