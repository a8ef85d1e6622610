"""Losses of a prediction and a target."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from isthmus.training.jax.arrays import Operator, expect, is_real, of_one, of_several, together, wide
from isthmus.training.jax.elementwise import ELEMENTWISE
from isthmus.training.jax.reductions import log_softmax

_MEAN, _SUM = 1, 2  # torch's numbers of reductions; 0 is none


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
    logs, weight = log_softmax(x, axis), wide(weight)
    if is_real(target):
        return _soft_cross_entropy(wide(logs), wide(target), weight, reduction, label_smoothing, axis)
    counted = target != ignore_index
    expect(~counted | (target >= 0) & (target < x.shape[axis]))
    classes = jnp.where(counted, target, 0)
    ratio = jnp.ones((), wide(logs).dtype) if weight is None else weight[classes]
    taken = jnp.take_along_axis(logs, jnp.expand_dims(classes, axis), axis=axis).squeeze(axis)
    losses = -wide(taken) * ratio
    total = jnp.sum(jnp.where(counted, ratio, 0))
    if label_smoothing:
        shape = [1] * x.ndim
        shape[axis] = -1
        each = wide(logs) if weight is None else wide(logs) * weight.reshape(shape)
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
    x, target, weight, pos_weight = map(wide, (x, target, weight, pos_weight))
    below = ELEMENTWISE["log_sigmoid"](x)
    below = below if pos_weight is None else below * ((pos_weight - 1) * target + 1)
    losses = (1 - target) * x - below
    return _reduced(losses if weight is None else losses * weight, reduction)


def _of_difference(loss: Operator) -> Operator:
    """`loss(difference, *options)`, reduced."""

    def of(x: Array, target: Array, reduction: int = _MEAN, *options: float) -> Array:
        x, target = together(x, target)
        return _reduced(loss(x - target, *options), reduction)

    return of


def _smooth_l1(x: Array, target: Array, reduction: int = _MEAN, beta: float = 1.0) -> Array:
    def slope(d: Array) -> Array:
        return jnp.where(d <= -beta, -1, jnp.where(d >= beta, 1, d / (beta or 1)))

    def value(x: Array, target: Array) -> Array:
        far = jnp.abs(x - target)
        return jnp.where(far < beta, 0.5 * far * far / (beta or 1), far - 0.5 * beta)

    # With `beta` 0 both gradients of equal numbers are -g.
    losses = of_several(value, lambda g, x, target: (g * slope(x - target), g * slope(target - x)))
    return _reduced(losses(*together(x, target)), reduction)


def _huber(far: Array, delta: float = 1.0) -> Array:
    return of_one(
        lambda d: jnp.where(jnp.abs(d) <= delta, 0.5 * d * d, delta * (jnp.abs(d) - 0.5 * delta)),
        lambda g, d, _: g * jnp.clip(d, -delta, delta),
    )(far)


LOSSES: Mapping[str, Operator] = {
    "cross_entropy_loss": _cross_entropy,
    "mse_loss": _of_difference(ELEMENTWISE["square"]),
    "l1_loss": _of_difference(ELEMENTWISE["abs"]),
    "smooth_l1_loss": _smooth_l1,
    "huber_loss": _of_difference(_huber),
    "binary_cross_entropy_with_logits": _bce_with_logits,
}
