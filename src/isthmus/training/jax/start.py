"""A stage's engine goes over to JAX."""

from __future__ import annotations

import time
from collections.abc import Mapping

import jax
from torch import Tensor

from isthmus.graph.opgraph import Ref
from isthmus.training.compiled import made_up
from isthmus.training.engine import TorchEngine
from isthmus.training.jax.program import jax_program, left_to_torch
from isthmus.units import format_duration


def compute_by_jax(engine: TorchEngine, columns: Mapping[Ref, Tensor]) -> str:
    """Compile the engine's training program by a micro-batch of the stage's `columns`, and use it from now on. One
    line for people: how long that took, and which operators torch computes still."""
    program = jax_program(engine.eager)
    started_s = time.perf_counter()
    engine.try_out(program, {**made_up(engine), **columns})
    engine.program = program
    left = left_to_torch(engine.eager)
    others = f"; torch computes {', '.join(left)}" if left else ""
    return f"computed by JAX {jax.__version__}, compiled in {format_duration(time.perf_counter() - started_s)}{others}"
