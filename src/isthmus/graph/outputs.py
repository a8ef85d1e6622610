"""A module's outputs as a loss and its count. Nothing here needs torch.export, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.graph.label_means import LabelMeans
from isthmus.graph.metrics import NO_METRICS, LossAndOutput, Metrics, added

Batch = Mapping[str, Tensor]


def split_outputs(result: object) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(loss, count, other outputs) of what a forward returned.

    A scalar; (loss_sum, count, ...) with both scalars; or a mapping with `loss` (and `count`, when `loss` is a sum).
    """
    count: Tensor | None = None
    others: dict[str, Tensor] = {}
    loss = result["loss"] if isinstance(result, LossAndOutput) else result
    if isinstance(loss, Mapping):
        found = cast(Mapping[str, object], loss)
        if "loss" not in found:
            raise UserError(f"model: forward returned a mapping with {sorted(found)}, expected a scalar under 'loss'")
        loss, count = found["loss"], _as_count(found.get("count"))
        others = {k: v for k, v in found.items() if k not in ("loss", "count") and isinstance(v, Tensor)}
    elif isinstance(loss, (tuple, list)) and loss:
        values = cast("tuple[object, ...]", tuple(loss))
        loss, rest = values[0], values[1:]
        if rest and (isinstance(rest[0], (int, torch.SymInt)) or (isinstance(rest[0], Tensor) and rest[0].ndim == 0)):
            count, rest = _as_count(rest[0]), rest[1:]
        others = {f"output_{i}": v for i, v in enumerate(rest) if isinstance(v, Tensor)}
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.dtype.is_floating_point:
        raise UserError(
            f"model: forward returned {_shape(loss)} as its loss, expected a scalar floating-point tensor, "
            "(loss_sum, count) or a mapping with 'loss'"
        )
    return loss, count, others


def _as_count(value: object) -> Tensor | None:
    if value is None or (isinstance(value, Tensor) and value.ndim == 0):
        return value
    if isinstance(value, (int, torch.SymInt)):
        return torch.full((), cast(int, value), dtype=torch.int64)
    raise UserError(f"model: forward returned {_shape(value)} as its count, expected an integer or a scalar tensor")


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        sizes = ", ".join(str(s) if type(s) is int else "batch" for s in value.shape)
        return f"a tensor of shape [{sizes}] and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__}"


def loss_and_count(
    module: nn.Module,
    batch: Batch,
    *,
    uneven: bool,
    call: Callable[..., object] | None = None,
    metrics: Metrics = NO_METRICS,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The mean loss of a batch, or the sum and the count of what it is a mean of, as captured graphs have it; and the
    sums of metrics. `call` is called in the module's place. `uneven`: whether a loss may leave labels out."""
    with LabelMeans(module, batch.values(), uneven=uneven) as means:
        output = (call or module)(**batch)
    loss, count, _ = means.summed(*split_outputs(output))
    return loss, count, metrics.sums(output, batch, means.compared())


def evaluate(
    module: nn.Module, batches: Iterable[Batch], metrics: Metrics, *, uneven: bool
) -> tuple[float, dict[str, float | None]]:
    """The mean loss and the metrics of all samples of some batches. UserError of a metric."""
    total, counted, sums = 0.0, 0.0, list[float]()
    for batch in batches:
        loss, count, more = loss_and_count(module, batch, uneven=uneven, metrics=metrics)
        samples = len(next(iter(batch.values())))
        total += float(loss) * (samples if count is None else 1)
        counted += samples if count is None else float(count)
        sums = added(sums, more.tolist())
    mean = total / (counted or 1.0)
    return mean, metrics.values(mean, sums)
