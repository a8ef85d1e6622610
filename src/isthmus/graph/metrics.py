"""Metrics: figures of an evaluation beside its loss. One module for pipelines, replicas, clients and sites.

A metric is a function of what the model returned and of the batch: metric(outputs, batch) -> (sum, count), two scalar
tensors. Its value is the sum of all sums over the sum of all counts, so that it is exact whatever the batches are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import import_object
from isthmus.figures import FIGURES

Batch = Mapping[str, Tensor]
MetricFunction = Callable[[object, Batch], object]
LABELS = ("labels", "label", "targets", "target", "y")
"""Columns in which accuracy looks for labels, the first that is there."""
_TRACKED = {*FIGURES, "heldout_loss", "step", "event", "learning_rate", "faults"}
"""Columns that trackers have of every run."""
_GIVEN = "given:"
_given: dict[str, MetricFunction] = {}  # metric functions by name, in this process alone


_CAPTURED = ": it becomes part of the graph, expected torch operators only (no .item(), float() or numpy)"
_CROSS_ENTROPY = "expected a loss with one cross_entropy of the labels, or a function of your own"


class LossAndOutput(dict[str, object]):
    """The result of a model with a loss beside it: `loss`, and `output`, which metrics get."""


class Compared(NamedTuple):
    """The logits [n, classes, ...] or [classes] and the labels that the cross-entropy of a loss compares."""

    logits: Tensor
    labels: Tensor
    left_out: int  # labels of this value do not count


MetricSums = Callable[[object, Batch, Compared | None], Tensor]  # the type of `Metrics.sums`


class Metric(NamedTuple):
    name: str  # as people read it: of `package.module:function` the function's
    function: MetricFunction | None  # None of one that follows from the loss
    lower_is_better: bool = False


def accuracy(outputs: object, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return how many labels are the class of the largest logit, and how many labels there are.

    Logits and labels are those that the loss compares, moved or left out as they are there. Of a loss without one
    cross-entropy they are `logits` and a column of labels, where one dimension alone can be the classes'.
    """
    if isinstance(outputs, Compared):
        logits, labels, left_out = outputs
        return _found(logits.argmax(min(1, logits.ndim - 1)), labels, labels != left_out)
    logits, labels = _logits(outputs), _labels(batch)
    places = [d for d in {1, logits.ndim - 1} if d > 0 and logits.shape[:d] + logits.shape[d + 1 :] == labels.shape]
    if not places or logits.shape[places[0]] < 2 or labels.is_floating_point():
        raise UserError(
            f"metrics: accuracy: got logits {_form(logits)} and labels {_form(labels)}, expected logits of two classes "
            "or more in the last dimension and labels that are classes: whole numbers of the other dimensions"
        )
    ids = batch.get("input_ids")
    moved = ids is not None and ids.shape == labels.shape and labels.ndim > 1
    if moved or len(places) > 1:
        known = "whether labels are of the next token" if moved else "which dimension the classes are"
        raise UserError(
            f"metrics: accuracy: logits {_form(logits)} and labels {_form(labels)} do not say {known}: {_CROSS_ENTROPY}"
        )
    return _found(logits.argmax(places[0]), labels, labels >= 0)


