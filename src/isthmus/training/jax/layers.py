"""Operators of layers: products, convolutions, norms, attention, pooling, losses.

Pooling. Sums and counts are made in float32, and the first of equal maxima has the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from isthmus.training.jax.arrays import Operator, expect_indices, is_half, is_real, of_one, picking, wide, widened

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


def _product(multiply: Operator) -> Operator:
    """A product whose sums are made, and added to, in float32. Its gradients are products of numbers of 16 bits too,
    which accelerators are quick at."""

    def forward(*arrays: Array) -> Array:
        halves = is_half(arrays[0])
        return multiply(*arrays, preferred_element_type=jnp.float32) if halves else multiply(*arrays)

    def backward(arrays: tuple[Array, ...], g: Array) -> Any:
        return jax.vjp(multiply, *arrays)[1](g.astype(arrays[0].dtype))

    of = jax.custom_vjp(forward)
    of.defvjp(lambda *arrays: (forward(*arrays), arrays), backward)
    return lambda *arrays: of(*arrays) if is_half(arrays[0]) else multiply(*arrays)


_matmul = _product(jnp.matmul)


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    found = _matmul(x, weight.T)
    return found if bias is None else found + wide(bias)


def _addmm(x: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    """With `beta` 0 nothing of x counts, whatever it holds."""
    found = _matmul(a, b)
    found = found if alpha == 1 else alpha * found
    return found if beta == 0 else (wide(x) if beta == 1 else beta * wide(x)) + found


def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Array:
    """Convolve in one, two or three dimensions."""
    dims = weight.ndim - 2
    alone = x.ndim == dims + 1
    if isinstance(padding, str):
        ends = {"same": "SAME", "valid": "VALID"}[padding]
    else:
        ends = [(p, p) for p in numbers(padding, dims)]
    found = lax.conv_general_dilated(
        x[None] if alone else x,
        weight,
        numbers(stride, dims),
        ends,
        rhs_dilation=numbers(dilation, dims),
        feature_group_count=groups,
    )
    return _with_bias(found, bias, alone=alone)


def _with_bias(found: Array, bias: Array | None, *, alone: bool) -> Array:
    if bias is not None:
        found = wide(found) + wide(bias).reshape(-1, *(1,) * (found.ndim - 2))
    return found[0] if alone else found


def _transposed_convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Array:
    """A convolution of the input spread by the stride, with the kernel turned around."""
    dims = weight.ndim - 2
    alone = x.ndim == dims + 1
    spread, wide = numbers(stride, dims), numbers(dilation, dims)
    ends = [
        (d * (k - 1) - p, d * (k - 1) - p + o)
        for d, k, p, o in zip(
            wide, weight.shape[2:], numbers(padding, dims), numbers(output_padding, dims), strict=True
        )
    ]
    inputs, outputs, *sizes = weight.shape
    kernel = weight.reshape(groups, inputs // groups, outputs, *sizes).swapaxes(1, 2)
    kernel = jnp.flip(kernel.reshape(groups * outputs, inputs // groups, *sizes), tuple(range(2, 2 + dims)))
    found = lax.conv_general_dilated(
        x[None] if alone else x,
        kernel,
        (1,) * dims,
        ends,
        lhs_dilation=spread,
        rhs_dilation=wide,
        feature_group_count=groups,
    )
    return _with_bias(found, bias, alone=alone)


def _normalized(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    """In float32 at least, as torch's kernels compute."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=axes, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=axes, keepdims=True) + eps)


def _layer_norm(
    x: Array,
    shape: Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Array:
    found = _normalized(x, tuple(range(-len(shape), 0)), eps)
    found = found if weight is None else found * weight
    return (found if bias is None else found + bias).astype(x.dtype)


def _rms_norm(x: Array, shape: Sequence[int], weight: Array | None = None, eps: float | None = None) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = tuple(range(-len(shape), 0))
    smallest = float(jnp.finfo(wide.dtype).eps) if eps is None else eps
    found = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + smallest)
    return (found if weight is None else found * weight).astype(x.dtype)


def _of_channels(value: Array, ndim: int) -> Array:
    return value.reshape(1, -1, *(1,) * (ndim - 2))


