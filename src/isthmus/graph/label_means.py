"""Means over labels, as sums and counts.

The loss of a step is a mean over all labels of its micro-batches, on all replicas, as transformers' Trainer has it with
`num_items_in_batch`. Where a loss leaves labels out (-100) or weighs classes, a mean of the means that a forward takes
over its own labels would be another objective with every number of micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import debug_unwrap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from isthmus.graph.metrics import Compared
from isthmus.graph.mixing import is_shared_out
from isthmus.graph.opgraph import Op, OpGraph, Ref
from isthmus.graph.partition import StageGraph
from isthmus.graph.schema import base_name

Outputs = tuple[Tensor, Tensor | None, dict[str, Tensor]]
_OVER_LABELS = {func: inspect.signature(func) for func in (F.cross_entropy, F.nll_loss)}
_OVER_CLASSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_EVEN = frozenset(  # operators that take a mean over as many items in every micro-batch of a size
    (
        "mean",
        *_OVER_CLASSES,
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "soft_margin_loss",
        "cosine_embedding_loss",
        "margin_ranking_loss",
        "hinge_embedding_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "poisson_nll_loss",
        "gaussian_nll_loss",
        "ctc_loss",
        "triplet_margin_loss",
    )
)
_LINEAR = frozenset(
    ("add", "sub", "mul", "div", "neg", "alias", "clone", "to", "_to_copy", "squeeze", "view", "reshape")
)
_MEAN = 1  # torch's number of reduction="mean"


class _LabelMean(NamedTuple):
    """A call of cross_entropy or nll_loss."""

    result: Tensor
    version: int
    function: Callable[..., Tensor]
    arguments: dict[str, Any]


class LabelMeans(TorchFunctionMode):
    """While active, remembers means that are taken over labels."""

    def __init__(self, module: nn.Module, columns: Iterable[Tensor], *, uneven: bool, in_float32: bool = False) -> None:
        """`uneven`: whether a column may hold labels that a loss leaves out. `in_float32`: losses are computed so, of
        whatever the module computes in."""
        super().__init__()
        self._in_float32 = in_float32
        self._uneven = uneven
        self._columns = list(columns)
        self._module = module
        self._found: list[_LabelMean] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._in_float32 and _is_loss(func, args, kwargs or {}):
            args, kwargs = tuple(map(_widened, args)), {name: _widened(value) for name, value in (kwargs or {}).items()}
        result = func(*args, **(kwargs or {}))
        if func is torch.arange:  # classes that are the samples' own numbers: every one counts
            self._columns.append(result)
        if func in _OVER_LABELS:
            bound = _OVER_LABELS[func].bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            # An in-place sum keeps the object: a term of the model's own may be in it.
            self._found.append(_LabelMean(result, result._version, func, dict(bound.arguments)))
        return result

    def summed(self, loss: Tensor, count: Tensor | None, others: dict[str, Tensor]) -> Outputs:
        """Return the outputs of `split_outputs` with a sum over labels and their count (or weight) in place of a mean
        over a number of labels that differs between micro-batches."""
        mean = self._mean(loss)
        if count is not None or mean is None or not self._differs(mean.arguments):
            return loss, count, others
        return mean.function(**{**mean.arguments, "reduction": "sum"}), _counted(mean.arguments), others

    def is_plain(self, loss: Tensor) -> bool:
        """Return whether a mean over labels that are all 0 or more has the bits of the sum over their count."""
        mean, coarse = self._mean(loss), loss.dtype.itemsize < torch.float32.itemsize
        return mean is None or not (coarse or self._differs(mean.arguments) or mean.arguments.get("label_smoothing"))

    def _mean(self, loss: Tensor) -> _LabelMean | None:
        return next((m for m in self._found if m.result is loss and m.version == loss._version), None)

    def compared(self) -> Compared | None:
        """The logits and labels of a loss with one cross-entropy of classes; None of any other loss."""
        calls = [mean.arguments for mean in self._found]
        if len(calls) != 1 or cast(Tensor, calls[0]["target"]).is_floating_point():
            return None
        return Compared(calls[0]["input"], calls[0]["target"], calls[0]["ignore_index"])

    def _differs(self, call: Mapping[str, Any]) -> bool:
        target = cast(Tensor, call["target"])
        asked = (call["reduction"], call["size_average"], call["reduce"])
        if target.is_floating_point() or asked != ("mean", None, None):
            return False
        if self._uneven or call["weight"] is not None or call["ignore_index"] >= 0:
            return True
        if _storage(target) in {_storage(column) for column in self._columns}:
            return False
        # Models of transformers move labels by one token, and leave the first of every sample out.
        return not any(is_hugging_face(part) for part in self._module.modules())


def _is_loss(func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether it takes a mean or a sum of everything: of one argument alone, or as a loss of torch's."""
    name = getattr(func, "__name__", "")
    if name in ("mean", "sum"):
        return len(args) == 1 and not kwargs
    return (name in _EVEN or func in _OVER_LABELS) and "none" not in (
        kwargs.get("reduction"),
        *(arg for arg in args if isinstance(arg, str)),
    )


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def _counted(call: Mapping[str, Any]) -> Tensor:
    """Return the divisor of torch's mean."""
    target, weight = cast(Tensor, call["target"]), cast("Tensor | None", call["weight"])
    counts = target != call["ignore_index"]
    if weight is None:
        return counts.sum()
    of_class = weight.index_select(0, target.clamp(min=0).flatten())
    return (of_class * counts.flatten().to(weight.dtype)).sum()


