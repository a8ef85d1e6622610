"""Sizes in an exported program: affine functions of the batch, or the program is of no use at other batches."""

from __future__ import annotations

from typing import NamedTuple, cast

import sympy
import torch
from torch import Tensor
from torch.utils._sympy.functions import Max, Min

from isthmus.graph.opgraph import Affine, Size, TensorSpec

EXTREMES = (Max, Min, sympy.Max, sympy.Min)


class NotAffine(Exception):
    """A size depends on the batch in a way that is not affine."""


class UnknownSize(NamedTuple):
    """A number that is no affine function of the batch: harmless unless an operator takes it."""

    what: str


def spec_of(tensor: Tensor) -> TensorSpec:
    """Type, shape and layout of an exported tensor; NotAffine when its bytes are not affine in the batch."""
    shape = tuple(affine(s) for s in tensor.shape)
    if sum(isinstance(s, Affine) for s in shape) > 1:
        raise NotAffine(f"shape {shape}")
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), shape, tuple(affine(s) for s in tensor.stride()))


def affine(value: int | torch.SymInt) -> Size:
    """An int, or the affine function of the batch that a symbolic size is; NotAffine when it is neither."""
    if isinstance(value, int):
        return value
    expr = sympy.expand(cast(sympy.Expr, value.node.expr).replace(_is_extreme, _decide))
    symbols = list(expr.free_symbols)
    if not symbols:
        return int(expr)
    if len(symbols) > 1:
        raise NotAffine(str(expr))
    slope = expr.coeff(symbols[0], 1)
    fixed = sympy.expand(expr - slope * symbols[0])
    if not (slope.is_Integer and fixed.is_Integer):
        raise NotAffine(str(expr))
    return Affine(int(slope), int(fixed))


def _is_extreme(expr: sympy.Basic) -> bool:
    return isinstance(expr, EXTREMES)


def _decide(expr: sympy.Expr) -> sympy.Expr:
    """The argument of a minimum or maximum that wins at every batch size: strides of size-1 axes come as these."""
    sign = 1 if isinstance(expr, (Max, sympy.Max)) else -1
    arguments = cast("tuple[sympy.Expr, ...]", expr.args)
    for candidate in arguments:
        if all(_never_negative(sign * (candidate - other)) for other in arguments):
            return candidate
    return expr


def _never_negative(expr: sympy.Expr) -> bool:
    """Return whether an affine function of the batch is at least 0 at every batch size from 1."""
    symbols = list(expr.free_symbols)
    if len(symbols) > 1:
        return False
    slope = sympy.expand(expr).coeff(symbols[0], 1) if symbols else sympy.Integer(0)
    at_one = expr.subs(symbols[0], 1) if symbols else expr
    return bool(slope.is_nonnegative and at_one.is_nonnegative)


def affine_or_unknown(value: int | torch.SymInt) -> Size | UnknownSize:
    """The same, where it may be that no operator takes the number."""
    try:
        return affine(value)
    except NotAffine as e:
        return UnknownSize(str(e))
