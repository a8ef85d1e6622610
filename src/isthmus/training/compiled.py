"""A stage's operators compiled by `torch.compile`, in the runs between those that draw random numbers, where a
measurement on its device says that it is quicker.

Random operators are called as they are, so that they draw what they draw anywhere. All others of a run become one
function: its results differ from the operators' own by rounding, since kernels are joined and sums are ordered
otherwise.
"""

from __future__ import annotations

import importlib
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from isthmus.accelerators.copies import to_device
from isthmus.graph.operators import overload_of
from isthmus.graph.opgraph import Ref
from isthmus.training.engine import TorchEngine
from isthmus.training.faults import is_drivers, is_short_of_memory
from isthmus.training.program import Program, Slot, Step
from isthmus.units import format_duration

Backend = str | Callable[..., object]  # a backend of torch.compile, by name or as a function
Compiler = Callable[[fx.Graph], Callable[..., Sequence[Tensor]]]
"""Compiles a graph of operators. A node's `meta["dtypes"]` has the types of its results."""
Values = dict[Ref, Tensor]
CLONE = torch.ops.aten.clone.default
DETACH = torch.ops.aten.detach.default
_Arguments = list[Argument]
_Named = dict[str, Argument]


class _Segment(NamedTuple):
    steps: tuple[Step, ...]
    call: Callable[..., Sequence[Tensor]]
    takes: tuple[Ref, ...]
    gives: tuple[Ref, ...]
    last_use: tuple[Ref, ...]


class CompiledProgram:
    """A `Program` for the same values."""

    def __init__(
        self, program: Program, compiler: Compiler | None = None, joins: Callable[[Step], bool] | None = None
    ) -> None:
        """`compiler` makes one function of operators in a row that `joins` allows; by default torch does. Nothing is
        compiled before the first run.

        (Rejected: CUDA graphs, as by mode="reduce-overhead". While a stream is captured no other thread may allocate on
        the device or ask for an event, and the links' threads do both; and a graph writes each micro-batch's results
        where the last one's are, which may wait for their backward.)
        """
        self._parts: list[_Segment | Step] = []
        for joined, steps in groupby(program.steps, key=joins or _is_joined):
            found = tuple(steps)
            self._parts += [_compiled(found, compiler or by_torch())] if joined else found
        self._program = program

    def run(self, values: Values, step: int, micro_batch: int) -> Values:
        """StepError as `Program.run`; what torch's compiler raises by itself is raised as it is."""
        for part in self._parts:
            if isinstance(part, Step):
                self._program.call(part, values, step, micro_batch)
                continue
            try:
                results = part.call(*(values[ref] for ref in part.takes))
            except Exception as e:
                if not (is_short_of_memory(e) or is_drivers(e)):
                    for one in part.steps:  # an error of the job's is raised here, with the operator's name
                        self._program.call(one, values, step, micro_batch)
                raise
            values.update(zip(part.gives, results, strict=True))
            for ref in part.last_use:
                values.pop(ref, None)
        return values


def _is_joined(step: Step) -> bool:
    """Not those that draw, nor those that look at values before they call a kernel that trusts them."""
    return isinstance(step.call, OpOverload) and step.target != "" and not step.random


def by_torch(backend: Backend = "inductor") -> Compiler:
    def compiled(graph: fx.Graph) -> Callable[..., Sequence[Tensor]]:
        module = fx.GraphModule(torch.nn.Module(), graph)
        # Not fullgraph: errors of compiled code, those of memory too, would be hidden behind one of the compiler's.
        return cast("Callable[..., Sequence[Tensor]]", torch.compile(module, backend=backend, dynamic=False))

    return compiled


def _compiled(steps: tuple[Step, ...], compiler: Compiler) -> _Segment:
    graph, takes, gives = _graph_of(steps)
    ended = {ref for step in steps for ref in step.last_use}
    return _Segment(steps, compiler(graph), takes, gives, tuple(ended & set(takes)))


