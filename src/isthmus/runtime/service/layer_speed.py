"""How fast the first layers of a job's model are computed here: as a stage of a run, forward and backward.

Weights and batches are made up here. What a coordinator sends is the stage's graph: its operators are on the allow-list
(`Program`), and the process that computes it has a bound on memory and time.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping

import msgspec
import torch
from torch import Tensor

from isthmus.accelerators import Accelerator
from isthmus.accelerators.copies import to_device
from isthmus.engines import EngineName
from isthmus.errors import IsthmusError
from isthmus.graph import Op, Ref, StageGraph
from isthmus.runtime.messages.probe import LayerTrial, SpeedSample, SyntheticColumn
from isthmus.runtime.service.probe_results import extent
from isthmus.training.engine import TorchEngine
from isthmus.training.faults import is_drivers, is_short_of_memory
from isthmus.training.jax import compute_by_jax
from isthmus.units import format_size

ENOUGH_S = 0.5  # the next stage, of twice the work, is not tried after one that takes this long
_NOTHING = StageGraph(index=0, ops=(), columns=(), receives=(), sends=(), shared_from={}, shared_with={})
Timer = Callable[[Callable[[], object]], float]  # seconds that something takes on the accelerator


def measure_layers(
    accelerator: Accelerator,
    trial: LayerTrial,
    seconds: Timer,
    offered_bytes: int | None = None,
    engine: EngineName = "torch",
) -> tuple[SpeedSample | None, str]:
    """Measure the longest stage that fits and comes soon enough; return its speed, and why there is no longer one,
    unless that is for lack of time. `offered_bytes` are those of the memory that the owner gives."""
    found: SpeedSample | None = None
    for layers in trial.layers:
        these = extent(layers.operators, trial.operators)
        needed, free = layers.memory_bytes, _free_bytes(accelerator, offered_bytes)
        if needed > free:
            return found, f"{these} take {format_size(needed)}, {format_size(free)} are free"
        try:
            taken_s = _taken_s(accelerator, trial, layers.stage, seconds, engine)
        except Exception as e:
            if is_drivers(e):
                raise
            short, text = is_short_of_memory(e), " ".join(str(e).split())[:200]
            text = "out of memory" if short else text if isinstance(e, IsthmusError) else f"{type(e).__name__}: {text}"
            return found, f"{these}: {text}"
        finally:
            gc.collect()
            accelerator.release_cached()
        found = SpeedSample(
            what="layers",
            precision=trial.precision,
            operators=layers.operators,
            seconds=taken_s,
            flops=layers.flops.at(trial.engine.micro_batch_size),
        )
        if taken_s >= ENOUGH_S:
            break
    return found, ""


def _free_bytes(accelerator: Accelerator, offered_bytes: int | None) -> int:
    memory = accelerator.memory()
    free = memory.free + (memory.reserved - memory.allocated if accelerator.asynchronous else 0)
    return free if offered_bytes is None else min(free, offered_bytes)


def _taken_s(accelerator: Accelerator, trial: LayerTrial, stage: StageGraph, seconds: Timer, name: EngineName) -> float:
    """Return the seconds of a micro-batch's forward and backward."""
    engine = TorchEngine(stage, _NOTHING, trial.engine, _MadeUp(accelerator, stage), accelerator=accelerator)
    columns = (trial.columns[name] for name in stage.columns)
    batch = {Ref(c.op): to_device(accelerator, _made_up(c, trial.engine.micro_batch_size)) for c in columns}
    if name == "jax":
        compute_by_jax(engine, batch)
    due = {c.value for c in stage.sends if c.gradient}

    def act() -> None:
        sent = engine.forward(0, 0, batch)
        engine.backward(0, [{ref: torch.ones_like(value) for ref, value in sent.items() if ref in due}])

    return seconds(act)


def _made_up(column: SyntheticColumn, size: int) -> Tensor:
    dtype, shape = _dtype(column.spec.dtype), column.spec.shape_at(size)
    draws = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draws).to(dtype)
    return torch.randint(0, column.limit or 1, shape, generator=draws).to(dtype)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


class _MadeUp(Mapping[str, Tensor]):
    """Values of a stage's variables, each made when it is asked for: there is no second copy of the weights."""

    def __init__(self, accelerator: Accelerator, stage: StageGraph) -> None:
        self._accelerator = accelerator
        self._ops = {op.target: op for op in stage.variables()}

    def __getitem__(self, name: str) -> Tensor:
        return _value(self._ops[name], self._accelerator.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)


def _value(op: Op, device: torch.device) -> Tensor:
    """Such that a value keeps its size from layer to layer: numbers near zero take a CPU far longer. Whole numbers may
    be indices: none is too large."""
    dtype, shape = _dtype(op.outputs[0].dtype), op.outputs[0].shape_at(1)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).mul_(math.prod(shape[1:]) ** -0.5).to(dtype)


def share_of(trial: LayerTrial, ranks: int) -> LayerTrial:
    """Return the trial of one of so many ranks: its share of a micro-batch, where the graph and the size let it be
    shared."""
    size, rest = divmod(trial.engine.micro_batch_size, ranks)
    if rest or not trial.any_batch:
        return trial
    return msgspec.structs.replace(trial, engine=msgspec.structs.replace(trial.engine, micro_batch_size=size))