def _storage(tensor: Tensor) -> int:
    return debug_unwrap(tensor).untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def is_hugging_face(module: nn.Module) -> bool:
    """True if `module` is a transformers model. Does not import the library."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def own_mean(count: int, field: str) -> str:
    """Return the message where a loss is not even and `field` asks for so many micro-batches."""
    return (
        f"the model's loss is a mean of its own: with {count} micro-batches a step's loss is the mean of theirs, "
        f"which may differ from that of the whole batch. For that one return (loss_sum, count), or set {field} = 1"
    )


def is_even(graph: OpGraph | StageGraph, *, uneven: bool = False) -> bool:
    """Return whether the loss of a step is the same with any number of micro-batches of a size: a sum with its count, a
    mean over samples of one shape, or a sum of such means and of what depends on no sample. `uneven`: whether a column
    may hold labels that a loss leaves out; a mean over those is even only as a sum with its count, which a larger loss
    has not."""
    ops = {op.name: op for op in graph.ops}
    of_samples = _of_samples(graph)

    def even(ref: Ref) -> bool:
        op = ops.get(ref.op)
        if ref.op not in of_samples:
            return True
        if op is None or op.kind != "operator":
            return False
        refs = [r for r in op.refs() if r.op in of_samples]
        name = base_name(op.target)
        if name in _EVEN:
            every = name not in _OVER_CLASSES or not (uneven or _leaves_out(op))
            return every and _argument(op, "reduction", _MEAN) == _MEAN and all(of_samples[r.op] for r in refs)
        many = name in ("add", "sub")
        return name in _LINEAR and (many or refs == [op.args[0]]) and all(even(r) for r in refs)

    return graph.count is not None or graph.loss is None or even(graph.loss)


def _of_samples(graph: OpGraph | StageGraph) -> dict[str, bool]:
    """Return the values that differ between micro-batches, and whether each has each sample's own values: no operator
    before it made one value of all samples, by the shapes (of a graph for one batch size they do not say it). Written
    buffers and random numbers are as good as samples."""
    found: dict[str, bool] = {}
    here = {op.name for op in graph.ops}
    for op in graph.ops:
        found |= {r.op: True for r in op.refs() if r.op not in here}  # columns of a stage, and what it receives
        refs = [r for r in op.refs() if r.op in found]
        if refs:
            found[op.name] = all(map(is_shared_out, op.outputs[:1])) and all(found[r.op] for r in refs)
        elif op.kind == "placeholder" or op.written or op.random:
            found[op.name] = True
    return found


def _leaves_out(op: Op) -> bool:
    """Return whether classes have weights, or one of them is left out."""
    ignored = _argument(op, "ignore_index", -100)
    return _argument(op, "weight", None) is not None or not isinstance(ignored, int) or ignored >= 0


def _argument(op: Op, name: str, otherwise: object) -> object:
    packet, _, overload = op.target.removeprefix("aten.").partition(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
    for position, argument in enumerate(schema.arguments):
        if argument.name == name:
            return op.args[position] if position < len(op.args) else op.kwargs.get(name, argument.default_value)
    return otherwise
