"""Checks of arguments that some operators take for granted, made before they are called.

Torch's kernels for these read or write beyond a tensor, or return memory that they have not written, where an argument
is not what the public function would have given. Found by `tests/graph/test_hostile_operators.py`, which calls every
operator of the allow-list with such arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

Arguments = Mapping[str, object]  # those of one call, by their names in the schema
_WINDOW = 1024  # the size, stride, padding or dilation of a window that any input may have


def _recurrent(gates: int) -> Callable[[Arguments], None]:
    """The weights of every layer and direction have the sizes that the input and the hidden state imply."""

    def check(given: Arguments) -> None:
        inputs, weights = cast(Tensor, given["input"]), cast("Sequence[Tensor]", given["params"])
        state = given["hx"]
        states = [state] if isinstance(state, Tensor) else cast("Sequence[Tensor]", state)
        directions = 2 if given["bidirectional"] else 1
        layers = cast(int, given["num_layers"])
        _require(inputs.dim() == 3 and all(s.dim() == 3 for s in states), "input and hidden state have 3 dimensions")
        _require(inputs.numel() > 0 and layers > 0, "input is not empty")
        _require(len(states) == (2 if gates == 4 else 1), "as many states as the cell has")
        _require(len({t.dtype for t in (inputs, *states, *weights)}) == 1, "all tensors have one dtype")
        out, hidden = states[0].shape[2], states[-1].shape[2]
        batch = inputs.shape[0 if given["batch_first"] else 1]
        count = directions * layers
        _require(
            [tuple(s.shape) for s in states] == [(count, batch, out), (count, batch, hidden)][-len(states) :],
            "hidden states fit the input",
        )
        wanted: list[tuple[int, ...]] = []
        for layer in range(layers if len(weights) >= count else 0):
            size = inputs.shape[2] if layer == 0 else out * directions
            one = [(gates * hidden, size), (gates * hidden, out)]
            one += [(gates * hidden,)] * 2 if given["has_biases"] else []
            one += [(out, hidden)] if out != hidden else []
            wanted += one * directions
        _require([tuple(w.shape) for w in weights] == wanted, "weights fit the input and the hidden state")

    return check


def _weight_norm(given: Arguments) -> None:
    direction, length, dim = cast(Tensor, given["v"]), cast(Tensor, given["g"]), cast(int, given.get("dim", 0))
    _require(direction.dtype == length.dtype and direction.numel() > 0, "two tensors of one dtype, not empty")
    _require(-1 <= dim < direction.dim(), "dim of the tensor, or -1")
    # what torch.norm_except_dim gives
    shape = [1] * direction.dim() if dim >= 0 else []
    if dim >= 0:
        shape[dim] = direction.shape[dim]
    _require(list(length.shape) == shape, f"one length for each slice along dim {dim}")


def _grid_sampler(given: Arguments) -> None:
    """Coordinates that overflow are not numbers after reflection, and then indices beyond the image."""
    grid, image = cast(Tensor, given["grid"]), cast(Tensor, given["input"])
    if given["padding_mode"] != 0 and grid.is_floating_point():
        largest = torch.finfo(grid.dtype).max / (4 * max(image.shape, default=1) + 4)
        _require(bool((grid.abs() <= largest).all()), "a grid of finite coordinates")


def _one_shape(given: Arguments) -> None:
    shape = cast(Tensor, given["self"]).shape
    _require(shape == cast(Tensor, given["target"]).shape, "predictions and targets of one shape")


def _not_empty(given: Arguments) -> None:
    """Kernels leave the loss of no sample unwritten, and the gradient of nothing."""
    _require(cast(Tensor, given["self"]).numel() > 0, "a tensor that is not empty")


def _labels_of_many(given: Arguments) -> None:
    """The kernel takes each class id for an index."""
    _not_empty(given)
    _one_shape(given)
    scores, classes = cast(Tensor, given["self"]), cast(Tensor, given["target"])
    _require(scores.dim() in (1, 2), "one or two dimensions")
    _require(classes.dtype == torch.int64, "class ids of int64")
    _require(bool(((classes >= -1) & (classes < scores.shape[-1])).all()), f"class ids below {scores.shape[-1]}, or -1")


def _complex(given: Arguments) -> None:
    _require(cast(Tensor, given["self"]).is_complex(), "a complex tensor")


def _attention(given: Arguments) -> None:
    """The fused kernels take the lengths and sizes of keys and values from one of them, or from the queries."""
    query, key, value = (cast(Tensor, given[name]) for name in ("query", "key", "value"))
    tensors, mask, rate = (query, key, value), given.get("attn_mask"), cast(float, given.get("dropout_p", 0.0))
    _require(len({t.dim() for t in tensors}) == 1 and query.dim() >= 2, "queries, keys and values of one rank")
    _require(all(t.numel() > 0 for t in tensors), "queries, keys and values that are not empty")
    _require(not _overlaps(query), "queries that do not overlap")  # the result takes their strides
    _require(len({t.dtype for t in tensors}) == 1 and query.is_floating_point(), "tensors of one floating dtype")
    _require(query.shape[-1] == key.shape[-1], "queries and keys of one size")
    _require(key.shape[-2] == value.shape[-2], "as many keys as values")
    if given.get("enable_gqa"):
        heads = [t.shape[-3] for t in tensors] if query.dim() >= 3 else [1, 1, 1]
        _require(heads[1] == heads[2] and heads[0] % heads[1] == 0, "query heads that are a multiple of those of keys")
        outer = [t.shape[:-3] for t in tensors]
    else:
        outer = [t.shape[:-2] for t in tensors]
    batch = _broadcast(outer, "batches and heads of one shape")
    _require(0 <= rate <= 1, "a dropout from 0 to 1")
    scale = given.get("scale")
    _require(scale is None or math.isfinite(cast(float, scale)), "a finite scale")
    if isinstance(mask, Tensor):
        _require(mask.dtype in (torch.bool, query.dtype), "a mask of booleans or of the queries' dtype")
        rows = [*(query.shape[:-2] if given.get("enable_gqa") else batch), query.shape[-2], key.shape[-2]]
        _require(list(_broadcast([mask.shape, rows], "a mask that fits")) == rows, "a mask that fits")


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements are shared otherwise than by an expanded dimension."""
    end = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride:
            if stride <= end:
                return True
            end += (size - 1) * stride
    return False


