"""Blocks that are alike, exported once: of a long `nn.ModuleList` three periods go through torch's exporter, and the
graph is unrolled to all of them.

An export is a function of the calls to torch that a forward makes. So what is left out is proven by these calls, which
fake tensors run at a fraction of an export's time: those of the whole module, in which each period's calls are the
period's before with other weights, and those of the shortened one, which are the same calls without the middle. A
module of which any of this does not hold is exported as a whole.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import EllipsisType, FrameType, NoneType
from typing import Any, NamedTuple, cast
from unittest import mock

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from isthmus.graph.boundaries import taking
from isthmus.graph.building import named_tensors
from isthmus.graph.capture_errors import LIBRARIES, quiet
from isthmus.graph.opgraph import Op, OpGraph, Ref

MANY = 4099  # samples that the calls are made with: no other number of a model is that one by chance
LONGEST = 6  # blocks of a period, as of Gemma 3
PLAIN = (int, float, complex, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format)
_NODE = re.compile(
    r"(.+?)(?:_(\d+))?((?:_w\d+)*)$"
)  # what it calls, its number among these, what `Writes.new_name` adds


class Unlike(ValueError):
    """Blocks are not alike, or not proven to be; so is any ValueError, as of an index that is not there."""


class Repeats(NamedTuple):
    """A list of `blocks` whose periods of `period` are alike from the second on."""

    parent: nn.Module
    name: str  # of the list in its parent
    path: str  # of the list in the module
    blocks: int
    period: int

    @property
    def kept(self) -> int:
        """Blocks that are exported: three periods, and what is left over at the end."""
        return 3 * self.period + self.blocks % self.period

    @property
    def added(self) -> int:
        """Periods that are left out."""
        return (self.blocks - self.kept) // self.period

    def shortened(self) -> AbstractContextManager[object]:
        """While active, the module has the first `kept` blocks alone."""
        children = self.parent._modules  # pyright: ignore[reportPrivateUsage]
        return mock.patch.dict(children, {self.name: cast(nn.ModuleList, children[self.name])[: self.kept]})

    def block_of(self, name: str) -> int:
        """The number of the block that a variable or module is of; -1 of none."""
        number = name.removeprefix(f"{self.path}.").partition(".")[0]
        return int(number) if name.startswith(f"{self.path}.") and number.isdecimal() else -1

    def move(self, name: str, periods: int, first: int) -> str:
        """The name of a variable or module so many periods later, if it is of block `first` or one after."""
        number = self.block_of(name)
        if number < first:
            return name
        below = name.removeprefix(f"{self.path}.{number}")
        return f"{self.path}.{number + periods * self.period}{below}"


class _Made(NamedTuple):
    call: int
    output: int


class _Variable(NamedTuple):
    name: str


class _Call(NamedTuple):
    form: object  # what is called, from which line, and with what; tensors are left out of it
    tensors: tuple[_Made | _Variable, ...]  # where these come from, in order


class Calls(TorchFunctionMode):
    """While active, remembers the calls to torch: of what, from which line, and with what, tensors by where they come
    from."""

    def __init__(self, module: nn.Module, columns: Iterable[Tensor], blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.made: list[_Call] = []
        self.comparable = True  # blocks were called one after the other, and with nothing unknown
        self.starts: list[int] = []  # the first call of each block
        self._blocks = {id(block): number for number, block in enumerate(blocks)}
        # With the tensor, so that its identity stays its own.
        self._known: dict[int, tuple[Tensor, _Made | _Variable]] = {}
        for number, column in enumerate(columns):
            self._known[id(column)] = column, _Made(-1, number)
        for name, tensor in named_tensors(module):
            self._known.setdefault(id(tensor), (tensor, _Variable(name)))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = self.described((func, *_line(inspect.currentframe())), (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if tensors or getattr(func, "__name__", "") != "__get__":
            for index, tensor in enumerate(tensors):
                self._known.setdefault(id(tensor), (tensor, _Made(len(self.made), index)))
            self.made.append(given)
        return result

    def entered(self, module: nn.Module, _: object) -> None:
        if id(module) in self._blocks:
            if self._blocks[id(module)] != len(self.starts):
                self.comparable = False
            self.starts.append(len(self.made))

    def described(self, what: tuple[object, ...], given: object) -> _Call:
        """Return a description of a call that can be compared with that of another forward."""
        tensors: list[_Made | _Variable] = []
        form = self._form(given, tensors)
        return _Call((*what, form), tuple(tensors))

    def _form(self, value: object, tensors: list[_Made | _Variable]) -> object:
        if isinstance(value, Tensor) and id(value) in self._known:
            tensors.append(self._known[id(value)][1])
            return Tensor
        if isinstance(value, (list, tuple)):
            return (type(value), *[self._form(v, tensors) for v in value])
        if isinstance(value, dict):
            return (dict, *[self._form(item, tensors) for item in value.items()])
        if isinstance(value, slice):
            return (slice, *[self._form(v, tensors) for v in (value.start, value.stop, value.step)])
        if not isinstance(value, PLAIN):
            self.comparable = False
        return (type(value), repr(value))


def _line(frame: FrameType | None) -> tuple[str, int]:
    """The file and number of the innermost line outside torch and this package."""
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def find_repeats(module: nn.Module, columns: Mapping[str, Tensor], forward: Callable[[], object]) -> Repeats | None:
    """The longest list of blocks, if its middle need not be exported. `forward` runs the module on the columns, which
    are fake, and returns what it gives, or raises Unlike where it changed anything."""
    lists: dict[str, int] = {}  # not those inside of another
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists[path] = len(part)
    path = max(lists, key=lists.__getitem__, default="")
    parent, _, name = path.rpartition(".")
    one = Repeats(module.get_submodule(parent), name, path, lists.get(path, 0), period=1)
    if one.blocks < 2 * one.kept:
        return None
    forms = _forms(module, one)
    with contextlib.suppress(Exception):  # of the user's code: the whole module's export says it, or goes well
        whole = _calls(module, columns, one, forward)
        for period in range(1, LONGEST + 1):
            found = one._replace(period=period)
            if found.blocks >= 2 * found.kept and _is_periodic(whole, forms, found):
                with found.shortened():
                    short = _calls(module, columns, found, forward)
                return found if _is_shortened(short, whole, found) else None
    return None


def _forms(module: nn.Module, found: Repeats) -> list[list[object]]:
    """Return the parts that each block is built of: modules that no block before it has, and tensors."""
    forms: list[list[object]] = [[] for _ in range(found.blocks)]
    parts: list[tuple[str, object]] = [(name, type(part)) for name, part in module.named_modules()]
    parts += [(name, (t.shape, t.stride(), t.dtype, t.requires_grad)) for name, t in named_tensors(module)]
    for name, form in parts:
        if (number := found.block_of(name)) >= 0:
            forms[number].append((name.removeprefix(f"{found.path}.{number}"), form))
    return forms


def _calls(module: nn.Module, columns: Mapping[str, Tensor], found: Repeats, forward: Callable[[], object]) -> Calls:
    """The calls of a forward, as it is under an export. Unlike where blocks are not called one after the other."""
    blocks = getattr(found.parent, found.name)
    calls = Calls(module, columns.values(), blocks)
    exporting = mock.patch.multiple(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True)
    with exporting, quiet(), register_module_forward_pre_hook(calls.entered), calls:
        calls.made.append(calls.described(("returned",), forward()))
    if not calls.comparable or len(calls.starts) != len(blocks):
        raise Unlike
    return calls


def _is_periodic(whole: Calls, forms: Sequence[object], found: Repeats) -> bool:
    """Return whether each period from the third on is the one before with other blocks' variables."""
    period, starts = found.period, whole.starts[:: found.period]
    length, made = starts[2] - starts[1], whole.made
    for number in range(2, found.blocks // period):
        start = starts[number]
        if start - starts[number - 1] != length or start + length > len(made):
            return False
        before, first = starts[number - 2], (number - 1) * period
        for call in range(start, start + length):
            if made[call] != _moved(made[call - length], found, (before, length), (first, 1)):
                return False
    return all(forms[i] == forms[i - period] for i in range(2 * period, found.blocks))


def _is_shortened(short: Calls, whole: Calls, found: Repeats) -> bool:
    """Return whether the calls of the shortened module are those of the whole one without the periods left out."""
    _, second, third = whole.starts[: 3 * found.period : found.period]
    length = third - second
    end, removed = third + length, found.added * length
    rest = [_moved(call, found, (third, removed), (3 * found.period, found.added)) for call in short.made[end:]]
    return short.made[:end] == whole.made[:end] and rest == whole.made[end + removed :]


def _moved(call: _Call, found: Repeats, calls: tuple[int, int], blocks: tuple[int, int]) -> _Call:
    """The call where calls from `calls[0]` on are `calls[1]` later, and blocks from `blocks[0]` on so many periods."""

    def moved(tensor: _Made | _Variable) -> _Made | _Variable:
        if isinstance(tensor, _Variable):
            return _Variable(found.move(tensor.name, blocks[1], blocks[0]))
        return _Made(tensor.call + calls[1], tensor.output) if tensor.call >= calls[0] else tensor

    return _Call(call.form, tuple(map(moved, call.tensors)))


class Unrolled:
    """The graph of the whole module, of that of the shortened one: its operators are those up to the second period,
    that, the third, and the rest.

    `nodes` are the names of all nodes that were exported, in order. Raises Unlike where operators do not repeat as the
    calls do.
    """

    def __init__(self, graph: OpGraph, nodes: Iterable[str], found: Repeats) -> None:
        self._graph, self._found = graph, found
        self._variables = {op.name: op for op in graph.ops if op.kind != "operator"}
        self._ops = [op for op in graph.ops if op.kind == "operator"]
        self._at = {op.name: position for position, op in enumerate(self._ops)}
        blocks, named = [found.block_of(op.module) for op in self._ops], list(nodes)
        self._starts = [blocks.index(found.period * number) for number in range(3)]
        self._length = self._starts[2] - self._starts[1]
        second, third = (self._ops[start].name for start in self._starts[1:])
        if self._starts[2] + self._length > len(self._ops) or any(op.mutates for op in self._ops):
            raise Unlike
        self._each = Counter(_NODE.sub(r"\1", node) for node in named[named.index(second) : named.index(third)])

    def graph(self) -> OpGraph:
        period, added, (first, second, third) = self._found.period, self._found.added, self._starts
        end, ops = third + self._length, self._ops
        if [self._later(op, 1, period, first) for op in ops[second:third]] != ops[third:end]:
            raise Unlike
        loss, count, outputs = self._graph.loss, self._graph.count, self._graph.outputs
        results = [ref for ref in (loss, count, *outputs.values()) if ref is not None]
        taken = [*results, *(ref for op in ops[end:] for ref in op.refs())]
        if any(second <= self._at.get(ref.op, 0) < third for ref in taken):
            raise Unlike
        last = {ref: self._ref(ref, added, 3 * period, third) for ref in results}
        made = [*self._inputs(), *ops[:end]]
        for periods in range(1, added + 1):
            made += [self._later(op, periods, 2 * period, second) for op in ops[third:end]]
        made += [self._later(op, added, 3 * period, third) for op in ops[end:]]
        if len({op.name for op in made}) < len(made):
            raise Unlike
        outputs = {name: last[ref] for name, ref in outputs.items()}
        made_of = {"ops": tuple(made), "loss": last[loss], "count": count and last[count], "outputs": outputs}
        return msgspec.structs.replace(self._graph, **made_of)

    def _inputs(self) -> list[Op]:
        """Parameters and then the others, each in the module's order."""
        period, added, made = self._found.period, self._found.added, list[Op]()
        for are_parameters in (True, False):
            group = [op for op in self._variables.values() if (op.kind == "parameter") is are_parameters]
            third = [op for op in group if 2 * period <= self._found.block_of(op.target) < 3 * period]
            for op in group:
                made.append(self._variable(op, added, 3 * period))
                if third and op is third[-1]:
                    made += [self._variable(t, n, 2 * period) for n in range(1, added + 1) for t in third]
        return made

    def _variable(self, op: Op, periods: int, block: int) -> Op:
        target = self._found.move(op.target, periods, block)
        if target == op.target:
            return op
        old, new = (re.sub("[^a-z0-9]", "_", name.lower()) for name in (op.target, target))
        if not op.name.endswith(old):
            raise Unlike
        return msgspec.structs.replace(op, name=op.name.removesuffix(old) + new, target=target)

    def _later(self, op: Op, periods: int, block: int, floor: int) -> Op:
        """The operator so many periods later: so are the blocks from `block` on, and operators from `floor` on."""
        op = taking(op, {ref: self._ref(ref, periods, block, floor) for ref in op.refs()})
        name, module = self._renamed(op.name, periods), self._found.move(op.module, periods, block)
        return msgspec.structs.replace(op, name=name, module=module)

    def _ref(self, ref: Ref, periods: int, block: int, floor: int) -> Ref:
        if ref.op in self._variables:
            return Ref(self._variable(self._variables[ref.op], periods, block).name, ref.index)
        position = self._at[ref.op]
        if position < floor:
            return ref
        if position < self._starts[1]:  # of the second period: the first may have more nodes
            return Ref(self._ops[position + self._length].name, ref.index)
        return Ref(self._renamed(ref.op, periods), ref.index)

    def _renamed(self, name: str, periods: int) -> str:
        kind, number, rest = _NODE.findall(name)[0]
        later = int(number or 0) + periods * self._each[kind]
        return f"{kind}_{later}{rest}" if later else name
