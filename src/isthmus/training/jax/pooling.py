"""Pooling. Sums and counts are made in float32, and the first of equal maxima has the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from isthmus.training.jax.arrays import Operator, is_real, wide, widened

_NOWHERE = np.iinfo(np.int32).max


def numbers(value: int | Sequence[int], count: int) -> list[int]:
    """One number stands for all dimensions."""
    found = [value] if isinstance(value, int) else list(value)
    return found * count if len(found) == 1 else found


class _Window(NamedTuple):
    """A window of pooling: values for each pooled dimension."""

    sizes: list[int]
    steps: list[int]
    padding: list[int]
    dilation: list[int]
    ceil: bool  # whether a last window may reach beyond the end

    def ends(self, x: Array) -> list[tuple[int, int]]:
        """Padding before and after; what no window reaches at the end is a negative one."""
        found: list[tuple[int, int]] = []
        lengths = x.shape[x.ndim - len(self.sizes) :]
        for length, size, step, pad, spread in zip(lengths, *self[:4], strict=True):
            reach = spread * (size - 1) + 1
            free = length + 2 * pad - reach
            count = (-(-free // step) if self.ceil else free // step) + 1
            if self.ceil and (count - 1) * step >= length + pad:  # it would begin in the padding at the end
                count -= 1
            found.append((pad, (count - 1) * step + reach - length - pad))
        return found

    def over(self, operands: Sequence[Array], starts: Sequence[Any], combine: Operator) -> Any:
        """`lax.reduce_window` of arrays of one shape, a result of each."""
        x = operands[0]
        outer = x.ndim - len(self.sizes)
        kept, ends = (1,) * outer, self.ends(x)
        # cut off first: JAX has no derivative of windows with a negative padding
        for axis, (_, after) in enumerate(ends, start=outer):
            operands = [lax.slice_in_dim(one, 0, one.shape[axis] + min(0, after), axis=axis) for one in operands]
        single = len(operands) == 1
        return lax.reduce_window(
            operands[0] if single else tuple(operands),
            starts[0] if single else tuple(starts),
            combine,
            (*kept, *self.sizes),
            (*kept, *self.steps),
            [(0, 0)] * outer + [(before, max(0, after)) for before, after in ends],
            window_dilation=(*kept, *self.dilation),
        )


def max_pool(dims: int) -> Operator:
    """Over the last dimensions."""

    def pool(
        x: Array,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> Array:
        sizes = numbers(kernel_size, dims)
        steps = numbers(stride, dims) or sizes
        return _largest(x, _Window(sizes, steps, numbers(padding, dims), numbers(dilation, dims), ceil_mode))

    return pool


def _largest(x: Array, window: _Window) -> Array:
    dims = len(window.sizes)
    outer, inner = x.shape[: x.ndim - dims], x.shape[x.ndim - dims :]

    def found(x: Array) -> tuple[Array, Array]:
        """Values, and where they stand among the elements of the pooled dimensions."""
        places = jnp.broadcast_to(jnp.arange(math.prod(inner), dtype=jnp.int32).reshape(inner), x.shape)
        least = np.asarray(-np.inf if is_real(x) else np.iinfo(x.dtype).min, x.dtype)[()]
        return window.over((x, places), (least, np.int32(_NOWHERE)), _later)

    def backward(places: Array, g: Array) -> tuple[Array]:
        rows = math.prod(outer)
        flat = jnp.zeros((rows, math.prod(inner)), wide(g).dtype)
        at = jnp.arange(rows)[:, None], places.reshape(rows, -1)
        return (flat.at[at].add(wide(g).reshape(rows, -1)).reshape(*outer, *inner).astype(g.dtype),)

    of = jax.custom_vjp(lambda x: found(x)[0])
    of.defvjp(found, backward)
    return of(x) if is_real(x) else found(x)[0]


def _later(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """The larger value; of equal ones the first, of those that are no number the last."""
    (a, i), (b, j) = one, other
    beyond = (b > a) | ((b == a) & (j < i)) | ((b != b) & ((a == a) | (j > i)))
    return jnp.where(beyond, b, a), jnp.where(beyond, j, i)


def avg_pool(dims: int) -> Operator:
    """Over the last dimensions."""

    def pool(
        x: Array,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        sizes = numbers(kernel_size, dims)
        window = _Window(sizes, numbers(stride, dims) or sizes, numbers(padding, dims), [1] * dims, ceil_mode)
        total = _summed(x, window)
        if divisor_override is not None:
            return total / divisor_override
        counted = jnp.ones_like(x)
        if count_include_pad:
            pads = [(0, 0)] * (x.ndim - dims) + [(p, p) for p in window.padding]
            counted, window = jnp.pad(counted, pads, constant_values=1), window._replace(padding=[0] * dims)
        return total / _summed(counted, window)

    return widened(pool)


def _summed(x: Array, window: _Window) -> Array:
    return window.over((x,), (np.asarray(0, x.dtype)[()],), lax.add)  # a constant, whose derivative JAX knows


def adaptive_avg_pool(dims: int) -> Operator:
    """Output k of n averages inputs floor(k L / n) to ceil((k + 1) L / n)."""

    def pool(x: Array, sizes: int | Sequence[int]) -> Array:
        for axis, count in enumerate(numbers(sizes, dims), start=x.ndim - dims):
            length = x.shape[axis]
            parts = [
                jnp.mean(
                    lax.slice_in_dim(x, k * length // count, -(-(k + 1) * length // count), axis=axis),
                    axis,
                    keepdims=True,
                )
                for k in range(count)
            ]
            x = jnp.concatenate(parts, axis) if parts else lax.slice_in_dim(x, 0, 0, axis=axis)
        return x

    return widened(pool)