def _broadcast(shapes: Sequence[Sequence[int]], what: str) -> Sequence[int]:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ValueError(what) from None


def _padding(given: Arguments) -> None:
    """Where values are repeated, kernels leave unwritten what a negative padding takes away, or its gradient."""
    if given.get("mode", "repeats" if "padding" in given else "constant") == "constant":
        return
    numbers = cast("Sequence[int]", given["pad" if "pad" in given else "padding"])
    _require(all(n >= 0 for n in numbers), "no negative padding but with a constant")
    _not_empty(given)


def _division(given: Arguments) -> None:
    """The quotient of the least integer and -1 is no integer of its type, for which processors raise a signal."""
    above, below = cast("Tensor | int", given["self"]), cast("Tensor | int", given["other"])
    kind = torch.result_type(above, below)
    if kind in (torch.int8, torch.int16, torch.int32, torch.int64):
        least = torch.as_tensor(above) == torch.iinfo(kind).min
        _require(not bool((least & (torch.as_tensor(below) == -1)).any()), "no least integer divided by -1")


def _windows(dims: int) -> Callable[[Arguments], None]:
    """Windows beyond the input overflow where kernels multiply their sizes, in the backward at the latest."""

    def check(given: Arguments) -> None:
        shape = cast(Tensor, given["input" if "input" in given else "self"]).shape
        spatial = _numbers(given["output_size"], dims) if "output_size" in given else shape[-dims:]
        for name in ("kernel_size", "stride", "padding", "dilation", "output_padding"):
            numbers = _numbers(given.get(name), dims)
            fits = all(abs(v) <= max(_WINDOW, size) for v, size in zip(numbers, spatial, strict=False))
            _require(fits, f"{name} of at most {_WINDOW} or the size of the input")

    return check


