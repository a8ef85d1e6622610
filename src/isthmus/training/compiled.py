"""A stage's operators compiled by `torch.compile`, in the runs between those that draw random numbers.

Random operators are called as they are, so that they draw what they draw anywhere. All others of a run become one
function: its results differ from the operators' own by rounding, since kernels are joined and sums are ordered
otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from isthmus.graph.opgraph import Ref
from isthmus.training.faults import is_drivers, is_short_of_memory
from isthmus.training.program import Program, Slot, Step

Backend = str | Callable[..., object]
"""Of torch.compile."""
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
    """As `Program`, for the same values."""

    def __init__(self, program: Program, backend: Backend = "inductor") -> None:
        """Nothing is compiled before the first run.

        (Rejected: CUDA graphs, as by mode="reduce-overhead". While a stream is captured no other thread may allocate on
        the device or ask for an event, and the links' threads do both; and a graph writes each micro-batch's results
        where the last one's are, which may wait for their backward.)
        """
        self._parts: list[_Segment | Step] = []
        for joins, steps in groupby(program.steps, key=_is_joined):
            found = tuple(steps)
            self._parts += [_compiled(found, backend)] if joins else found
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
    return isinstance(step.call, OpOverload) and not step.random


def _compiled(steps: tuple[Step, ...], backend: Backend) -> _Segment:
    graph, takes, gives = _graph_of(steps)
    module = fx.GraphModule(torch.nn.Module(), graph)
    # Not fullgraph: errors of compiled code, those of memory too, would be hidden behind one of the compiler's.
    call = torch.compile(module, backend=backend, dynamic=False)
    ended = {ref for step in steps for ref in step.last_use}
    return _Segment(steps, cast("Callable[..., Sequence[Tensor]]", call), takes, gives, tuple(ended & set(takes)))


def _graph_of(steps: Sequence[Step]) -> tuple[fx.Graph, tuple[Ref, ...], tuple[Ref, ...]]:
    """What the steps compute of values that others made, and those of their own that outlive them."""
    graph, nodes = fx.Graph(), dict[Ref, fx.Node]()
    made = {Ref(step.name, index) for step in steps for index in range(step.outputs)}
    takes = tuple(dict.fromkeys(ref for step in steps for ref in _refs([step.args, step.kwargs]) if ref not in made))
    written = tuple(dict.fromkeys(ref for step in steps if (ref := _written(step)) is not None and ref in takes))
    for number, ref in enumerate(takes):
        nodes[ref] = graph.placeholder(f"value_{number}")
    for ref in written:
        # a buffer's new value goes out: of one that is changed in place, torch's backward may read the value after
        nodes[ref] = graph.call_function(CLONE, (nodes[ref],))
    for step in steps:
        args, kwargs = (_filled(part, nodes) for part in (step.args, step.kwargs))
        result = graph.call_function(step.call, tuple(cast(_Arguments, args)), cast(_Named, kwargs))
        single = [str(r.type) for r in cast(OpOverload, step.call)._schema.returns] == ["Tensor"]  # pyright: ignore[reportPrivateUsage]
        for index in range(step.outputs):
            one = result if single else graph.call_function(operator.getitem, (result, index))
            # without gradient, as `Program` calls them
            nodes[Ref(step.name, index)] = graph.call_function(DETACH, (one,)) if step.quiet else one
    ended = {ref for step in steps for ref in step.last_use}
    gives = (*written, *(ref for ref in nodes if ref in made and ref not in ended))
    graph.output(tuple(nodes[ref] for ref in gives))
    return graph, takes, gives


def _written(step: Step) -> Ref | None:
    """The buffer that an operator changes in place."""
    arguments = cast(OpOverload, step.call)._schema.arguments  # pyright: ignore[reportPrivateUsage]
    writes = bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write
    return step.args[0].ref if writes and step.args and isinstance(step.args[0], Slot) else None


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
