"""The operator graph (FusionLLM's OP-DAG): what a model computes, free of any framework.

An `OpGraph` lists `Op`s in the order in which the model's own forward runs them. An op names the ops whose
outputs it takes by `Ref`, so the graph is one flat JSON document: `encode` and `decode` are inverse.

Sizes are affine in the batch, `per_sample * batch + fixed`, so that one capture serves every micro-batch size.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from isthmus.reading import parse_json
from isthmus.wire_types import Count, Id, Int64, Many, Name, Table, Text

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

OpKind = Literal["placeholder", "parameter", "buffer", "constant", "operator"]


class Affine(msgspec.Struct, frozen=True, array_like=True, tag="affine"):
    """A quantity that is affine in the batch size: `per_sample * batch + fixed`."""

    per_sample: Int64
    fixed: Int64 = 0

    def at(self, batch: int) -> int:
        return self.per_sample * batch + self.fixed

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.per_sample + other.per_sample, self.fixed + other.fixed)


class Ref(msgspec.Struct, frozen=True, array_like=True, tag="ref"):
    """Output `index` of the op called `op`."""

    op: Text
    index: Count = 0


class Named(msgspec.Struct, frozen=True, array_like=True, tag="named"):
    """A value that JSON has no word for: kind is `dtype`, `device`, `layout`, `memory_format` or `float`."""

    kind: Literal["dtype", "device", "layout", "memory_format", "float"]
    name: Name


class ArgList(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    """A list argument; a struct because a JSON union may hold one array type only."""

    items: Many[Arg]


Arg = None | bool | Int64 | float | Text | Ref | Affine | Named | ArgList
Size = Int64 | Affine


def size_at(size: Size, batch: int) -> int:
    return size.at(batch) if isinstance(size, Affine) else size


def add_sizes(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return (a if isinstance(a, Affine) else Affine(0, a)) + (b if isinstance(b, Affine) else Affine(0, b))


class TensorSpec(msgspec.Struct, frozen=True):
    """Type, shape and memory layout of one tensor. Strides count elements, as in torch."""

    dtype: Id
    shape: Many[Size]
    stride: Many[Size]

    def shape_at(self, batch: int) -> tuple[int, ...]:
        return tuple(size_at(s, batch) for s in self.shape)

    def stride_at(self, batch: int) -> tuple[int, ...]:
        return tuple(size_at(s, batch) for s in self.stride)

    def nbytes(self, batch: int) -> int:
        """Bytes of the tensor's elements at this batch size, whatever its strides."""
        return math.prod(self.shape_at(batch)) * DTYPE_BYTES[self.dtype]


class Op(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node of the graph.

    `target` is the operator (`aten.linear.default`), the module's own name of a parameter or buffer, or the
    batch column that a placeholder takes. `requires_grad` holds one flag per output. FLOPs count a
    multiply-add as two; element-wise work counts one per element.
    """

    name: Text
    kind: OpKind
    target: Text
    args: Many[Arg] = ()
    kwargs: Table[Name, Arg] = {}
    outputs: Many[TensorSpec] = ()
    requires_grad: Many[bool] = ()
    module: Text = ""  # path of the submodule whose forward calls it; empty for the model itself
    source: Text = ""  # for people: that module's class, and the line of its author's, as "Head, model.py:12"
    flops_forward: Affine = Affine(0)
    flops_backward: Affine = Affine(0)
    saved_bytes: Affine = Affine(0)  # bytes that autograd keeps from this op's forward until its backward
    working_bytes: Affine = Affine(0)
    """Most bytes that its forward or its backward needs besides: what it takes and gives that nothing keeps, the
    gradients of both, a parameter's among them, and what is made in between."""
    random: bool = False
    mutates: Many[Text] = ()  # names of the buffer ops that this op writes in place
    written: bool = False
    """For a buffer: whether the train graph writes it, so that only the stage that does has its value."""

    @property
    def learns(self) -> bool:
        """Return whether training changes this variable."""
        return self.written or (self.kind == "parameter" and any(self.requires_grad))

    def refs(self) -> list[Ref]:
        """Every `Ref` among the arguments, in order, repeats included."""
        found: list[Ref] = []
        for arg in (*self.args, *self.kwargs.values()):
            _collect(arg, found)
        return found


def _collect(arg: Arg, found: list[Ref]) -> None:
    if isinstance(arg, Ref):
        found.append(arg)
    elif isinstance(arg, ArgList):
        for item in arg.items:
            _collect(item, found)


class OpGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A captured model: ops in execution order, and which outputs matter.

    `loss` is a scalar. With `count`, `loss` is a sum over `count` items (tokens, say) and the loss of a step is
    the quotient of both sums over its micro-batches; without, it is the mean over micro-batches.
    """

    name: str
    mode: Literal["train", "eval"]
    ops: tuple[Op, ...]
    loss: Ref
    count: Ref | None = None
    outputs: dict[str, Ref] = {}
    batch: int | None = None  # the only batch size at which the graph is valid, or None when every size is
    schemas: dict[str, str] = {}
    """Schemas by target, of the torch that captured the graph; empty where no torch captured it."""

    def op(self, name: str) -> Op:
        for op in self.ops:
            if op.name == name:
                return op
        raise KeyError(name)

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that training changes, in the module's own order: that of a sum over all of them."""
        return tuple(o.target for o in self.ops if o.kind == "parameter" and any(o.requires_grad))

    @property
    def parameter_bytes(self) -> int:
        return sum(o.outputs[0].nbytes(1) for o in self.ops if o.kind == "parameter")


def encode(graph: OpGraph) -> bytes:
    """JSON text of the graph."""
    return msgspec.json.encode(graph)


def decode(text: bytes) -> OpGraph:
    """The graph of a JSON text; UserError when it is not one."""
    return parse_json(text, OpGraph, "operator graph")
