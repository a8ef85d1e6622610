"""A stretch of a stage's operators as one function that JAX compiles, forward and backward.

The forward is `jax.jit` of `jax.vjp`: it returns the results, and what the backward needs. Tensors pass between torch
and JAX by dlpack, without copies where memory is aligned for JAX. Torch's autograd sees one operator per stretch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from jax import Array, monitoring
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from isthmus.errors import UserError
from isthmus.graph.opgraph import Ref
from isthmus.training.compiled import CompiledProgram, made_up
from isthmus.training.engine import TorchEngine
from isthmus.training.jax.arrays import Operator, asking, dtype_of
from isthmus.training.jax.elementwise import ELEMENTWISE
from isthmus.training.jax.layers import LAYERS
from isthmus.training.jax.layouts import LAYOUTS
from isthmus.training.jax.losses import LOSSES
from isthmus.training.jax.names import base_name, is_computed
from isthmus.training.jax.reductions import REDUCTIONS
from isthmus.training.program import Program, Step
from isthmus.units import format_duration

OPERATORS: Mapping[str, Operator] = {**ELEMENTWISE, **REDUCTIONS, **LAYOUTS, **LAYERS, **LOSSES}
"""Their names are those of `operators.txt`."""


def in_place(operator: OpOverload) -> bool:
    """Return whether it writes its first argument."""
    arguments = operator._schema.arguments  # pyright: ignore[reportPrivateUsage]
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


jax.config.update("jax_enable_x64", True)  # else whole numbers of 64 bits are cut
jax.config.update("jax_default_matmul_precision", "highest")  # as torch's float32 products


def joins(step: Step) -> bool:
    """Not operators that draw: torch draws the same numbers for them anywhere."""
    return step.target != "" and not step.random and is_computed(step.target)


def jax_program(program: Program) -> CompiledProgram:
    """The program, computed by JAX. Operators that draw, and those without an entry in the table, are torch's."""
    return CompiledProgram(program, JaxFunction, joins)


def without_entry(program: Program) -> tuple[str, ...]:
    """Operators that JAX does not compute, sorted; those that draw are no news."""
    return tuple(
        sorted({step.described.partition(" ")[0] for step in program.steps if not (step.random or joins(step))})
    )


def traced(function: Callable[..., Sequence[Tensor]]) -> JaxFunction:
    """A function of operators of `torch.ops.aten`, by JAX."""
    return JaxFunction(fx.Tracer().trace(function))