def _group_norm(
    x: Array,
    groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Array:
    grouped = x.reshape(x.shape[0], groups, -1)
    found = _normalized(grouped, (2,), eps).reshape(x.shape)
    found = found if weight is None else found * _of_channels(weight, x.ndim)
    return (found if bias is None else found + _of_channels(bias, x.ndim)).astype(x.dtype)


def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> tuple[Array, Array | None, Array | None]:
    """With the running figures that it leaves."""
    axes = (0, *range(2, x.ndim))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean, var = running_mean, running_var
    if training or mean is None or var is None:
        found_mean, found_var = jnp.mean(wide, axis=axes), jnp.var(wide, axis=axes)
        if training and mean is not None and var is not None:
            count = math.prod(x.shape[axis] for axis in axes)
            still = lax.stop_gradient
            mean = mean * (1 - momentum) + still(found_mean) * momentum
            var = var * (1 - momentum) + still(found_var) * (momentum * count / max(1, count - 1))
    else:
        found_mean, found_var = mean, var
    found = (wide - _of_channels(found_mean, x.ndim)) * lax.rsqrt(_of_channels(found_var, x.ndim) + eps)
    found = found if weight is None else found * _of_channels(weight, x.ndim)
    found = found if bias is None else found + _of_channels(bias, x.ndim)
    return found.astype(x.dtype), mean, var


def _weights(scores: Array) -> Array:
    """Softmax over the last dimension; a row that sees nothing is zero, and has no gradient."""
    return of_one(
        lambda x: jnp.where(jnp.all(jnp.isneginf(x), axis=-1, keepdims=True), 0, jax.nn.softmax(x, axis=-1)),
        lambda g, _, y: g * y - y * jnp.sum(g * y, axis=-1, keepdims=True),
        "y",
    )(scores)


def _attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Softmax of scaled products, in float32 at least. Attention that drops is torch's, as all that draws."""
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (picking(lambda t: jnp.repeat(t, heads // t.shape[-3], axis=-3))(one) for one in (key, value))
    scores = _matmul(query, jnp.swapaxes(key, -1, -2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + wide(mask)
    return _matmul(_weights(scores).astype(query.dtype), value)


def _embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    """A row's gradient is divided by how often it is taken, if asked. A sparse gradient has the same numbers."""
    expect_indices(indices, weight.shape[0])

    def backward(places: Array, g: Array) -> tuple[Array, None]:
        flat, rows = places.reshape(-1), wide(g).reshape(-1, weight.shape[1])
        if padding_idx >= 0:  # its row has no gradient
            rows = jnp.where((flat == padding_idx)[:, None], 0, rows)
        if scale_grad_by_freq:
            often = jnp.zeros(weight.shape[0], rows.dtype).at[flat].add(1)
            rows = rows / often[flat][:, None]
        return jnp.zeros(weight.shape, rows.dtype).at[flat].add(rows).astype(g.dtype), None

    def taken(weight: Array, places: Array) -> Array:
        return jnp.take(weight, places, axis=0)

    of = jax.custom_vjp(taken)
    of.defvjp(lambda weight, places: (taken(weight, places), places), backward)
    return of(weight, indices)


def _no_dropout(x: Array, p: float, train: bool) -> Array:
    """Those that draw are torch's."""
    return x


def _einsum(equation: str, tensors: Sequence[Array], *, path: Any = None) -> Array:
    if len(tensors) == 2 and _is_product(equation.replace(" ", "")):
        return _product(partial(jnp.einsum, equation))(*tensors)
    return jnp.einsum(equation, *wide(tensors))


def _is_product(equation: str) -> bool:
    """Return whether no index is summed over one of the two operands alone."""
    inputs, arrow, output = equation.partition("->")
    one, other = map(set, inputs.split(","))
    return bool(arrow) and "." not in equation and one ^ other <= set(output)


LAYERS: Mapping[str, Operator] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "einsum": _einsum,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "conv_transpose1d": _transposed_convolution,
    "conv_transpose2d": _transposed_convolution,
    "layer_norm": widened(_layer_norm),
    "rms_norm": widened(_rms_norm),
    "group_norm": widened(_group_norm),
    "batch_norm": widened(_batch_norm),
    "max_pool1d": max_pool(1),
    "max_pool2d": max_pool(2),
    "avg_pool1d": avg_pool(1),
    "avg_pool2d": avg_pool(2),
    "adaptive_avg_pool1d": adaptive_avg_pool(1),
    "adaptive_avg_pool2d": adaptive_avg_pool(2),
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "dropout": _no_dropout,
}
