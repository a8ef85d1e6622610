"""Operators of layers: products, convolutions, norms, attention, pooling, losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from isthmus.training.jax.elementwise import Operator

_MEAN, _SUM = 1, 2
"""torch's numbers of reductions; 0 is none."""


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    found = x @ weight.T
    return found if bias is None else found + bias


def _addmm(x: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    return (x if beta == 1 else beta * x) + ((a @ b) if alpha == 1 else alpha * (a @ b))


def _numbers(value: int | Sequence[int], count: int) -> list[int]:
    found = [value] if isinstance(value, int) else list(value)
    return found * count if len(found) == 1 else found


def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Array:
    """Of one, two or three dimensions."""
    dims = weight.ndim - 2
    alone = x.ndim == dims + 1
    if isinstance(padding, str):
        ends = {"same": "SAME", "valid": "VALID"}[padding]
    else:
        ends = [(p, p) for p in _numbers(padding, dims)]
    found = lax.conv_general_dilated(
        x[None] if alone else x,
        weight,
        _numbers(stride, dims),
        ends,
        rhs_dilation=_numbers(dilation, dims),
        feature_group_count=groups,
    )
    return _with_bias(found, bias, alone=alone)


def _with_bias(found: Array, bias: Array | None, *, alone: bool) -> Array:
    if bias is not None:
        found = found + bias.reshape(-1, *(1,) * (found.ndim - 2))
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
    spread, wide = _numbers(stride, dims), _numbers(dilation, dims)
    ends = [
        (d * (k - 1) - p, d * (k - 1) - p + o)
        for d, k, p, o in zip(
            wide, weight.shape[2:], _numbers(padding, dims), _numbers(output_padding, dims), strict=True
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


class _Window(NamedTuple):
    """Of pooling, per pooled dimension."""

    sizes: list[int]
    steps: list[int]
    padding: list[int]
    dilation: list[int]
    ceil: bool
    """Whether a last window may reach beyond the end."""

    def ends(self, x: Array) -> list[tuple[int, int]]:
        """Padding before and after; what no window reaches at the end is a negative one."""
        found: list[tuple[int, int]] = []
        lengths = x.shape[x.ndim - len(self.sizes) :]
        for length, size, step, pad, wide in zip(lengths, *self[:4], strict=True):
            reach = wide * (size - 1) + 1
            free = length + 2 * pad - reach
            count = (-(-free // step) if self.ceil else free // step) + 1
            if self.ceil and (count - 1) * step >= length + pad:  # it would begin in the padding at the end
                count -= 1
            found.append((pad, (count - 1) * step + reach - length - pad))
        return found


def _pooled(x: Array, window: _Window, start: float, combine: Operator) -> Array:
    outer = x.ndim - len(window.sizes)
    kept, ends = (1,) * outer, window.ends(x)
    # cut off first: JAX has no derivative of windows with a negative padding
    for axis, (_, after) in enumerate(ends, start=outer):
        x = lax.slice_in_dim(x, 0, x.shape[axis] + min(0, after), axis=axis)
    return lax.reduce_window(
        x,
        np.asarray(start, x.dtype)[()],  # a constant: JAX knows the derivative of these windows alone
        combine,
        (*kept, *window.sizes),
        (*kept, *window.steps),
        [(0, 0)] * outer + [(before, max(0, after)) for before, after in ends],
        window_dilation=(*kept, *window.dilation),
    )


def _max_pool(dims: int) -> Operator:
    def pool(
        x: Array,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> Array:
        sizes = _numbers(kernel_size, dims)
        steps = _numbers(stride, dims) or sizes
        window = _Window(sizes, steps, _numbers(padding, dims), _numbers(dilation, dims), ceil_mode)
        return _pooled(x, window, -jnp.inf, lax.max)

    return pool


def _avg_pool(dims: int) -> Operator:
    def pool(
        x: Array,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = (),
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        sizes = _numbers(kernel_size, dims)
        window = _Window(sizes, _numbers(stride, dims) or sizes, _numbers(padding, dims), [1] * dims, ceil_mode)
        total = _pooled(x, window, 0, lax.add)
        if divisor_override is not None:
            return total / divisor_override
        counted = jnp.ones_like(x)
        if count_include_pad:
            pads = [(0, 0)] * (x.ndim - dims) + [(p, p) for p in window.padding]
            counted, window = jnp.pad(counted, pads, constant_values=1), window._replace(padding=[0] * dims)
        return total / _pooled(counted, window, 0, lax.add)

    return pool


def _adaptive_avg_pool(dims: int) -> Operator:
    """Output k of n averages inputs floor(k L / n) to ceil((k + 1) L / n)."""

    def pool(x: Array, sizes: int | Sequence[int]) -> Array:
        for axis, count in enumerate(_numbers(sizes, dims), start=x.ndim - dims):
            length = x.shape[axis]
            parts = [
                jnp.mean(
                    lax.slice_in_dim(x, k * length // count, -(-(k + 1) * length // count), axis=axis),
                    axis,
                    keepdims=True,
                )
                for k in range(count)
            ]
            x = jnp.concatenate(parts, axis)
        return x

    return pool


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
    """Softmax of scaled products, in float32 at least."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (jnp.repeat(t, times, axis=-3) for t in (key, value))
    scores = (query @ jnp.swapaxes(key, -1, -2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None and mask.dtype == bool:
        scores = jnp.where(mask, scores, -jnp.inf)
    elif mask is not None:
        scores = scores + mask
    weights = jax.nn.softmax(scores, axis=-1)
    if mask is not None:  # a row that sees nothing is zero
        weights = jnp.where(jnp.isneginf(jnp.max(scores, axis=-1, keepdims=True)), 0, weights)
    return weights.astype(query.dtype) @ value


def _reduced(losses: Array, reduction: int) -> Array:
    return jnp.mean(losses) if reduction == _MEAN else jnp.sum(losses) if reduction == _SUM else losses


def _cross_entropy(
    x: Array,
    target: Array,
    weight: Array | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Array:
    axis = 1 if x.ndim > 1 else 0
    logs = jax.nn.log_softmax(x, axis=axis)
    if jnp.issubdtype(target.dtype, jnp.floating):
        return _soft_cross_entropy(logs, target, weight, reduction, label_smoothing, axis)
    counted = target != ignore_index
    classes = jnp.where(counted, target, 0)
    ratio = jnp.ones((), x.dtype) if weight is None else weight[classes]
    losses = -jnp.take_along_axis(logs, jnp.expand_dims(classes, axis), axis=axis).squeeze(axis) * ratio
    total = jnp.sum(jnp.where(counted, ratio, 0))
    if label_smoothing:
        shape = [1] * x.ndim
        shape[axis] = -1
        each = logs if weight is None else logs * weight.reshape(shape)
        smooth = -jnp.sum(each, axis=axis) / x.shape[axis]
        losses = (1 - label_smoothing) * losses + label_smoothing * smooth
    losses = jnp.where(counted, losses, 0)
    return jnp.sum(losses) / total if reduction == _MEAN else _reduced(losses, reduction)


def _soft_cross_entropy(
    logs: Array, target: Array, weight: Array | None, reduction: int, label_smoothing: float, axis: int
) -> Array:
    classes = logs.shape[axis]
    target = target * (1 - label_smoothing) + label_smoothing / classes
    if weight is not None:
        shape = [1] * logs.ndim
        shape[axis] = -1
        logs = logs * weight.reshape(shape)
    losses = -jnp.sum(logs * target, axis=axis)
    return jnp.sum(losses) / (logs.size // classes) if reduction == _MEAN else _reduced(losses, reduction)


def _bce_with_logits(
    x: Array, target: Array, weight: Array | None = None, pos_weight: Array | None = None, reduction: int = _MEAN
) -> Array:
    positive, negative = jax.nn.log_sigmoid(x), jax.nn.log_sigmoid(-x)
    losses = -(target * positive * (1 if pos_weight is None else pos_weight) + (1 - target) * negative)
    return _reduced(losses if weight is None else losses * weight, reduction)


def _embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    if padding_idx >= 0:  # its row has no gradient
        weight = weight.at[padding_idx].set(lax.stop_gradient(weight[padding_idx]))
    return jnp.take(weight, indices, axis=0)


def _no_dropout(x: Array, p: float, train: bool) -> Array:
    """Those that draw are torch's."""
    return x


def _einsum(equation: str, tensors: Sequence[Array], *, path: Any = None) -> Array:
    return jnp.einsum(equation, *tensors)


LAYERS: Mapping[str, Operator] = {
    "linear": _linear,
    "matmul": jnp.matmul,
    "mm": jnp.matmul,
    "bmm": jnp.matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "einsum": _einsum,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "conv_transpose1d": _transposed_convolution,
    "conv_transpose2d": _transposed_convolution,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "max_pool1d": _max_pool(1),
    "max_pool2d": _max_pool(2),
    "avg_pool1d": _avg_pool(1),
    "avg_pool2d": _avg_pool(2),
    "adaptive_avg_pool1d": _adaptive_avg_pool(1),
    "adaptive_avg_pool2d": _adaptive_avg_pool(2),
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "dropout": _no_dropout,
    "cross_entropy_loss": _cross_entropy,
    "mse_loss": lambda x, target, reduction=_MEAN: _reduced(jnp.square(x - target), reduction),
    "l1_loss": lambda x, target, reduction=_MEAN: _reduced(jnp.abs(x - target), reduction),
    "binary_cross_entropy_with_logits": _bce_with_logits,
}