class JaxFunction:
    """Tensors in the order of the graph's placeholders to those of its output."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._forwards: dict[tuple[bool, ...], Callable[..., tuple[list[Array], tuple[list[Array], Array], Any]]] = {}
        self.floating: tuple[bool, ...] = ()
        """Which results are floating point; found while the first forward is traced."""
        self._asks = False  # whether an operator asks something of values: found likewise
        self._without: Callable[..., tuple[tuple[Array, ...], Array]] = jax.jit(self._interpret)
        self._backward: Callable[[Any, list[Array]], tuple[Array, ...]] = jax.jit(lambda vjp, given: vjp(given))

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """IndexError where torch would refuse an operator's arguments for their values."""
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return cast("tuple[Tensor, ...]", _Differentiated.apply(self, *tensors))
        results, right = self._without(*_arrays(tensors))
        self._check(right)
        return _tensors(results)

    def forward(self, needs: tuple[bool, ...], arrays: Sequence[Array]) -> tuple[list[Array | None], Any]:
        """Results in order, and what `backward` takes. Those without a gradient are not differentiated."""
        if needs not in self._forwards:
            self._forwards[needs] = jax.jit(self._differentiated(needs))
        some, (others, right), vjp = self._forwards[needs](*arrays)
        self._check(right)
        left, rest = iter(some), iter(others)
        return [next(left) if floating else next(rest) for floating in self.floating], vjp

    def backward(self, vjp: Any, given: Sequence[Array]) -> Sequence[Array]:
        """Gradients of the inputs that need one, from those of the results of fractions."""
        return self._backward(vjp, list(given))

    def _check(self, right: Array) -> None:
        if self._asks and not bool(right):
            raise IndexError("an index is out of range, or a whole number is divided by 0")

    def _differentiated(self, needs: tuple[bool, ...]) -> Callable[..., Any]:
        def forward(*arrays: Array) -> tuple[list[Array], tuple[list[Array], Array], Any]:
            def of(*chosen: Array) -> tuple[list[Array], tuple[list[Array], Array]]:
                left = iter(chosen)
                results, right = self._interpret(*(next(left) if n else a for n, a in zip(needs, arrays, strict=True)))
                self.floating = tuple(bool(jnp.issubdtype(r.dtype, jnp.floating)) for r in results)
                pairs = list(zip(results, self.floating, strict=True))
                return [r for r, floating in pairs if floating], ([r for r, floating in pairs if not floating], right)

            results, vjp, others = jax.vjp(of, *(a for n, a in zip(needs, arrays, strict=True) if n), has_aux=True)
            return results, others, vjp

        return forward

    def _interpret(self, *arrays: Array) -> tuple[tuple[Array, ...], Array]:
        """Results, and whether torch would compute them."""
        with asking() as asked:
            results = self._called_in_order(arrays)
        self._asks = bool(asked)
        return results, jnp.all(jnp.stack(asked)) if asked else jnp.ones((), bool)

    def _called_in_order(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        found: dict[fx.Node, Any] = {}
        given = iter(arrays)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                found[node] = next(given)
            elif node.op == "call_function":
                found[node] = _called(node, found)
            elif node.op == "output":
                return tuple(found[cast(fx.Node, one)] for one in cast("Sequence[object]", node.args[0]))
        raise AssertionError("a graph has an output")


def _called(node: fx.Node, found: dict[fx.Node, Any]) -> Any:
    args = map_arg(node.args, lambda one: found[one])
    kwargs = map_arg(node.kwargs, lambda one: found[one])
    if not isinstance(node.target, OpOverload):  # one of several results
        return cast("Callable[..., object]", node.target)(*args)
    if node.target is torch.ops.aten.detach.default:
        return jax.lax.stop_gradient(args[0])
    name = base_name(str(node.target))
    result = OPERATORS[name](*args, **cast("Mapping[str, Any]", kwargs))
    if name == "batch_norm":
        result, *running = result
        for place, value in zip(node.args[3:5], running, strict=True):
            if isinstance(place, fx.Node) and node.args[5]:
                found[place] = value.astype(found[place].dtype)
    types = cast("Sequence[torch.dtype] | None", node.meta.get("dtypes"))
    if types is None:  # the copy of a buffer that is written
        return result
    if not isinstance(result, tuple | list):
        result = jnp.asarray(result).astype(dtype_of(types[0]))
        if in_place(node.target):
            found[cast(fx.Node, node.args[0])] = result
        return result
    return tuple(jnp.asarray(r).astype(dtype_of(t)) for r, t in zip(cast("Sequence[Any]", result), types, strict=True))


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: JaxFunction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.needs = tuple(t.requires_grad for t in tensors)
        results, ctx.vjp = call.forward(ctx.needs, _arrays(tensors))
        found = _tensors(cast("Sequence[Array]", results))
        ctx.mark_non_differentiable(*(t for t, floating in zip(found, call.floating, strict=True) if not floating))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: JaxFunction = ctx.call
        given = _arrays([g for g, floating in zip(gradients, call.floating, strict=True) if floating])
        left = iter(_tensors(call.backward(ctx.vjp, given)))
        return (None, *(next(left) if need else None for need in ctx.needs))


def _arrays(tensors: Sequence[Tensor]) -> list[Array]:
    return [jnp.from_dlpack(t.detach().contiguous()) for t in tensors]


def _tensors(arrays: Sequence[Array]) -> tuple[Tensor, ...]:
    """Finished: torch reads them at once."""
    return tuple(torch.from_dlpack(array) for array in jax.block_until_ready(list(arrays)))


HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
_events = Counter[str]()  # cache hits and misses of this process
monitoring.register_event_listener(lambda event, **_: _events.update([event]))


def compute_by_jax(engine: TorchEngine, columns: Mapping[Ref, Tensor]) -> str:
    """Compile the engine's training program by a micro-batch of the stage's `columns`, and use it from now on; the
    evaluation program is compiled by the first evaluation. One line for people: how long that took, and how much of the
    code was kept on disk. UserError for operators without an entry in the table."""
    if lacked := without_entry(engine.eager):
        raise UserError(f"engine: JAX has no entry for {', '.join(lacked)}: expected engine 'torch' for this stage")
    engine.in_own_memory()
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
