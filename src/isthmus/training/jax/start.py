"""A stage's engine goes over to JAX."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import jax
from jax import monitoring
from torch import Tensor

from isthmus.errors import UserError
from isthmus.graph.opgraph import Ref
from isthmus.training.compiled import made_up
from isthmus.training.engine import TorchEngine
from isthmus.training.jax.program import jax_program, without_entry
from isthmus.units import format_duration

HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
_events = Counter[str]()  # cache hits and misses of this process
monitoring.register_event_listener(lambda event, **_: _events.update([event]))


def compute_by_jax(engine: TorchEngine, columns: Mapping[Ref, Tensor]) -> str:
    """Compile the engine's training program by a micro-batch of the stage's `columns`, and use it from now on; the
    evaluation program is compiled by the first evaluation. One line for people: how long that took, and how much of the
    code was kept on disk. UserError for operators without an entry in the table."""
    if lacked := without_entry(engine.eager):
        raise UserError(f"engine: JAX has no entry for {', '.join(lacked)}: expected engine 'torch' for this stage")
    program = jax_program(engine.eager)
    started_s, before = time.perf_counter(), _events.copy()
    engine.try_out(program, {**made_up(engine), **columns})
    engine.program = program
    engine.evaluation_program = jax_program(engine.eager_evaluation)
    taken, found = format_duration(time.perf_counter() - started_s), _events - before
    return (
        f"computed by JAX {jax.__version__}, compiled in {taken}; "
        f"{found[HIT]} of {found[HIT] + found[MISS]} functions were compiled before and kept"
    )