def _numbers(value: object, count: int) -> Sequence[int]:
    """Return the numbers of a list argument. A graph may give one for all; the name of a padding has none."""
    if isinstance(value, int):
        return [value] * count
    numbers = cast("Sequence[int]", value) if isinstance(value, (list, tuple)) else ()
    return [*numbers] * count if len(numbers) == 1 else numbers


def _embedding_bag(given: Arguments) -> None:
    rows, at, offsets = (cast(Tensor, given[name]) for name in ("weight", "indices", "offsets"))
    _require(rows.dim() == 2 and at.dim() == 1 and offsets.dim() == 1, "a table, indices and offsets")
    bounds = [0, *offsets.tolist(), at.numel()]
    _require(len(bounds) > (3 if given.get("include_last_offset") else 2), "at least one bag")
    _require(bounds == sorted(bounds) and bounds[1] == 0, "offsets that rise from 0 to the number of indices")
    _require(bool(((at >= 0) & (at < rows.shape[0])).all()), f"indices from 0 to {rows.shape[0] - 1}")


def _ctc_loss(given: Arguments) -> None:
    targets, lengths = cast(Tensor, given["targets"]), torch.as_tensor(given["target_lengths"])
    classes = cast(Tensor, given["log_probs"]).shape[-1]
    _require(targets.dim() in (1, 2) and lengths.dim() == 1, "targets of 1 or 2 dimensions and a list of lengths")
    in_a_row = targets.dim() == 2 or targets.is_contiguous()  # the kernel counts without strides where samples begin
    _require(in_a_row, "targets of 1 dimension without gaps")
    within = (targets >= 0) & (targets < classes)
    if targets.dim() == 2:  # what lies beyond a target's length is padding
        within |= torch.arange(targets.shape[1], device=targets.device) >= lengths.to(targets.device)[:, None]
    _require(bool(within.all()), f"class ids from 0 to {classes - 1}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _strided_view(given: Arguments) -> None:
    """Torch lets a view reach all of the storage: what was freed before, and what lies beside a slice."""
    source = cast(Tensor, given["self"])
    sizes, strides = cast("Sequence[int]", given["size"]), cast("Sequence[int]", given["stride"])
    first = given.get("storage_offset")
    first = source.storage_offset() if first is None else cast(int, first)
    _require(len(sizes) == len(strides) and all(n >= 0 for n in (*sizes, *strides)), "a size and a stride for each dim")
    _require(first >= source.storage_offset(), "a view of elements of the tensor itself")
    if math.prod(sizes):
        _require(source.numel() > 0, "a view of elements of the tensor itself")
        end = source.storage_offset() + _reach(source.shape, source.stride())
        _require(first + _reach(sizes, strides) <= end, "a view of elements of the tensor itself")


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return how far the last element lies behind the first."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


_WINDOWED = ("conv", "conv_transpose", "max_pool", "avg_pool")
CHECKS: Mapping[str, Callable[[Arguments], None]] = {
    "as_strided": _strided_view,
    "as_strided_scatter": _strided_view,
    "lstm": _recurrent(4),
    "gru": _recurrent(3),
    "rnn_tanh": _recurrent(1),
    "rnn_relu": _recurrent(1),
    "_weight_norm": _weight_norm,
    **{f"{name}{n}d": _windows(n) for name in _WINDOWED for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": _windows(n) for n in (2, 3)},
    "im2col": _windows(2),
    "col2im": _windows(2),
    **dict.fromkeys(("div", "div_", "divide", "floor_divide", "fmod", "remainder"), _division),
    "_conj": _complex,
    "embedding_bag": _embedding_bag,
    "binary_cross_entropy": _one_shape,
    "multi_margin_loss": _not_empty,
    "multilabel_margin_loss": _labels_of_many,
    "ctc_loss": _ctc_loss,
    "grid_sampler": _grid_sampler,
    "scaled_dot_product_attention": _attention,
    "pad": _padding,
    **dict.fromkeys((f"{how}_pad{n}d" for how in ("reflection", "replication") for n in (1, 2, 3)), _padding),
}
"""Checks by name; they raise ValueError, which says what was expected."""
