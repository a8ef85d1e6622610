"""Operators that make, view, join, pick and place elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array

from isthmus.training.jax.arrays import Operator, dtype_of, expect_indices, picking, widened

_VAST = 1 << 62


def _flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    if x.ndim == 0:
        return x.reshape(1)
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


def _unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *_without_wildcard(sizes, x.shape[dim]), *x.shape[dim + 1 :])


def _without_wildcard(sizes: Sequence[int], total: int) -> list[int]:
    known = math.prod(size for size in sizes if size != -1)
    return [total // known if size == -1 else size for size in sizes]


def _transpose(x: Array, first: int, second: int) -> Array:
    return x if x.ndim == 0 else jnp.swapaxes(x, first, second)


def _squeeze(x: Array, dim: int | Sequence[int] | None = None) -> Array:
    if dim is None:
        return jnp.squeeze(x)
    dims = [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(d for d in dims if x.ndim and x.shape[d] == 1))


def _expand(x: Array, sizes: Sequence[int], *, implicit: bool = False) -> Array:
    kept = (1,) * (len(sizes) - x.ndim) + x.shape
    return _expanded(x, tuple(old if new == -1 else new for old, new in zip(kept, sizes, strict=True)))


def _expanded(x: Array, shape: Sequence[int]) -> Array:
    return picking(lambda x: jnp.broadcast_to(x, tuple(shape)))(x)


def _broadcast_tensors(tensors: Sequence[Array]) -> tuple[Array, ...]:
    shape = jnp.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(_expanded(t, shape) for t in tensors)


def _chunk(x: Array, chunks: int, dim: int = 0) -> tuple[Array, ...]:
    length = x.shape[dim]
    return _split(x, max(1, -(-length // chunks)), dim) if length else (x,) * chunks


def _split(x: Array, size: int | Sequence[int], dim: int = 0) -> tuple[Array, ...]:
    length = x.shape[dim]
    if isinstance(size, int):
        ends = list(range(size, length, size)) if size else []
    else:
        ends = [sum(size[: k + 1]) for k in range(len(size) - 1)]
    return tuple(jnp.split(x, ends, axis=dim))


def _unbind(x: Array, dim: int = 0) -> tuple[Array, ...]:
    return tuple(jnp.take(x, k, axis=dim) for k in range(x.shape[dim]))


def _picked(x: Array, dim: int, which: int | slice) -> Array:
    dim %= x.ndim
    return x[(slice(None),) * dim + (which,)]


def _range_of(x: Array, dim: int, start: int | None, end: int | None, step: int) -> slice:
    return slice(*slice(start, None if end is not None and end >= _VAST else end, step).indices(x.shape[dim]))


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return _picked(x, dim, _range_of(x, dim, start, end, step))


def _narrow(x: Array, dim: int, start: int, length: int) -> Array:
    start %= max(1, x.shape[dim])
    return _picked(x, dim, slice(start, start + length))


def _placed(x: Array, part: Array, dim: int, which: int | slice) -> Array:
    dim %= x.ndim
    return x.at[(slice(None),) * dim + (which,)].set(part)


def _slice_scatter(
    x: Array, part: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    return _placed(x, part, dim, _range_of(x, dim, start, end, step))


def _diagonal_scatter(x: Array, part: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows = jnp.arange(part.shape[-1]) + max(0, -offset)
    columns = jnp.arange(part.shape[-1]) + max(0, offset)
    return jnp.moveaxis(moved.at[..., rows, columns].set(part), (-2, -1), (dim1, dim2))


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    for dim, one in enumerate(indices):
        if one is not None:
            expect_indices(one, x.shape[dim], negative=True)
    places = tuple(dim for dim, one in enumerate(indices) if one is not None)

    def pick(x: Array, *given: Array) -> Array:
        chosen = dict(zip(places, given, strict=True))
        return x[tuple(chosen.get(dim, slice(None)) for dim in range(len(indices)))]

    return picking(pick)(x, *(one for one in indices if one is not None))


def _index_select(x: Array, dim: int, index: Array) -> Array:
    expect_indices(index, x.shape[dim] if x.ndim else 1)
    return picking(lambda x, index: jnp.take(x, index, axis=dim))(x, index) if x.ndim else x


def _gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    if x.ndim == 0:
        return _expanded(x, index.shape)
    expect_indices(index, x.shape[dim])
    dim %= x.ndim
    # the index may be smaller than the input in the other dimensions
    others = tuple(slice(None) if d == dim else slice(0, index.shape[d]) for d in range(x.ndim))
    return picking(lambda x, index: jnp.take_along_axis(x[others], index, axis=dim))(x, index)


def _scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    if x.ndim == 0:
        return x + source
    expect_indices(index, x.shape[dim])
    places = list(jnp.indices(index.shape))
    places[dim] = index
    return x.at[tuple(places)].add(source[tuple(slice(0, size) for size in index.shape)])


def _pad(x: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    """`pad` begins with the last dimension. Negative padding cuts off."""
    ends = [(0, 0)] * (x.ndim - len(pad) // 2) + [(pad[k], pad[k + 1]) for k in range(len(pad) - 2, -1, -2)]
    for dim, (before, after) in enumerate(ends):
        x = _picked(x, dim, slice(max(0, -before), x.shape[dim] - max(0, -after)))
    widths = [(max(0, before), max(0, after)) for before, after in ends]
    if mode == "constant":
        return jnp.pad(x, widths, constant_values=value or 0)
    return jnp.pad(x, widths, mode={"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode])


def _made(value: float) -> Operator:
    def make(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> Array:
        return jnp.full(tuple(size), value, dtype_of(dtype or torch.get_default_dtype()))

    return make


def _like(value: float) -> Operator:
    def make(x: Array, *, dtype: torch.dtype | None = None, **_: object) -> Array:
        return _new_full(x, x.shape, value, dtype=dtype)

    return make


def _new(value: float) -> Operator:
    def make(x: Array, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> Array:
        return _new_full(x, size, value, dtype=dtype)

    return make


def _full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: object) -> Array:
    return jnp.full(tuple(size), value, None if dtype is None else dtype_of(dtype))


def _full_like(x: Array, value: Any, *, dtype: torch.dtype | None = None, **_: object) -> Array:
    return _new_full(x, x.shape, value, dtype=dtype)


def _new_full(x: Array, size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: object) -> Array:
    return jnp.full(tuple(size), value, x.dtype if dtype is None else dtype_of(dtype))


def _arange(*bounds: float, dtype: torch.dtype | None = None, **named: Any) -> Array:
    ends = (*bounds, *(named[key] for key in ("start", "end", "step") if key in named))
    if dtype is not None and not dtype.is_floating_point:
        ends = tuple(int(end) for end in ends)
    return jnp.arange(*ends, dtype=None if dtype is None else dtype_of(dtype))


def _filled(x: Array, value: Any) -> Array:
    return _expanded(jnp.asarray(value).astype(x.dtype), x.shape)


def _sorted(x: Array, dim: int = -1, descending: bool = False, *, stable: bool | None = True) -> tuple[Array, Array]:
    """Stable whether asked or not."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    # 0 and -0 are equal
    where = jnp.argsort(jnp.where(x == 0, 0, x), axis=dim, descending=descending, stable=True)
    return jnp.take_along_axis(x, where, axis=dim), where


