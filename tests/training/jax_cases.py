"""Calls of every operator that JAX computes: random points, kinks, ties, zeros, infinities, empty and single elements,
and each option of its schema.

`R` draws real numbers, `V` gives them, `N` gives whole ones and `B` truth values. Real numbers have the type that is
tested; `fixed` ones have no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

INF, NAN = float("inf"), float("nan")


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    values: Any
    """None: drawn."""
    dtype: torch.dtype | None = None
    """None: the tested one."""
    fixed: bool = False


class Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    open: tuple[int, ...] = ()
    """Results that torch leaves open, such as the order of ties."""


def R(*shape: int, fixed: bool = False) -> Tensor:
    return Tensor(shape, None, fixed=fixed)


def V(values: Any, fixed: bool = False, shape: Sequence[int] | None = None) -> Tensor:
    return Tensor(tuple(torch.tensor(values).shape if shape is None else shape), values, fixed=fixed)


def N(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return Tensor(tuple(torch.tensor(values).shape), values, dtype)


def B(values: Any) -> Tensor:
    return Tensor(tuple(torch.tensor(values).shape), values, torch.bool)


def call(*args: Any, open: tuple[int, ...] = (), **kwargs: Any) -> Call:
    return Call(args, kwargs, open)


EDGES = [0.0, -0.0, 1, -1, 0.5, -0.5, 0.25, 2, -2, 3, -3, 6, -6, 1.5, 2.5, -2.5, 7.25, 20, 20.5, -21, 89, -104]
EDGES += [300, -300, 1e-3, -1e-3, 1e-6, 30000, INF, -INF, NAN]
E = V(EDGES)
EMPTY, SINGLE, ONE = V([], shape=(0, 3)), V(0.7), V([[-1.25]])
WHOLE = N([0, 1, -1, 2, -2, 3, 7, -7, 100, -100])
SHORT = N([0, 1, -1, 2, 7, 100, -100, 127, -128], torch.int8)
FLAGS = B([True, False, True])
PLAIN = [call(E), call(R(4, 5)), call(EMPTY), call(SINGLE), call(ONE)]
OF_WHOLE = [call(WHOLE), call(SHORT)]

SMALL = [0.0, -0.0, 1, -1, 2, -2, 0.5, 3.5, 7, -7, 1e-3, INF, -INF, NAN]
PAIRS = list(itertools.product(SMALL, SMALL))
LEFT, RIGHT = V([a for a, _ in PAIRS]), V([b for _, b in PAIRS])
WHOLES = list(itertools.product([0, 1, -1, 2, 7, -7, 100, -100], [1, -1, 2, 3, -3, 7]))
LEFTS, RIGHTS = N([a for a, _ in WHOLES]), N([b for _, b in WHOLES])
ROWS = V([[1, 2, 2, -1], [0, 0, -0.0, 0], [INF, 1, INF, 3], [-INF] * 4, [NAN, 1, NAN, 2], [5, 5, 5, 5]])
FINITE = V([[1, 2, 2, -1], [0, 0, -0.0, 0], [-3, -3, 1, 3], [5, 5, 5, 5], [0, 0, 0, 1e-3]])


def pairs(*more: Call, whole: bool = True) -> list[Call]:
    """Of two tensors: kinks, shapes that are broadcast, promoted types."""
    found = [call(LEFT, RIGHT), call(R(4, 1), R(3)), call(EMPTY, R(3)), call(SINGLE, R(2, 2)), call(ONE, SINGLE)]
    mixed = [call(R(10), WHOLE), call(WHOLE, R(1)), call(LEFTS, RIGHTS), call(N([1, 2, 3], torch.int32), N(4))]
    return found + (mixed if whole else []) + list(more)


def scalars(*values: float, whole: Sequence[int] = (2, -3), first: bool = False, **options: Any) -> list[Call]:
    """Of a tensor and a number."""
    found = [(E, v) for v in values] + [(R(3, 2), values[0]), (EMPTY, values[0])] + [(WHOLE, w) for w in whole]
    return [call(*(reversed(two) if first else two), **options) for two in found]


def along(*more: Call, tensor: Tensor = ROWS) -> list[Call]:
    """`(x, dim, keepdim)`."""
    found = [call(tensor, 1), call(tensor, 0, True), call(R(2, 3, 4), -1), call(R(2, 3, 4), 1, True), call(SINGLE, 0)]
    return [*found, call(V([[0.5]]), 1), *more]


def poolings(dims: int, *, most: bool) -> list[Call]:
    """Ties, windows beyond the end, padding around -inf."""
    shape = (2, 2, *(7, 6)[:dims])
    flat = [1.0, 1, 3, 3, 2, -INF, -INF, -INF] if most else [1.0, 1, 3, 3, 2, -1, 0, 100]
    tied = V([[flat] if dims == 1 else [flat, flat, [0.5] * 8]])
    x = R(*shape)
    found = [call(x, [2]), call(x, [3], [2], [1]), call(R(*shape[1:]), [2], [1]), call(tied, [2], [2], [1])]
    found += [call(tied, [3], [1], [1]), call(V([tied.values[0]] * 2), [2], [3])]
    if most:
        odd = V([[[NAN, 1, 2, NAN, -INF, -INF]] if dims == 1 else [[NAN, 1, 2], [3, -INF, -INF], [NAN, -INF, -INF]]])
        found += [call(x, [3], [2], [1], [2]), call(x, [3], [2], [1], [1], True), call(odd, [2], [1])]
        found += [call(x, [2], [2], [0], [2], True)]
    else:
        found += [
            call(x, [3], [2], [1], True),
            call(x, [3], [2], [1], False, False),
            call(x, [3], [2], [1], True, False),
        ]
        found += [call(R(*shape[:2], *[40] * dims), [40])]
    return found


def attentions() -> list[Call]:
    q, k, v = R(2, 2, 4, 8), R(2, 2, 5, 8), R(2, 2, 5, 8)
    unseen = [[0.0, -INF, 1, -INF, 0], [-INF] * 5, [0, 0, 0, 0, -INF], [-4.0] * 5]
    seen = [[True, False, True, True, False], [False] * 5, [True] * 5, [False, False, False, True, False]]
    found = [call(q, k, v), call(q, k, v, V(unseen)), call(q, k, v, V(unseen, fixed=True)), call(q, k, v, B(seen))]
    found += [call(q, q, q, None, 0.0, True), call(R(3, 8), R(3, 8), R(3, 8)), call(R(2, 1, 8), R(2, 1, 8), R(2, 1, 8))]
    found += [call(q, k, v, scale=0.5), call(R(1, 4, 3, 8), R(1, 2, 3, 8), R(1, 2, 3, 8), enable_gqa=True)]
    return [*found, call(q, k, v, R(2, 1, 4, 5)), call(R(2, 2, 0, 8), k, v)]


def crossings() -> list[Call]:
    x, hard = R(5, 4), N([0, 3, -100, 1, 3])
    tied = V([[0.0, 0, 0, 0], [1, INF, 0, 0], [0, -INF, 0, 0], [1e4, -1e4, 0, 0], [-30, 0, 0, 30]])
    labels, weight = N([0, 1, 0, 1, 0]), V([0.5, 2, 0, 1], fixed=True)
    found = [
        call(one, hard, w, r, -100, s)
        for one in (x, tied)
        for w in (None, weight)
        for r in (0, 1, 2)
        for s in (0.0, 0.1)
    ]
    found += [call(tied, labels), call(R(2, 4, 3), N([[0, 1, 2], [3, 3, 0]]), None, 1, 3), call(R(4), N(2))]
    found += [
        call(x, V([[0.25] * 4, [1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4]]), w, r, -100, s)
        for w in (None, weight)
        for r in (0, 1, 2)
        for s in (0.0, 0.2)
    ]
    return [*found, call(x, N([-100] * 5)), call(x, N([-100] * 5), None, 2)]


def normal(*tail: Any) -> list[Call]:
    """Of layer norm and RMS norm: `tail` follows the weights."""
    rows = V([[1, 2, 3, 4], [5, 5, 5, 5], [0, 0, 0, 0], [1000, -1000, 0.001, 0]])
    found = [call(rows, [4], None, *tail), call(R(3, 4), [4], R(4), *tail), call(R(2, 3, 4), [3, 4], R(3, 4), *tail)]
    return [*found, call(V([[2.0], [0.0]]), [1], None, *tail), call(R(0, 4), [4], R(4), *tail)]


WIDE = V([[300.0, -300, 0.001, 60000], [1e-7, 2e-7, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0], [1, -5, 2, 5], [-5, 5, 1, 0]])
MANY = V([1.0] * 1000)
REAL = ("float64", "float32", "float16", "bfloat16")
LIKE = {"dtype": torch.float64}
CASES: dict[str, list[Call]] = {
    **{
        f"{name}.default": PLAIN + OF_WHOLE
        for name in (
            *("exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "atan"),
            *("tanh", "sigmoid", "erf", "abs", "sign", "square", "floor", "ceil", "round", "neg", "isfinite", "isnan"),
            *("isinf", "relu"),
        )
    },
    **{
        f"{name}.default": PLAIN
        for name in ("log_sigmoid", "relu6", "selu", "silu", "mish", "hardsigmoid", "hardswish")
    },
    "gelu.default": [*PLAIN, *(call(t, approximate="tanh") for t in (E, R(4, 5), EMPTY))],
    "elu.default": [*PLAIN, call(E, 0.5), call(E, 1.5, 2.0), call(R(5), 1.5, 2.0, 3.0)],
    "leaky_relu.default": [*PLAIN, call(E, 0.2), call(E, 0), call(E, -0.5)],
    "hardtanh.default": [*PLAIN, call(E, -2, 3), call(E, 0.5, 0.5), call(E, -1.0, 6.0)],
    "softplus.default": [*PLAIN, call(E, 2), call(E, 0.5, 3), call(E, 1, -1)],
    "round.decimals": [call(E, decimals=2), call(R(5), decimals=-1), call(V([0.125, 2.675, 15, 25, -0.5]), decimals=1)],
    "add.Tensor": pairs(
        call(R(3), R(3), alpha=0.3),
        call(LEFTS, RIGHTS, alpha=3),
        call(FLAGS, FLAGS),
        call(V(30000.0), V(30000.0), alpha=-2.0),
    ),
    "add.Scalar": [*scalars(0.1, 1, INF), call(R(4), 0.1, 3), call(WHOLE, 2, 5), call(N([120], torch.int8), 100)],
    "add_.Tensor": [call(R(3, 4), R(4)), call(R(3), R(3), alpha=0.3), call(N([1, 2]), N([3, 4]))],
    "add_.Scalar": [call(R(3), 0.1), call(R(3), 0.1, 2), call(N([1, 2]), 3)],
    "sub.Tensor": pairs(call(R(3), R(3), alpha=0.3), call(LEFTS, RIGHTS, alpha=3)),
    "sub.Scalar": [*scalars(0.1, 1, INF), call(R(4), 0.1, 3), call(WHOLE, 2, 5), call(SHORT, 100)],
    "sub_.Tensor": [call(R(3, 4), R(4)), call(R(3), R(3), alpha=0.3), call(N([1, 2]), N([3, 4]))],
    "sub_.Scalar": [call(R(3), 0.1), call(R(3), 0.1, 2), call(N([1, 2]), 3)],
    "rsub.Tensor": pairs(
        call(R(3), R(3), alpha=0.3), call(LEFTS, RIGHTS, alpha=3), call(V([1.0, 2]), V([5.0, 5]), alpha=2)
    ),
    "rsub.Scalar": [*scalars(0.1, 1, INF), call(R(4), 0.1, 3), call(WHOLE, 2, 5)],
    "mul.Tensor": pairs(call(FLAGS, FLAGS), call(FLAGS, R(3)), call(N([100, 2], torch.int8), N([2, 100], torch.int8))),
    "mul.Scalar": [*scalars(0.1, 0, INF), call(FLAGS, 2.5), call(FLAGS, 3), call(SHORT, 3)],
    "mul_.Tensor": [call(R(3, 4), R(4)), call(N([1, 2]), N([3, 4]))],
    "mul_.Scalar": [call(R(3), 0.1), call(N([1, 2]), 3)],
    "div.Tensor": pairs(call(WHOLE, N([2])), call(R(3), V([0.0, -0.0, 1e-20]))),
    "div.Scalar": scalars(0.3, 0, INF, 3),
    "div.Tensor_mode": [
        c
        for mode in ("floor", "trunc", None)
        for c in (
            call(LEFT, RIGHT, rounding_mode=mode),
            call(LEFTS, RIGHTS, rounding_mode=mode),
            call(R(3, 1), R(2), rounding_mode=mode),
            call(N([2**62 + 1, -(2**62) - 1]), N([3, 3]), rounding_mode=mode),
        )
    ],
    "div.Scalar_mode": [c for mode in ("floor", "trunc") for c in scalars(0.3, 0, 3, -2.5, rounding_mode=mode)],
    "div_.Tensor": [call(R(3, 4), R(4))],
    "div_.Scalar": [call(R(3), 0.3), call(E, 2)],
    "div_.Tensor_mode": [call(R(3), R(3), rounding_mode=mode) for mode in ("floor", "trunc", None)],
    "div_.Scalar_mode": [call(R(3), 0.3, rounding_mode=mode) for mode in ("floor", "trunc", None)],
    "floor_divide.default": pairs(call(N([-7, 7, -7, 7]), N([2, -2, -2, 2]))),
    "floor_divide.Scalar": scalars(0.3, 0, 3, -2.5),
    "remainder.Tensor": pairs(call(N([-7, 7, -7, 7]), N([2, -2, -2, 2]))),
    "remainder.Scalar": scalars(0.3, 0, 3, -2.5),
    "remainder.Scalar_Tensor": [
        call(7.5, V([2.0, -2, 0.3, INF, -INF, NAN, 0])),
        call(7, N([2, -2, 3])),
        call(-7, N([2, -3])),
    ],
    "pow.Tensor_Scalar": [
        *(call(E, p) for p in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 2.5, 0.0, -3, 4, 1.0, 1 / 3, INF)),
        call(R(4), 2),
        call(R(4), 3.0),
        call(WHOLE, 2),
        call(WHOLE, 0),
        call(WHOLE, 3),
        call(N([1, 2]), 0.5),
        call(EMPTY, 2),
    ],
    "pow.Tensor_Tensor": [
        *pairs(whole=False),
        call(WHOLE, N([3])),
        call(N([1, -1, 2, -2, -1]), N([-1, -3, -1, -2, -2])),
        call(R(3), N([0, 1, 2])),
        call(N([2, 3]), R(2)),
        call(V([0.0, 0]), V([0.0, -1])),
    ],
    "pow.Scalar": [
        *(call(b, E) for b in (2, 0, 1, 0.5, -2, -1.0, INF)),
        call(2, N([0, 1, 5])),
        call(2.5, N([0, 1, -2])),
        call(0, V([0.0, 1])),
    ],
    "lerp.Scalar": [call(LEFT, RIGHT, w) for w in (0.3, 0.5, 0.7, 0, 1)]
    + [call(V([1e8]), V([1.0]), 1.0), call(V([30000.0]), V([1.0]), 0.999), call(R(3, 1), R(2), 0.2)],
    "lerp.Tensor": [call(LEFT, RIGHT, V(w)) for w in (0.3, 0.5, 0.7, 1.0)]
    + [call(R(3, 1), R(2), R(3, 2)), call(V([1e8, -3e4]), V([1.0, 2]), V([1.0, 0.6]))],
    "lerp_.Scalar": [call(R(3), R(3), 0.9), call(R(3), R(3), 0.1)],
    "lerp_.Tensor": [call(R(3), R(3), R(3))],
    "addcmul.default": [
        call(R(2, 3), R(3), R(2, 1)),
        call(R(3), R(3), R(3), value=0.3),
        call(V([1.0, INF, 0]), V([INF, 1, NAN]), V([0.0, -INF, 1])),
        call(WHOLE, WHOLE, N(3), value=2),
    ],
    "addcmul_.default": [call(R(2, 3), R(3), R(2, 1)), call(R(3), R(3), R(3), value=0.3)],
    "addcdiv.default": [
        call(R(2, 3), R(3), R(2, 1)),
        call(R(3), R(3), R(3), value=0.3),
        call(V([1.0, INF, 0]), V([INF, 1, NAN]), V([0.0, -INF, 1])),
    ],
    **{f"{name}.default": pairs(call(FLAGS, FLAGS)) for name in ("maximum", "minimum")},
    "max.other": pairs(),
    "min.other": pairs(),
    "clamp.default": [
        c
        for t in (E, R(4, 5), EMPTY, SINGLE)
        for c in (call(t, -1, 1), call(t, 0.5), call(t, None, 0.5), call(t, 2, -2), call(t, -3.0, 3.0))
    ]
    + [call(WHOLE, -2, 3), call(WHOLE, 0.5), call(SHORT, None, 5), call(E, NAN, 1.0)],
    "clamp.Tensor": [
        call(LEFT, RIGHT),
        call(LEFT, None, RIGHT),
        call(LEFT, RIGHT, V(1.0)),
        call(LEFT, V(0.0), RIGHT),
        call(R(3, 1), R(2), R(3, 2)),
        call(WHOLE, N(-2), N(3)),
        call(WHOLE, R(10)),
    ],
    "clamp_min.default": [call(E, 0.5), call(E, 0), call(WHOLE, 2), call(R(4), 0.1)],
    "clamp_max.default": [call(E, 0.5), call(E, 0), call(WHOLE, 2), call(R(4), 0.1)],
    "clamp_min.Tensor": pairs(),
    "clamp_max.Tensor": pairs(),
    **{
        f"{name}.Tensor": pairs(
            call(FLAGS, FLAGS),
            call(R(3), Tensor((), 0.1, torch.float64)),
            call(Tensor((1,), [0.1], torch.float32), Tensor((), 0.1, torch.float64)),
        )
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    **{
        f"{name}.Scalar": [*scalars(0.1, 1, 0, INF, NAN), call(V([0.1, 0.3]), 0.1), call(WHOLE, 0.5), call(FLAGS, 1)]
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    **{
        f"{name}.default": pairs(call(FLAGS, B([True, True, False])), call(FLAGS, R(3)))
        for name in ("logical_and", "logical_or", "logical_xor")
    },
    "logical_not.default": [call(E), call(FLAGS), call(WHOLE)],
    **{
        f"{name}.Tensor": [
            call(FLAGS, B([True, True, False])),
            call(WHOLE, N([5])),
            call(N([1, 2], torch.int32), N([3, 3])),
            call(FLAGS, N([3, 2, 1])),
        ]
        for name in ("__and__", "__or__", "bitwise_and", "bitwise_or")
    },
    **{
        f"{name}.Scalar": [call(FLAGS, True), call(FLAGS, False), call(WHOLE, 6), call(SHORT, 5)]
        for name in ("__and__", "__or__", "bitwise_and", "bitwise_or")
    },
    **{f"{name}.Scalar_Tensor": [call(True, FLAGS), call(6, WHOLE)] for name in ("bitwise_and", "bitwise_or")},
    "bitwise_not.default": [call(FLAGS), call(WHOLE), call(SHORT)],
    "where.self": [
        call(B([True, False, True]), V([1.0, INF, NAN]), V([NAN, 2, INF])),
        call(B([[True], [False]]), R(3), R(2, 3)),
        call(FLAGS, N([1, 2, 3]), R(3)),
        call(FLAGS, V(1.0), N([1, 2, 3])),
        call(B(True), SINGLE, R(2)),
    ],
    "where.Scalar": [call(FLAGS, 1.5, 0.0), call(FLAGS, 1, 2), call(FLAGS, 1, 0.5)],
    "where.ScalarSelf": [call(FLAGS, 1.5, R(3)), call(FLAGS, 0.1, N([1, 2, 3])), call(FLAGS, -INF, R(3))],
    "where.ScalarOther": [call(FLAGS, R(3), 0.1), call(FLAGS, R(3), -INF), call(FLAGS, N([1, 2, 3]), 5)],
    "masked_fill.Scalar": [
        call(R(2, 3), FLAGS, -INF),
        call(V([NAN, INF, 1.0]), FLAGS, 0.1),
        call(R(3), B([[True, False, False], [False, True, True]]), 2),
        call(N([1, 2, 3]), FLAGS, 7),
        call(EMPTY, FLAGS, 1.0),
    ],
    "masked_fill.Tensor": [
        call(R(2, 3), FLAGS, V(-INF)),
        call(R(2, 3), FLAGS, SINGLE),
        call(N([1, 2, 3]), FLAGS, N(7)),
    ],
    "to.dtype": [
        call(t, getattr(torch, d))
        for t in (V([0.1, -1.5, 2.5, 60000, 0, -0.0]), WHOLE, FLAGS)
        for d in (*REAL, "int64", "int32", "bool")
    ]
    + [call(R(3), torch.float16, True), call(R(3), torch.float32, False, True)],
    "to.other": [
        call(R(3), N([1])),
        call(WHOLE, R(1)),
        call(R(3), R(1), True),
        call(R(3), FLAGS, False, True),
        call(R(3), R(2), memory_format=torch.contiguous_format),
    ],
    "to.device": [
        call(R(3), torch.device("cpu"), torch.float16),
        call(WHOLE, torch.device("cpu"), torch.float32, True),
        call(R(3), torch.device("cpu"), torch.bfloat16, False, True),
    ],
    "to.dtype_layout": [
        call(R(3), dtype=torch.float16),
        call(WHOLE, dtype=torch.float32, non_blocking=True),
        call(R(3), dtype=torch.bfloat16, copy=True),
    ],
    "type_as.default": [
        call(E, R(1)),
        call(WHOLE, R(1)),
        call(V([1.5, -2.5]), N([1])),
        call(R(3), Tensor((1,), [0.0], torch.float64)),
    ],
    "softmax.int": [
        call(ROWS, 1),
        call(ROWS, 0),
        call(R(3, 4), -1),
        call(FINITE, 1, torch.float32),
        call(SINGLE, 0),
        call(EMPTY, 1),
        call(R(0), 0),
        call(V([[1e4, -1e4, 0]]), 1),
        call(ONE, 1),
        call(WHOLE, 0, torch.float32),
    ],
    "log_softmax.int": [
        call(ROWS, 1),
        call(ROWS, 0),
        call(R(3, 4), -1),
        call(FINITE, 1, torch.float32),
        call(SINGLE, 0),
        call(EMPTY, 1),
        call(V([[1e4, -1e4, 0]]), 1),
        call(ONE, 1),
    ],
    "sum.default": [
        *PLAIN,
        call(MANY),
        call(FLAGS),
        call(SHORT),
        call(N([2**31 - 1, 1], torch.int32)),
        call(R(3), dtype=torch.float64),
        call(V([], shape=(0,))),
    ],
    "sum.dim_IntList": [
        *along(),
        call(R(2, 3, 4), [0, 2]),
        call(R(2, 3), []),
        call(R(2, 3), None),
        call(R(2, 3), [1], True, dtype=torch.float64),
        call(FLAGS, [0]),
        call(EMPTY, [0]),
    ],
    "mean.default": [*PLAIN, call(MANY), call(WHOLE, dtype=torch.float32), call(V([], shape=(0,)))],
    "mean.dim": [
        *along(),
        call(R(2, 3, 4), [0, 2]),
        call(R(2, 3), []),
        call(R(2, 3), None),
        call(WHOLE, [0], True, dtype=torch.float32),
        call(EMPTY, [0]),
    ],
    "prod.default": [
        call(V([2.0, 0, 3])),
        call(V([0.0, 0, 3])),
        call(R(4)),
        call(V([], shape=(0,))),
        call(SINGLE),
        call(SHORT),
        call(FLAGS),
        call(V([INF, 2, 0])),
        call(R(3), dtype=torch.float64),
        call(V([1e-3, -1.5])),
    ],
    "prod.dim_int": [
        *along(tensor=V([[1, 2, 2, -1], [0, 2, -0.0, 3], [0, 1, 5, 3], [5, 5, 5, 5]])),
        call(WHOLE, 0),
        call(R(2, 3), 0, dtype=torch.float64),
        call(EMPTY, 0),
    ],
    "cumsum.default": [
        call(ROWS, 1),
        call(R(3, 4), 0),
        call(SINGLE, 0),
        call(EMPTY, 0),
        call(MANY, 0),
        call(WHOLE, 0),
        call(FLAGS, 0),
        call(SHORT, 0),
        call(R(3), 0, dtype=torch.float64),
    ],
    **{
        f"{name}.default": [
            call(FINITE),
            call(R(3, 4), False),
            call(R(5)),
            call(SINGLE),
            call(SINGLE, False),
            call(V([2.0, 2, 2])),
            call(V([2.0, 2]), False),
            call(MANY),
        ]
        for name in ("var", "std", "var_mean", "std_mean")
    },
    **{
        f"{name}.dim": [
            call(FINITE, [1]),
            call(FINITE, [1], False),
            call(R(2, 3, 4), [0, 2], True, True),
            call(R(2, 3), None),
            call(R(3, 1), [1]),
            call(R(3, 1), [1], False),
            call(R(2, 3, fixed=True), []),
            call(EMPTY, [0]),
            call(V([[1, INF], [NAN, 0]]), [1]),
        ]
        for name in ("var", "std", "var_mean", "std_mean")
    },
    **{
        f"{name}.correction": [
            call(FINITE, [1]),
            call(FINITE, [1], correction=0),
            call(FINITE, None, correction=2, keepdim=True),
            call(R(3, 2), [1], correction=3),
            call(R(3, 2), [1], correction=2),
            call(R(3, 2), [0], correction=0.5),
        ]
        for name in ("var", "std", "var_mean", "std_mean")
    },
    **{
        f"{name}.default": [
            call(ROWS, [1]),
            call(ROWS, [0], True),
            call(ROWS),
            call(FINITE),
            call(R(2, 3, 4), [0, 2]),
            call(SINGLE),
            call(ONE, [1]),
            call(WHOLE),
            call(FLAGS),
        ]
        for name in ("amax", "amin")
    },
    **{
        f"{name}.default": [
            call(ROWS),
            call(FINITE),
            call(V([3.0, 3, 1, 3])),
            call(R(3, 4)),
            call(SINGLE),
            call(ONE),
            call(WHOLE),
            call(V([-0.0, 0.0])),
            call(V([-INF, -INF])),
        ]
        for name in ("max", "min")
    },
    **{
        f"{name}.dim": [*along(), call(FINITE, 1), call(WHOLE, 0), call(V([-0.0, 0.0, -0.0]), 0)]
        for name in ("max", "min")
    },
    **{
        f"{name}.default": [
            call(ROWS),
            call(ROWS, 1),
            call(ROWS, 0, True),
            call(R(3, 4), None, True),
            call(SINGLE),
            call(SINGLE, 0),
            call(WHOLE),
            call(V([0.0, -0.0, 0.0])),
        ]
        for name in ("argmax", "argmin")
    },
    **{
        f"{name}.default": [call(E), call(FLAGS), call(WHOLE), call(EMPTY), call(SINGLE), call(V([0.0, -0.0]))]
        for name in ("any", "all")
    },
    **{
        f"{name}.dim": [
            call(ROWS, 1),
            call(ROWS, 0, True),
            call(B([[True, False], [True, True]]), 1),
            call(SINGLE, 0),
            call(EMPTY, 0),
        ]
        for name in ("any", "all")
    },
    **{
        f"{name}.dims": [call(ROWS, [1]), call(ROWS, [0, 1], True), call(ROWS, None), call(ROWS), call(FINITE, [])]
        for name in ("any", "all")
    },
    "linalg_vector_norm.default": [
        c
        for p in (2, 1, 0, INF, -INF, 3, 1.5, 0.5, -1)
        for c in (call(WIDE, p, [1]), call(R(3, 4), p), call(R(2, 3, 4), p, [0, -1], True), call(SINGLE, p))
    ]
    + [
        call(WIDE),
        call(WIDE, 2, [1], dtype=torch.float64),
        call(V([NAN, 1.0, INF])),
        call(R(2, 3), 2, []),
        call(EMPTY, 2, [0]),
        call(V([[0.0, 0], [3, 4]]), 2, [1], True),
        call(MANY),
    ],
    "logsumexp.default": [
        call(ROWS, [1]),
        call(ROWS, [0], True),
        call(R(2, 3, 4), [0, 2]),
        call(SINGLE, [0]),
        call(EMPTY, [0]),
        call(V([[1e4, -1e4], [-INF, 2]]), [1]),
        call(WHOLE, [0]),
        call(ONE, [1]),
    ],
    # products
    "linear.default": [
        call(R(3, 4), R(5, 4)),
        call(R(2, 3, 4), R(5, 4), R(5)),
        call(R(4), R(5, 4), R(5)),
        call(R(0, 4), R(5, 4), R(5)),
        call(R(3, 0), R(5, 0), R(5)),
        call(V([[1.0] * 1001]), V([[1.0] * 1001]), V([-1000.0])),
        call(R(3, 4), R(4)),
        call(V([[INF, 1], [0, NAN]]), V([[0.0, 1]])),
    ],
    "matmul.default": [
        call(R(3, 4), R(4, 2)),
        call(R(4), R(4)),
        call(R(3, 4), R(4)),
        call(R(4), R(4, 2)),
        call(R(2, 3, 4), R(4, 2)),
        call(R(2, 1, 3, 4), R(5, 4, 2)),
        call(R(2, 3, 4), R(4)),
        call(R(2, 0), R(0, 3)),
        call(N([[1, 2], [3, 4]]), N([[1], [-1]])),
        call(V([[1.0] * 1001]), V([[1.0]] * 1001)),
    ],
    "mm.default": [call(R(3, 4), R(4, 2)), call(R(0, 4), R(4, 2)), call(R(3, 0), R(0, 2)), call(ONE, ONE)],
    "bmm.default": [call(R(2, 3, 4), R(2, 4, 5)), call(R(0, 3, 4), R(0, 4, 5)), call(R(2, 3, 0), R(2, 0, 2))],
    "addmm.default": [
        call(R(3), R(2, 4), R(4, 3)),
        call(R(2, 3), R(2, 4), R(4, 3), beta=0.3, alpha=2.5),
        call(V([[NAN, INF]], fixed=True), R(1, 3), R(3, 2), beta=0),
        call(R(2, 1), R(2, 0), R(0, 3)),
        call(R(2, 3), R(2, 4), R(4, 3), alpha=0),
    ],
    "baddbmm.default": [
        call(R(2, 1, 3), R(2, 2, 4), R(2, 4, 3)),
        call(R(2, 2, 3), R(2, 2, 4), R(2, 4, 3), beta=0.3, alpha=2.5),
        call(V([[[NAN]]], fixed=True), R(1, 2, 3), R(1, 3, 2), beta=0),
    ],
    "einsum.default": [
        call("ij,jk->ik", [R(3, 4), R(4, 2)]),
        call("bij,bjk->bik", [R(2, 3, 4), R(2, 4, 5)]),
        call("ii->i", [R(3, 3)]),
        call("ij->j", [V([[1.0, 2]] * 600)]),
        call("ij,kj", [R(2, 3), R(4, 3)]),
        call("i,j->ij", [R(2), R(3)]),
        call("...ij,...jk->...ik", [R(2, 3, 4), R(4, 5)]),
        call("ij,j,jk->ik", [R(2, 3), R(3), R(3, 2)]),
        call("ij,k->k", [R(2, 3), R(2)]),
        call("ii", [R(3, 3)]),
        call("ij,jk,kl->il", [R(2, 3), R(3, 4), R(4, 2)], path=[0, 1, 0, 1]),
    ],
    # convolutions
    **{
        f"conv{d}d.default": [
            call(R(2, 4, *[6] * d), R(4, 2, *[3] * d), R(4), [2], [1], [1], 2),
            call(R(2, 3, *[5] * d), R(2, 3, *[2] * d)),
            call(R(3, *[7] * d), R(2, 3, *[3] * d), None, [1], [2], [2]),
            call(R(0, 3, *[5] * d), R(2, 3, *[2] * d), R(2)),
            call(R(1, 1, *[1] * d), R(1, 1, *[1] * d), R(1)),
        ]
        for d in (1, 2, 3)
    },
    **{
        f"conv{d}d.padding": [
            call(R(2, 4, *[6] * d), R(4, 2, *[4] * d), R(4), [1], "same", [1], 2),
            call(R(2, 3, *[5] * d), R(2, 3, *[2] * d)),
            call(R(2, 3, *[7] * d), R(2, 3, *[2] * d), None, [1], "same", [2]),
            call(R(2, 3, *[7] * d), R(2, 3, *[2] * d), None, [2], "valid"),
        ]
        for d in (1, 2, 3)
    },
    **{
        f"conv_transpose{d}d.{o}": [
            call(R(2, 4, *[5] * d), R(4, 3, *[3] * d), R(6), [2], [1], [1], 2, [1]),
            call(R(2, 3, *[5] * d), R(3, 2, *[2] * d)),
            call(R(3, *[4] * d), R(3, 2, *[3] * d), R(2), [3], [2], [1], 1, [2]),
            call(R(1, 2, *[4] * d), R(2, 2, *[2] * d), None, [1], [2]),
        ]
        for d, o in ((1, "default"), (2, "input"))
    },
    # norms
    "layer_norm.default": [
        *normal(),
        *normal(None, 0.1, False),
        call(R(3, 4), [4], R(4), R(4)),
        call(V([[300.0, 301, 302, 299]]), [4], R(4), R(4), 1e-5),
    ],
    "rms_norm.default": [*normal(), *normal(0.1), *normal(1e-6)],
    "group_norm.default": [
        call(R(2, 4, 3), 2, R(4), R(4)),
        call(R(2, 8), 2),
        call(R(2, 4, 2, 2), 4, R(4), R(4), 0.1, False),
        call(V([[[5.0, 5], [5, 5]]]), 1),
        call(R(2, 4, 3), 1, R(4)),
    ],
    "batch_norm.default": [
        c
        for t, tail in itertools.product((True, False), ((0.1, 1e-5, True), (0.3, 0.1, False)))
        for c in (
            call(R(4, 3), R(3), R(3), V([0.1, 0.2, -0.3], fixed=True), V([1.0, 0.5, 2], fixed=True), t, *tail),
            call(R(2, 3, 4, 2), None, None, V([0.0, 0, 0], fixed=True), V([1.0, 1, 1], fixed=True), t, *tail),
            call(V([[5.0, 1], [5, 2]]), R(2), R(2), V([0.0, 0], fixed=True), V([0.0, 1], fixed=True), t, *tail),
        )
    ]
    + [call(R(4, 3), R(3), R(3), None, None, True, 0.1, 1e-5, True)],
    # pooling
    **{f"max_pool{d}d.default": poolings(d, most=True) for d in (1, 2)},
    "avg_pool1d.default": poolings(1, most=False),
    "avg_pool2d.default": [
        *poolings(2, most=False),
        call(R(2, 2, 7, 6), [3, 2], [2, 1], [1, 0], True, True, 5),
        call(R(2, 5, 5), [2], [2], [0], False, True, 1),
    ],
    "adaptive_avg_pool1d.default": [
        call(R(2, 3, 7), [3]),
        call(R(3, 7), [7]),
        call(R(2, 3, 4), [6]),
        call(R(2, 3, 5), [1]),
        call(V([[[1.0] * 300 + [3.0] * 300]]), [1]),
        call(R(0, 3, 7), [2]),
    ],
    "adaptive_avg_pool2d.default": [
        call(R(2, 3, 7, 5), [3, 2]),
        call(R(3, 7, 5), [1, 1]),
        call(R(2, 3, 4, 4), [6, 3]),
        call(R(1, 1, 1, 1), [2, 2]),
        call(V([[[[1.0] * 40] * 20 + [[3.0] * 40] * 20]]), [1, 1]),
    ],
    # others of layers
    "embedding.default": [
        call(R(5, 3), N([[0, 1], [1, 4]])),
        call(R(5, 3), N([1, 1, 2, 0, 1]), 1),
        call(R(5, 3), N([1, 1, 2, 0, 1]), -1, True),
        call(R(5, 3), N([1, 1, 2, 2, 1]), 2, True),
        call(V([[1.0], [2.0]]), N([0] * 1000)),
        call(R(5, 3), N([1, 1]), -1, False, True),
        call(R(5, 3), N(2)),
        call(R(5, 3), Tensor((0,), [], torch.int64)),
    ],
    "scaled_dot_product_attention.default": attentions(),
    "dropout.default": [call(E, 0.5, False), call(R(3, 4), 0.0, False), call(R(3), 0.0, True)],
    # losses
    "cross_entropy_loss.default": crossings(),
    **{
        f"{name}.default": [
            c
            for r in (0, 1, 2)
            for c in (
                call(V([0.0, 1, 2, -1, INF, 5]), V([0.0, 1, 0, 1, 0, NAN]), r),
                call(R(3, 4), R(3, 4), r),
                call(V([1.5, 2, 0.5]), V([0.5, 1, 0.5]), r),
            )
        ]
        + [call(R(3, 1, fixed=True), R(4, fixed=True)), call(EMPTY, EMPTY), call(SINGLE, SINGLE)]
        for name in ("mse_loss", "l1_loss")
    },
    "smooth_l1_loss.default": [
        call(V([0.0, 1, 2, -1, INF, 1.5]), V([0.0, 0, 0, 1, 0, 1]), r, b) for r in (0, 1, 2) for b in (1.0, 0.5, 0.0)
    ]
    + [call(R(3, 4), R(3, 4)), call(EMPTY, EMPTY)],
    "huber_loss.default": [
        call(V([0.0, 1, 2, -1, INF, 1.5]), V([0.0, 0, 0, 1, 0, 1]), r, b) for r in (0, 1, 2) for b in (1.0, 0.5, 2.0)
    ]
    + [call(R(3, 4), R(3, 4)), call(EMPTY, EMPTY)],
    "binary_cross_entropy_with_logits.default": [
        c
        for r in (0, 1, 2)
        for c in (
            call(V([0.0, 5, -5, 100, -100, INF, -INF, 0.5]), V([0.0, 1, 0, 0, 1, 1, 0, 0.3]), None, None, r),
            call(R(3, 4), V([[0.0, 1, 0.5, 1]] * 3), R(4, fixed=True), V([0.5, 2, 1, 0], fixed=True), r),
        )
    ]
    + [call(R(3, 4), V([[0.0, 1, 0.5, 1]] * 3), None, V([3.0], fixed=True)), call(EMPTY, EMPTY)],
    # views and copies
    "view.default": [call(R(2, 6), [3, -1]), call(R(2, 6), [12]), call(SINGLE, [1, 1]), call(EMPTY, [3, 0])],
    "reshape.default": [call(R(2, 6), [3, -1]), call(R(2, 6), [12]), call(ONE, []), call(EMPTY, [3, 0])],
    "flatten.using_ints": [
        call(R(2, 3, 4)),
        call(R(2, 3, 4), 1),
        call(R(2, 3, 4), 0, 1),
        call(R(2, 3, 4), -2, -1),
        call(SINGLE),
        call(EMPTY),
    ],
    "unflatten.int": [call(R(2, 6), 1, [2, -1]), call(R(6, 2), -2, [3, 2])],
    "transpose.int": [call(R(2, 3, 4), 0, -1), call(SINGLE, 0, 0), call(EMPTY, 0, 1)],
    "t.default": [call(R(2, 3)), call(R(3)), call(SINGLE)],
    "permute.default": [call(R(2, 3, 4), [2, 0, -2]), call(SINGLE, [])],
    "squeeze.default": [call(R(1, 2, 1)), call(SINGLE), call(ONE)],
    "squeeze.dim": [call(R(1, 2, 1), 0), call(R(1, 2, 1), -2), call(SINGLE, 0)],
    "squeeze.dims": [call(R(1, 2, 1), [0, 1]), call(R(1, 2, 1), [-1, 0]), call(R(1, 2), [])],
    "unsqueeze.default": [call(R(2, 3), 1), call(R(2, 3), -1), call(SINGLE, 0)],
    "expand.default": [
        call(V([[1.0], [2]]), [2, 600]),
        call(R(2, 1), [4, 2, 3]),
        call(SINGLE, [2, 2]),
        call(R(1, 3), [-1, 3]),
        call(R(1, 3), [0, 3]),
        call(R(1, 3), [2, -1], implicit=True),
    ],
    "expand_as.default": [call(R(2, 1), R(3, 2, 4, fixed=True)), call(SINGLE, R(600, fixed=True))],
    "view_as.default": [call(R(2, 6), R(3, 4, fixed=True))],
    "broadcast_tensors.default": [call([R(2, 1), R(600), SINGLE]), call([R(3), R(3)])],
    "repeat.default": [
        call(R(2, 3), [2, 1, 3]),
        call(R(3), [600]),
        call(SINGLE, [2]),
        call(R(2), [0]),
        call(R(2), [1]),
    ],
    "cat.default": [
        call([R(2, 3), R(1, 3)]),
        call([R(2, 3), R(2, 1)], -1),
        call([V([], shape=(0,)), R(2, 3)], 1),
        call([R(2), N([1, 2])]),
        call([V([], shape=(0,))]),
    ],
    "stack.default": [
        call([R(2, 3), R(2, 3)]),
        call([R(2), R(2)], -1),
        call([SINGLE, SINGLE]),
        call([R(2), N([1, 2])]),
    ],
    "split.Tensor": [call(R(5, 2), 2), call(R(2, 5), 3, -1), call(R(4), 4), call(V([], shape=(0,)), 0)],
    "split.default": [call(R(5, 2), [2, 3]), call(R(2, 5), [0, 5], 1)],
    "split.sizes": [call(R(5, 2), [2, 3]), call(R(2, 5), [0, 5], 1)],
    "split_with_sizes.default": [call(R(5, 2), [2, 3]), call(R(2, 5), [1, 4], -1)],
    "chunk.default": [call(R(5, 2), 3), call(R(2, 7), 4, -1), call(R(2), 5), call(V([], shape=(0,)), 2)],
    "unbind.int": [call(R(3, 2)), call(R(3, 2), -1)],
    "select.int": [call(R(3, 2), 0, 1), call(R(3, 2), -1, -1)],
    "slice.Tensor": [
        call(R(5, 2)),
        call(R(5, 2), 0, 1, -1),
        call(R(2, 5), 1, -3, 2**63 - 1),
        call(R(2, 5), -1, 0, 5, 2),
        call(R(5), 0, 4, 2),
    ],
    "narrow.default": [call(R(5, 2), 0, 1, 3), call(R(2, 5), -1, -2, 2), call(R(5), 0, 5, 0)],
    "index.Tensor": [
        call(R(4, 3), [N([0, 2, 2, -1])]),
        call(R(4, 3), [None, N([[0, 1], [1, 1]])]),
        call(R(4, 3), [N([0, 1]), N([2, 2])]),
        call(R(2, 3, 4), [N([0, 1]), None, N([3, 3])]),
        call(R(2, 3, 4), [None, N([0, 1]), N([3, 3])]),
        call(V([[1.0], [2]]), [N([0] * 600)]),
        call(R(4), [N(2)]),
        call(R(2, 3, 4), [N([[0], [1]]), N([0, 2]), None]),
        call(R(4), [Tensor((0,), [], torch.int64)]),
    ],
    "index.Tensor_hacked_twin": [call(R(4, 3), [N([0, 2, 2, -1])]), call(R(4, 3), [N([0, 1]), N([2, 2])])],
    "index_select.default": [
        call(R(4, 3), 0, N([0, 2, 2])),
        call(R(4, 3), -1, N([1])),
        call(SINGLE, 0, N([0])),
        call(V([1.0, 2]), 0, N([1] * 600)),
    ],
    "gather.default": [
        call(R(4, 3), 0, N([[0, 2, 2], [3, 3, 3]])),
        call(R(4, 3), -1, N([[0, 2, 2, 2]])),
        call(R(4, 3), 1, N([[0]])),
        call(V([1.0, 2]), 0, N([1] * 600)),
        call(SINGLE, 0, N(0)),
        call(R(4), 0, N([1, 1]), sparse_grad=True),
    ],
    "scatter_add.default": [
        call(R(4, 3), 0, N([[0, 2, 2], [0, 3, 3]]), R(2, 3)),
        call(R(4, 3), 1, N([[0, 0]]), R(4, 3, fixed=True)),
        call(V([0.0, 0]), 0, N([1] * 1000), MANY),
        call(V([INF, 1]), 0, N([0, 1]), V([-INF, 2])),
        call(N([1, 2]), 0, N([0, 0]), N([5, 6])),
    ],
    "select_scatter.default": [call(R(3, 2), R(2), 0, 1), call(R(3, 2), R(3), -1, -1)],
    "slice_scatter.default": [
        call(R(5, 2), R(5, 2)),
        call(R(5, 2), R(3, 2), 0, 1, -1),
        call(R(2, 5), R(2, 3), 1, -3, 2**63 - 1),
        call(R(2, 5), R(2, 3), -1, 0, 5, 2),
    ],
    "diagonal.default": [
        call(R(3, 4)),
        call(R(3, 4), 1),
        call(R(3, 4), -1),
        call(R(2, 3, 4), 0, 2, 0),
        call(R(3, 3), 3),
    ],
    "diagonal_scatter.default": [
        call(R(3, 4), R(3)),
        call(R(3, 4), R(3), 1),
        call(R(3, 4), R(2), -1),
        call(R(2, 3, 4), R(3, 2), 0, -1, 0),
    ],
    **{
        f"{name}.default": [
            call(ROWS),
            call(R(3, 4), 1),
            call(R(2, 3, 4), -1),
            call(EMPTY),
            call(B([[True, True], [True, True]])),
        ]
        for name in ("tril", "triu")
    },
    "flip.default": [call(R(2, 3), [0]), call(R(2, 3), [0, -1]), call(R(2, 3), []), call(EMPTY, [0])],
    "roll.default": [
        call(R(2, 3), [1]),
        call(R(2, 3), [1], [1]),
        call(R(2, 3), [1, -2], [0, 1]),
        call(R(5), [-7], [0]),
        call(EMPTY, [1], [0]),
    ],
    "pad.default": [
        call(R(2, 3), [1, 2]),
        call(R(2, 3), [1, 2, 0, 1], "constant", 0.3),
        call(R(2, 3), [-1, 1]),
        call(R(2, 3, 4), [1, 2], "reflect"),
        call(R(2, 3, 4), [2, 1], "replicate"),
        call(R(2, 3, 4), [1, 3], "circular"),
        call(R(1, 2, 3, 4), [1, 2, 2, 1], "reflect"),
        call(R(1, 2, 3, 4), [1, 2, 2, 0], "replicate"),
        call(R(1, 2, 3, 4), [1, 0, 2, 1], "circular"),
        call(R(2, 3), [1, 1], "constant", -INF),
        call(WHOLE, [1, 1], "constant", 3.0),
        call(R(2, 3, 4), [1, -1], "circular"),
        call(R(2, 3, 4), [-1, 1], "replicate"),
    ],
    "constant_pad_nd.default": [call(R(2, 3), [1, 2]), call(R(2, 3), [1, 2, -1, 1], 0.3), call(EMPTY, [1, 1, 1, 0], 2)],
    "argsort.default": [
        call(FINITE, 1, open=(0,)),
        call(R(3, 4)),
        call(R(3, 4), 0, True),
        call(SINGLE),
        call(V([NAN, 1, INF, -INF, 0])),
        call(V([NAN, 1, INF, -INF, 0]), 0, True),
    ],
    "argsort.stable": [
        call(t, stable=s, dim=d, descending=o)
        for t in (ROWS, FINITE)
        for s in (True,)
        for d in (0, 1)
        for o in (False, True)
    ]
    + [call(R(4), stable=False)],
    "sort.default": [
        call(R(3, 4)),
        call(R(3, 4), 0, True),
        call(SINGLE),
        call(ROWS, 1, open=(1,)),
        call(ROWS, 1, True, open=(1,)),
        call(WHOLE),
        call(EMPTY, 0),
    ],
    "sort.stable": [
        call(t, stable=s, dim=d, descending=o)
        for t in (ROWS, FINITE)
        for s in (True,)
        for d in (0, 1)
        for o in (False, True)
    ]
    + [
        call(R(4), stable=False),
        call(R(4), stable=None),
        call(V([0.0, -0.0, 0.0, -0.0]), stable=True, descending=True),
    ],
    "topk.default": [
        call(R(3, 5), 2),
        call(R(5, 3), 2, 0),
        call(R(3, 5), 2, -1, False),
        call(V([NAN, 1, INF, -INF, 0]), 3),
        call(V([NAN, 1, INF, -INF, 0]), 3, 0, False),
        call(SINGLE, 1),
        call(R(3), 0),
        call(R(4), 4, 0, True, False, open=(0, 1)),
        call(WHOLE, 3),
    ],
    # made
    "arange.default": [call(5), call(5.5), call(3, dtype=torch.float16), call(0), call(2.5, dtype=torch.int64)],
    "arange.start": [call(2, 7), call(0.5, 3.7), call(-3, 3, dtype=torch.float32)],
    "arange.start_step": [
        call(1, 10, 3),
        call(0, 1, 0.1),
        call(5, 0, -2),
        call(0.0, 1.0, 0.3, dtype=torch.bfloat16),
        call(1, 5),
    ],
    **{
        f"{name}.default": [
            call([2, 3]),
            call([]),
            call([0, 2]),
            call([2], dtype=torch.float16),
            call([2], dtype=torch.bool),
        ]
        for name in ("zeros", "ones")
    },
    "full.default": [
        call([2, 3], 0.1),
        call([2], 3),
        call([2], True),
        call([], INF),
        call([2], 0.1, dtype=torch.bfloat16),
        call([2], 2.7, dtype=torch.int64),
    ],
    **{
        f"{name}.default": [call(R(2, 3)), call(WHOLE), call(EMPTY), call(R(2), dtype=torch.int64)]
        for name in ("zeros_like", "ones_like", "empty_like")
    },
    "full_like.default": [
        call(R(2, 3), 0.1),
        call(WHOLE, 3),
        call(FLAGS, 1),
        call(R(2), -INF),
        call(R(2), 2.7, dtype=torch.int64),
    ],
    **{
        f"{name}.default": [call(R(2, 3), [4]), call(WHOLE, []), call(R(2), [2], dtype=torch.int64)]
        for name in ("new_zeros", "new_ones")
    },
    "new_full.default": [call(R(2, 3), [4], 0.1), call(WHOLE, [2], 3), call(R(2), [2], 2.7, dtype=torch.int64)],
    "scalar_tensor.default": [
        call(0.1),
        call(3, dtype=torch.int64),
        call(0.1, dtype=torch.float16),
        call(True, dtype=torch.bool),
        call(INF),
    ],
    "fill.Scalar": [call(R(2, 3), 0.1), call(WHOLE, 3), call(E, INF)],
    "fill.Tensor": [call(R(2, 3), SINGLE), call(R(600), SINGLE)],
    "fill_.Scalar": [call(R(2, 3), 0.1)],
    "fill_.Tensor": [call(R(2, 3), SINGLE), call(R(600), SINGLE)],
    "zero.default": [call(E), call(WHOLE)],
    "zero_.default": [call(E), call(WHOLE)],
    "copy_.default": [call(R(2, 3), R(3)), call(R(600), SINGLE), call(R(3), N([1, 2, 3]), True)],
    **{
        f"{name}.default": [call(E), call(EMPTY), call(WHOLE)]
        for name in ("clone", "detach", "contiguous", "alias", "lift_fresh_copy")
    },
}
"""By operator and overload."""