def _graph_of(steps: Sequence[Step]) -> tuple[fx.Graph, tuple[Ref, ...], tuple[Ref, ...]]:
    """Return the steps' graph, the values of others that it takes, and its own values that outlive it."""
    graph, nodes = fx.Graph(), dict[Ref, fx.Node]()
    made = {Ref(step.name, index) for step in steps for index in range(len(step.dtypes))}
    takes = tuple(dict.fromkeys(ref for step in steps for ref in _refs([step.args, step.kwargs]) if ref not in made))
    written = tuple(dict.fromkeys(ref for step in steps for ref in step.writes if ref in takes))
    for number, ref in enumerate(takes):
        nodes[ref] = graph.placeholder(f"value_{number}")
    for ref in written:
        # a buffer's new value goes out: of one that is changed in place, torch's backward may read the value after
        nodes[ref] = graph.call_function(CLONE, (nodes[ref],))
    for step in steps:
        args, kwargs = (_filled(part, nodes) for part in (step.args, step.kwargs))
        overload = overload_of(step.target)
        result = graph.call_function(overload, tuple(cast(_Arguments, args)), cast(_Named, kwargs))
        result.meta["dtypes"] = step.dtypes
        single = [str(r.type) for r in overload._schema.returns] == ["Tensor"]  # pyright: ignore[reportPrivateUsage]
        for index in range(len(step.dtypes)):
            one = result if single else graph.call_function(operator.getitem, (result, index))
            # without gradient, as `Program` calls them
            nodes[Ref(step.name, index)] = graph.call_function(DETACH, (one,)) if step.quiet else one
    ended = {ref for step in steps for ref in step.last_use}
    gives = (*written, *(ref for ref in nodes if ref in made and ref not in ended))
    graph.output(tuple(nodes[ref] for ref in gives))
    return graph, takes, gives


def _refs(value: object) -> Iterator[Ref]:
    match value:
        case Slot(ref):
            yield ref
        case list():
            for one in cast("list[object]", value):
                yield from _refs(one)
        case dict():
            yield from _refs(list(cast("dict[str, object]", value).values()))
        case _:
            pass


def _filled(value: object, nodes: Mapping[Ref, fx.Node]) -> object:
    match value:
        case Slot(ref):
            return nodes[ref]
        case list():
            return [_filled(one, nodes) for one in cast("list[object]", value)]
        case dict():
            return {key: _filled(one, nodes) for key, one in cast("dict[str, object]", value).items()}
        case _:
            return value


_ONE_AT_A_TIME = threading.Lock()  # the stages of one device are measured one at a time: each has the device to itself
PASSES = 3  # passes of each way to compute, in turn; the quickest counts


def compile_where_it_pays(engine: TorchEngine, columns: Mapping[Ref, Tensor], backend: Backend = "inductor") -> str:
    """Compile the engine's training program, time forward and backward of a micro-batch both ways, and keep the
    quicker. Weights, buffers, gradients and random generators stay as they are. Return one line for people: whether it
    is compiled, and why.

    `columns` are those of the stage, of one micro-batch; what other stages send is made up. A stage that cannot be
    compiled computes as before, and the line says why. An error of the accelerator's driver is raised.
    """
    with _ONE_AT_A_TIME:
        note = _chosen(engine, columns, backend)
    engine.accelerator.release_cached()  # what compiling took is no part of what the stage takes
    engine.accelerator.reset_peak()
    return note


def _chosen(engine: TorchEngine, columns: Mapping[Ref, Tensor], backend: Backend) -> str:
    started_s = time.perf_counter()
    # Imported when it is needed: with it comes torch's compiler, for seconds.
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.compile_threads = 1  # others are processes that outlive this one, or forks of a process with threads
    batch = {**made_up(engine), **columns}
    try:
        compiled = CompiledProgram(engine.eager, by_torch(backend))
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
        return f"not compiled: {why}"
    times = f"{format_duration(taken[True])} per micro-batch, {format_duration(taken[False])} without"
    if taken[True] >= taken[False]:
        return f"not compiled: it would take {times}"
    engine.program = compiled
    return f"compiled in {format_duration(compile_s)}: {times}"


def _seconds(engine: TorchEngine, act: Callable[[], object]) -> float:
    engine.accelerator.synchronize()
    started_s = time.perf_counter()
    act()
    engine.accelerator.synchronize()
    return time.perf_counter() - started_s


def made_up(engine: TorchEngine) -> dict[Ref, Tensor]:
    """Make up the values that other stages send in a micro-batch. Whole numbers may be indices: none is too large."""
    draws = torch.Generator().manual_seed(0)
    found: dict[Ref, Tensor] = {}
    for crossing in engine.train.receives:
        dtype: torch.dtype = getattr(torch, crossing.spec.dtype)
        shape = crossing.spec.shape_at(engine.config.micro_batch_size)
        made = torch.randn(shape, generator=draws) if dtype.is_floating_point else torch.zeros(shape)
        found[crossing.value] = to_device(engine.accelerator, made.to(dtype))
    return found
