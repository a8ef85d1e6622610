"""Whether a stage computes compiled: where a measurement on its device says that it is quicker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import torch
from torch import Tensor
from torch._inductor import config as inductor

from isthmus.accelerators.copies import to_device
from isthmus.graph.opgraph import Ref
from isthmus.training.compiled import Backend, CompiledProgram
from isthmus.training.engine import TorchEngine
from isthmus.training.faults import is_drivers, is_short_of_memory
from isthmus.units import format_duration

_ONE_AT_A_TIME = threading.Lock()
"""Of the stages of one device: what is measured has the device to itself."""
PASSES = 3
"""Of each way to compute, in turn; the quickest counts."""


class CompileChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage computes from here on, and why."""

    compiled: bool
    note: str
    """One line for people."""


def compile_where_it_pays(
    engine: TorchEngine, columns: Mapping[Ref, Tensor], backend: Backend = "inductor"
) -> CompileChoice:
    """Compile the engine's training program, time forward and backward of a micro-batch both ways, and keep the
    quicker. Weights, buffers, gradients and random generators stay as they are.

    `columns` are those of the stage, of one micro-batch; what other stages send is made up. A stage that cannot be
    compiled computes as before, and the note says why. An error of the accelerator's driver is raised.
    """
    with _ONE_AT_A_TIME:
        choice = _chosen(engine, columns, backend)
    engine.accelerator.release_cached()  # what compiling took is no part of what the stage takes
    engine.accelerator.reset_peak()
    return choice


def _chosen(engine: TorchEngine, columns: Mapping[Ref, Tensor], backend: Backend) -> CompileChoice:
    started_s = time.perf_counter()
    inductor.compile_threads = 1  # others are processes that outlive this one, or forks of a process with threads
    batch = {**_made_up(engine), **columns}
    try:
        compiled = CompiledProgram(engine.eager, backend)
        engine.try_out(compiled, batch)
        engine.accelerator.synchronize()
        compile_s = time.perf_counter() - started_s
        taken = {False: float("inf"), True: float("inf")}
        for _ in range(PASSES):
            for joined, program in ((False, engine.eager), (True, compiled)):
                taken[joined] = min(taken[joined], _seconds(engine, partial(engine.try_out, program, batch)))
    except Exception as e:
        if is_drivers(e):
            raise
        why = "out of memory" if is_short_of_memory(e) else f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        return CompileChoice(compiled=False, note=f"not compiled: {why}")
    times = f"{format_duration(taken[True])} per micro-batch, {format_duration(taken[False])} without"
    if taken[True] >= taken[False]:
        return CompileChoice(compiled=False, note=f"not compiled: it would take {times}")
    engine.program = compiled
    return CompileChoice(compiled=True, note=f"compiled in {format_duration(compile_s)}: {times}")


def _seconds(engine: TorchEngine, act: Callable[[], object]) -> float:
    engine.accelerator.synchronize()
    started_s = time.perf_counter()
    act()
    engine.accelerator.synchronize()
    return time.perf_counter() - started_s


def _made_up(engine: TorchEngine) -> dict[Ref, Tensor]:
    """Whole numbers may be indices: none is too large."""
    draws = torch.Generator().manual_seed(0)
    found: dict[Ref, Tensor] = {}
    for crossing in engine.train.receives:
        dtype: torch.dtype = getattr(torch, crossing.spec.dtype)
        shape = crossing.spec.shape_at(engine.config.micro_batch_size)
        made = torch.randn(shape, generator=draws) if dtype.is_floating_point else torch.zeros(shape)
        found[crossing.value] = to_device(engine.accelerator, made.to(dtype))
    return found
