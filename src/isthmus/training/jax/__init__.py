"""Stages computed by JAX: a table of operators, and a program that runs stretches of them as one compiled function.

Parameters, sums of gradients, optimizers and random numbers stay torch's, so checkpoints, recovery and dropout do not
depend on who computes. JAX is imported when it is needed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.accelerators import Accelerator
from isthmus.extensions import import_extra
from isthmus.graph.opgraph import Ref
from isthmus.training.engine import TorchEngine

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


Function = Callable[..., Sequence[Tensor]]  # a function of tensors, in operators of `torch.ops.aten`


def compute_by_jax(engine: TorchEngine, columns: Mapping[Ref, Tensor]) -> str:
    """Return the same as `program.compute_by_jax`. UserError where JAX is not installed."""
    start: Callable[[TorchEngine, Mapping[Ref, Tensor]], str] = _program(engine.accelerator).compute_by_jax
    return start(engine, columns)


def jax_functions(accelerator: Accelerator) -> Callable[[Function], Function]:
    """Return a function that makes JAX's function of torch's. UserError where JAX is not installed."""
    return _program(accelerator).traced


def _program(accelerator: Accelerator) -> Any:
    _prepare_process(accelerator)
    import_extra("jax", "a device with engine 'jax'")
    return importlib.import_module("isthmus.training.jax.program")


def _prepare_process(accelerator: Accelerator) -> None:
    """Set the environment that JAX reads when it is imported: it shares cores and memory with torch."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if accelerator.device.type == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if torch.get_num_threads() == 1 and ONE_THREAD not in flags:  # a process prepares for each of its stages
        os.environ["XLA_FLAGS"] = f"{flags} {ONE_THREAD}".strip()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "isthmus" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
