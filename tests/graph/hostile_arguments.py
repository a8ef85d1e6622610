"""Arguments that a hostile graph might give to an operator, drawn from a seed.

A call is one of `operator_calls.json` with some of its arguments replaced, or made up from the operator's schema.
Tensors come in every type and layout that other operators of a graph can make: transposed, with gaps, overlapping,
empty, and expanded to sizes beyond any memory.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.graph.operators import overload_of
from isthmus.graph.opgraph import DTYPE_BYTES, Arg, ArgList, Named, Op, Ref

CALLS: dict[str, list] = json.loads(Path(__file__).with_name("operator_calls.json").read_text())
DTYPES = tuple(DTYPE_BYTES)
INTEGERS = (-(2**63), 2**63 - 1, 2**62, -(2**62), 2**40, 2**33 + 1, 2**31, -(2**31), 65536, -1, -2, 0, 1, 2, 3, 7)
SIZES = (2**40, 2**33, 2**32, 2**32 + 1, 2**31, 2**31 - 1, 2**24, 65536, 0, 1, 2, 3, -1)
"""Products of some of them are small or negative in 64 or 32 bits."""
LENGTHS = (0, 1, 2, 5, 16, 17, 33, 64, 100)
"""Kernels take other paths beyond the width of a vector."""
FLOATS = (0.0, -0.0, -1.0, 0.5, 2.0, 3.7, 1e30, -1e30, 5e-324, 1e308, 9.3e18, -9.3e18, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    "x",
    "mean",
    "sum",
    "prod",
    "ij,jk",
    "fro",
    "nuc",
    "circular",
    "reflect",
    "replicate",
    "same",
    "valid",
    "floor",
    "trunc",
    "meta",
    "cpu",
    "amax",
    "amin",
    "left",
    "right",
    "linear",
    "nearest",
    "lower",
    "none",
    "tanh",
)
LAYOUTS = ("transposed", "gaps", "expanded", "windows", "offset", "vast")


class Input(NamedTuple):
    """One tensor of a call: the elements of its memory, and how it lies there."""

    memory: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool


class Call:
    """One call of an operator in a graph's JSON form."""

    def __init__(self, target: str, seed: int) -> None:
        self.random = random.Random(f"{target}/{seed}")
        self.inputs: list[Input] = []
        draw = self.random
        self._layouts = draw.choice((0.0, 0.0, 0.2, 0.8))
        self._lengths = {n: draw.choice(LENGTHS) for n in range(200)} if draw.random() < 0.2 else {}
        self._lengths_of_lists = draw.random() < 0.5
        self._types = self._other_types() if draw.random() < 0.25 else {}
        known = CALLS.get(target)
        if known and draw.random() < 0.85:
            self.changes = draw.choice((0.0, 0.05, 0.1, 0.2, 0.3, 0.5))
            args, kwargs = draw.choice(known)
            made, named = [self._known(a) for a in args], {k: self._known(v) for k, v in kwargs.items()}
        else:
            made, named = self._from_schema(f"aten.{target}")
        self.op = Op(name="o", kind="operator", target=f"aten.{target}", args=tuple(made), kwargs=named)

    def __str__(self) -> str:
        return f"{self.op.args} {self.op.kwargs} {[(i.memory.dtype, i.shape, i.stride, i.offset) for i in self.inputs]}"

    def _other_types(self) -> dict[str, str]:
        draw = self.random
        floating = [d for d in DTYPES if d.startswith(("float", "bfloat", "complex"))]
        whole = [d for d in DTYPES if d not in floating]
        return {"float32": draw.choice((*floating, *floating, *whole)), "int64": draw.choice((*whole, *DTYPES))}

    def _tensor(self, dtype: str, shape: list[int], given: list | None, *, hostile: bool) -> Ref:
        draw, kind = self.random, getattr(torch, self._types.get(dtype, dtype))
        if self.inputs and draw.random() < 0.03:
            return Ref("t", draw.randrange(len(self.inputs)))
        shape = [self._lengths.get(n, n) for n in shape]
        shape, stride, offset = self._layout(shape)
        span = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
        if span > 1 << 20:
            shape, stride, offset, span = [3], [1], 0, 3
        memory = self._elements(kind, span)
        if given is not None and len(given) == span:
            memory = torch.tensor(given, dtype=kind)
        for _ in range(draw.choice((1, 2, span)) if hostile and span < 1000 else 0):
            memory[draw.randrange(span)] = self._element(kind)
        conjugate = kind.is_complex and draw.random() < 0.2
        self.inputs.append(Input(memory, tuple(shape), tuple(stride), offset, conjugate))
        return Ref("t", len(self.inputs) - 1)

    def _elements(self, kind: torch.dtype, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.random.getrandbits(30))
        if kind.is_floating_point or kind.is_complex:
            return torch.randn(count, generator=generator).to(kind)
        return torch.randint(0, 2 if kind is torch.bool else 3, (count,), generator=generator).to(kind)

    def _layout(self, shape: list[int]) -> tuple[list[int], list[int], int]:
        """A shape, its strides and its offset."""
        draw, order, step = self.random, [*range(len(shape))], 1
        how = draw.choice(LAYOUTS) if draw.random() < self._layouts else None
        if how == "transposed":
            draw.shuffle(order)
        stride = [0] * len(shape)
        for dim in reversed(order):
            stride[dim] = step
            step *= max(shape[dim], 1)
        if shape and how == "gaps":
            stride = [s * draw.choice((1, 2, 3)) for s in stride]
        elif shape and how == "expanded":
            stride[draw.randrange(len(shape))] = 0
        elif shape and how == "windows":
            stride = [min(s, draw.choice((1, 2))) for s in stride]
        elif shape and how == "vast":
            for _ in range(draw.choice((1, 1, 2))):
                dim = draw.randrange(len(shape))
                shape, stride[dim] = [*shape[:dim], draw.choice(SIZES[:7]), *shape[dim + 1 :]], 0
        return shape, stride, draw.choice((1, 5)) if how == "offset" else 0

    def _element(self, kind: torch.dtype) -> Tensor:
        if kind.is_floating_point or kind.is_complex:
            return torch.tensor(self.random.choice(FLOATS), dtype=torch.float64).to(kind)
        return torch.tensor(self.random.choice(INTEGERS)).to(kind)

    def _known(self, given: object) -> Arg:
        """A value of `operator_calls.json`, changed by chance."""
        draw, changed = self.random, self.random.random() < self.changes
        match given:
            case {"t": dtype, "s": shape}:
                return self._known_tensor(str(dtype), [*shape], given.get("v"), changed=changed)
            case {"d": name}:
                return Named("dtype", draw.choice(DTYPES) if changed else str(name))
            case {"m": name}:
                return Named("memory_format", str(name))
            case list():
                return self._known_list(given, changed=changed)
            case bool() if changed:
                return not given
            case int() if changed:
                return draw.choice((*INTEGERS, given - 1, given + 1, given + 2))
            case float() if changed:
                return number(draw.choice(FLOATS))
            case str() if changed:
                return draw.choice(TEXTS)
            case None if changed:
                some = self._tensor(draw.choice(("float32", "int64", *DTYPES)), [3], None, hostile=True)
                return draw.choice((None, True, 0.5, ArgList((1, 2)), some, *INTEGERS))
        return number(given) if isinstance(given, float) else given

    def _known_list(self, given: list, *, changed: bool) -> Arg:
        draw, whole = self.random, all(type(v) is int for v in given)
        if whole and self._lengths_of_lists:
            given = [self._lengths.get(v, v) for v in given]
        if changed and whole and draw.random() < 0.5:
            return ArgList(tuple(draw.choice(SIZES) for _ in given))
        items = [self._known(v) for v in given]
        if changed and items:
            items = draw.choice((items[:-1], [*items, items[-1]], [items[0]] * len(items), []))
        return ArgList(tuple(items))

    def _known_tensor(self, dtype: str, shape: list[int], given: list | None, *, changed: bool) -> Ref:
        draw, how = self.random, self.random.randrange(5) if changed else None
        if how == 0 and shape:
            axis = draw.randrange(len(shape))
            shape[axis] = draw.choice((0, 0, 1, 2, 3, shape[axis] + 1, shape[axis] * 2))
        elif how == 1:
            shape = shape[:-1] if draw.random() < 0.5 else [*shape, draw.choice((0, 1, 2))]
        elif how == 2:
            dtype = draw.choice(DTYPES)
        elif how == 3:
            shape = [draw.choice((0, 1, 2, 3)) for _ in range(draw.randrange(6))]
        return self._tensor(dtype, shape, given, hostile=how == 4)

    def _from_schema(self, target: str) -> tuple[list[Arg], dict[str, Arg]]:
        draw, args, kwargs = self.random, list[Arg](), dict[str, Arg]()
        common = [draw.choice((0, 1, 2, 3, 4)) for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4, 5)))]
        by_position = True
        for argument in overload_of(target)._schema.arguments:
            if argument.has_default_value() and draw.random() < 0.5:
                by_position = False
                continue
            value = self._of_type(str(argument.type), str(argument.real_type), common)
            if by_position and not argument.kwarg_only:
                args.append(value)
            else:
                kwargs[argument.name] = value
        return args, kwargs

    def _of_type(self, kind: str, real: str, common: list[int]) -> Arg:
        draw = self.random
        if kind.startswith("Optional["):
            return None if draw.random() < 0.5 else self._of_type(kind[9:-1], real, common)
        if kind.startswith("List["):
            length = draw.choice((0, 1, 1, 2, 2, 3, 4, 5, 6))
            if kind == "List[int]" and draw.random() < 0.2:
                return ArgList(tuple(draw.choice(SIZES) for _ in range(length)))
            return ArgList(tuple(self._of_type(kind[5:-1], real, common) for _ in range(length)))
        if kind == "Tensor":
            dtype = draw.choices(("float32", "int64", *DTYPES), (8, 5, *[1] * len(DTYPES)))[0]
            shape = common if draw.random() < 0.7 else [draw.choice((0, 1, 2, 3)) for _ in range(draw.randrange(6))]
            return self._tensor(dtype, [*shape], None, hostile=draw.random() < 0.3)
        if draw.random() < 0.9 and kind != "number":
            if "ScalarType" in real:
                return Named("dtype", draw.choice(DTYPES))
            if "MemoryFormat" in real:
                return Named("memory_format", draw.choice(("channels_last", "channels_last_3d", "contiguous_format")))
            if "Layout" in real:
                return Named("layout", "strided")
            if kind == "Device":
                return Named("device", "stage")
        if kind == "int":
            return draw.choice((0, 1, 2, 3, -1)) if draw.random() < 0.6 else draw.choice(INTEGERS)
        numbers = (*FLOATS, *INTEGERS)
        choices: dict[str, tuple[object, ...]] = {"float": FLOATS, "number": numbers, "bool": (True, False)}
        found = draw.choice(choices.get(kind, TEXTS))
        return number(found) if isinstance(found, float) else found


def number(value: float) -> float | Named:
    return value if math.isfinite(value) else Named("float", str(value))