def _topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    values, where = _sorted(x, dim, largest)
    if x.ndim == 0:
        return values, where
    return _slice(values, dim, 0, k), _slice(where, dim, 0, k)


def _roll(x: Array, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Array:
    shifts = shifts if isinstance(shifts, int) or len(shifts) > 1 else shifts[0]
    if not isinstance(dims, int) and not dims:
        return jnp.roll(x, shifts)
    return jnp.roll(
        x, shifts, dims if isinstance(dims, int) else tuple(dims) if not isinstance(shifts, int) else dims[0]
    )


def _same(x: Array, *_: object, **__: object) -> Array:
    return x


def _reshape(x: Array, size: Sequence[int]) -> Array:
    return x.reshape(tuple(size))


def _permute(x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, tuple(dims))


def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return picking(lambda x: jnp.tile(x, tuple(repeats)))(x)


LAYOUTS: Mapping[str, Operator] = {
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "transpose": _transpose,
    "t": lambda x: x.T,
    "permute": _permute,
    "squeeze": _squeeze,
    "unsqueeze": jnp.expand_dims,
    "expand": _expand,
    "broadcast_tensors": _broadcast_tensors,
    "expand_as": lambda x, other: _expand(x, other.shape),
    "view_as": lambda x, other: x.reshape(other.shape),
    "repeat": _repeat,
    "cat": lambda tensors, dim=0: jnp.concatenate([t for t in tensors if t.shape != (0,)] or tensors, axis=dim),
    "stack": lambda tensors, dim=0: jnp.stack(tensors, axis=dim),
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _chunk,
    "unbind": _unbind,
    "select": lambda x, dim, index: _picked(x, dim, index),
    "slice": _slice,
    "narrow": _narrow,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
    "scatter_add": widened(_scatter_add),
    "select_scatter": lambda x, part, dim, index: _placed(x, part, dim, index),
    "slice_scatter": _slice_scatter,
    "diagonal": lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2),
    "diagonal_scatter": _diagonal_scatter,
    "tril": lambda x, diagonal=0: jnp.tril(x, diagonal),
    "triu": lambda x, diagonal=0: jnp.triu(x, diagonal),
    "flip": lambda x, dims: jnp.flip(x, tuple(dims)),
    "roll": _roll,
    "pad": _pad,
    "constant_pad_nd": lambda x, pad, value=0: _pad(x, pad, "constant", value),
    "argsort": lambda x, dim=-1, descending=False, *, stable=True: _sorted(x, dim, descending)[1],
    "sort": _sorted,
    "topk": _topk,
    "arange": _arange,
    "zeros": _made(0),
    "ones": _made(1),
    "full": _full,
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "empty_like": _like(0),
    "full_like": _full_like,
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": _new_full,
    "scalar_tensor": lambda value, *, dtype=None, **_: jnp.asarray(value, dtype_of(dtype or torch.get_default_dtype())),
    "fill": _filled,
    "zero": jnp.zeros_like,
    "copy": lambda x, source, non_blocking=False: _filled(x, source),
    "clone": _same,
    "detach": lambda x: x,
    "contiguous": _same,
    "alias": _same,
    "lift_fresh_copy": _same,
}