def _found(guesses: Tensor, labels: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    return ((guesses == labels) & counted).sum(), counted.sum()


def _logits(outputs: object) -> Tensor:
    found = outputs
    if isinstance(outputs, Mapping):
        found = cast("Mapping[str, object]", outputs).get("logits")
    elif isinstance(outputs, tuple):
        tensors = [t for t in cast("tuple[object, ...]", outputs) if isinstance(t, Tensor) and t.ndim > 1]
        found = tensors[0] if tensors else None
    if isinstance(found, Tensor) and found.ndim:
        return found
    got = f"a mapping with {sorted(cast('Mapping[str, object]', outputs))}" if isinstance(outputs, Mapping) else ""
    raise UserError(
        f"metrics: accuracy: the model returned {got or _form(outputs)}, expected its logits beside the loss "
        f'({{"loss": loss, "logits": logits}}): {_CROSS_ENTROPY}'
    )


def _labels(batch: Batch) -> Tensor:
    found = next((batch[name] for name in LABELS if name in batch), None)
    if found is None:
        raise UserError(
            f"metrics: accuracy: got columns {', '.join(batch)}, expected one called {', '.join(LABELS[:-1])} or "
            f"{LABELS[-1]}"
        )
    return found


def _form(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    sizes = ", ".join(str(size) if type(size) is int else "batch" for size in value.shape)
    return f"[{sizes}] of {str(value.dtype).removeprefix('torch.')}" if value.ndim else "a scalar"


BUILT_IN: Mapping[str, Metric] = {
    "accuracy": Metric("accuracy", accuracy),
    "perplexity": Metric("perplexity", None, lower_is_better=True),
}


def give_metric(function: object) -> str:
    """The name by which a job refers to a metric that a caller gives as a Python object. UserError for no callable."""
    if isinstance(function, str):
        return function
    if not callable(function):
        raise UserError(f"metrics: got {function!r:.80}, expected a name or a function of (outputs, batch)")
    name = str(getattr(function, "__name__", type(function).__name__)).strip("<>")
    _given[name] = function
    return _GIVEN + name


def _find(name: str) -> Metric:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(_GIVEN):
        short, function = name.removeprefix(_GIVEN), _given.get(name.removeprefix(_GIVEN))
        if function is None:
            raise UserError(f"metrics: {short!r} is a Python object of another process: pass it again")
    elif ":" in name:
        short, function = name.rpartition(":")[2], import_object("metrics", name)
    else:
        raise unknown_name("metric", name, [*BUILT_IN, "package.module:function"])
    if not callable(function):
        raise UserError(f"metrics: {name}: got {function!r:.80}, expected a function of (outputs, batch)")
    return Metric(short, function, bool(getattr(function, "lower_is_better", False)))


class Metrics:
    """Those of a job, in its order."""

    def __init__(self, names: Sequence[str]) -> None:
        """UserError for a name that means nothing, a function that cannot be imported, a metric that is there twice."""
        self._all = tuple(map(_find, names))
        self._counted = [m for m in self._all if m.function is not None]
        self.names = tuple(m.name for m in self._all)
        for name in self.names:
            if self.names.count(name) > 1:
                raise UserError(f"metrics: got {name!r} twice, expected each name once")
            if name in _TRACKED or "/" in name:
                raise UserError(f"metrics: got {name!r}, expected another name: trackers have a column of this one")
        self.lower_is_better = frozenset({"loss", *(m.name for m in self._all if m.lower_is_better)})
        """The metrics of which a small value is a good one."""

    def sums(self, outputs: object, batch: Batch, compared: Compared | None) -> Tensor:
        """Return (sum, count) of each metric that does not follow from the loss, one after another, [2 x metrics].

        `compared` is what the loss compares, if one cross-entropy does. A function that returns one scalar is taken as
        the mean over the batch's samples. UserError for a function that raises, or returns anything else.
        """
        if isinstance(outputs, LossAndOutput):
            outputs = outputs["output"]
        found: list[Tensor] = []
        for metric in self._counted:
            found += _pair(metric, outputs if compared is None or metric.function is not accuracy else compared, batch)
        if not found:
            return torch.zeros(0)
        exact = any(t.dtype is torch.float64 for t in found)
        return torch.stack([t.to(torch.float64 if exact else torch.float32) for t in found])

    @property
    def counted(self) -> bool:
        """Return whether any is computed from outputs and labels."""
        return bool(self._counted)

    def values(self, loss: float | None, sums: Sequence[float]) -> dict[str, float | None]:
        """Return the values by name, from the mean loss and the summed sums and counts; None where a metric counted
        nothing or is not finite."""
        pairs = iter(zip(sums[::2], sums[1::2], strict=True))
        found: dict[str, float | None] = {}
        for metric in self._all:
            if metric.function is None:
                value = None if loss is None else _exp(loss)
            else:
                total, count = next(pairs, (0.0, 0.0))
                value = total / count if count else None
            found[metric.name] = value if value is not None and math.isfinite(value) else None
        return found


NO_METRICS = Metrics(())


def added(sums: Sequence[float], more: Sequence[float]) -> list[float]:
    """Sums and counts of two batches; of none yet, those of the other."""
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else list(more)


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _is_size(value: object) -> bool:
    """Return whether it follows from sizes alone: torch knows no example of what is read of a tensor."""
    return not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or value.node.has_hint()


def _pair(metric: Metric, outputs: object, batch: Batch) -> tuple[Tensor, Tensor]:
    assert metric.function is not None, "it is computed"
    try:
        found = metric.function(outputs, batch)
    except IsthmusError:
        raise
    except Exception as e:  # the user's own code
        said = " ".join(f"{type(e).__name__}: {e}".split())
        raise UserError(f"metrics: {metric.name} raised {said:.200}{_hint(e)}") from e
    parts = cast("tuple[object, ...]", tuple(found)) if isinstance(found, tuple | list) else (found,)
    if any(isinstance(part, torch.SymFloat | torch.SymBool) for part in parts):
        if all(map(_is_size, parts)):
            raise UserError(
                f"metrics: {metric.name} returned a fraction of a size, expected a whole number or a scalar tensor: "
                "compute it of tensors, as torch.ones_like(labels).sum() / 2"
            )
        raise UserError(f"metrics: {metric.name} reads a value of a tensor{_CAPTURED}")
    if len(parts) not in (1, 2) or not all(isinstance(p, int | float | torch.SymInt) or _scalar(p) for p in parts):
        raise UserError(
            f"metrics: {metric.name} returned {', '.join(map(_form, parts))}, expected (sum, count), two scalar "
            "tensors, or one scalar tensor: the mean over the batch's samples"
        )
    column = next(iter(batch.values()))
    first, *rest = (_tensor(part, column) for part in parts)
    if rest:
        return first.detach(), rest[0].detach()
    count = _tensor(column.shape[0], column)
    mean = first if first.dtype is torch.float64 else first.to(torch.float32)
    return (mean * count).detach(), count


def _scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and not value.dtype.is_complex


def _tensor(value: object, like: Tensor) -> Tensor:
    """Where the samples are."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    kind = torch.float64 if isinstance(value, float) else torch.int64
    return torch.full((), cast("int", value), dtype=kind, device=like.device)


def _hint(error: Exception) -> str:
    return _CAPTURED if "DataDependent" in type(error).__name__ or "FakeTensor" in str(error) else ""
