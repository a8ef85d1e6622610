"""Data sets that a caller gives as Python objects: read once, and written as arrays that devices open."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from isthmus.data.arrays import ArrayDataset
from isthmus.errors import UserError, users_code
from isthmus.extensions import takes
from isthmus.models import base_of


class MapDataset(Protocol):
    """A map-style `torch.utils.data.Dataset`: sample i is a mapping by column, or a tuple in the order of the model's
    inputs."""

    def __len__(self) -> int: ...
    def __getitem__(self, sample: int, /) -> object: ...


Arrays = dict[str, NDArray[np.generic]]
Samples = Mapping[str, object] | MapDataset | Callable[..., object]
"""Columns by name (tensors or arrays, whose first dimension is the sample), a map-style data set, or a callable that
returns one of these; a callable that takes `split` is asked for "train" and "heldout"."""


def read_arrays(data: Samples, names: Callable[[int], list[str]], split: str = "train") -> Arrays:
    """Every sample, by column; `names` are those of the parts of a sample that is a tuple, by how many there are.

    All is held in memory at once: for data that do not fit, a job names a data set of your own as
    "package.module:callable", which devices read as they need it.
    Samples that are drawn at random are drawn once. UserError for a data set without a length, for samples that differ
    in columns or shape, and for values that are no plain numbers.

    >>> read_arrays([(torch.zeros(3), 1), (torch.ones(3), 0)], lambda count: ["x", "labels"])["labels"]
    array([1, 0])
    """
    if callable(data) and not hasattr(data, "__getitem__"):
        with users_code("data"):
            data = cast(Samples, data(split=split) if takes(data, "split") else data())
    if isinstance(data, Mapping):
        arrays = {str(name): _array(column, str(name)) for name, column in data.items()}
    else:
        arrays = _stacked(data, names)
    ArrayDataset(arrays, "data")  # which refuses what is no column
    return arrays


def write_arrays(arrays: Arrays, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def input_names(model: nn.Module, count: int) -> list[str]:
    """The first parameters of the model's forward. UserError where it takes fewer."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(base_of(model).forward).parameters.values() if p.kind in kinds]
    if len(names) < count:
        raise UserError(
            f"data: a sample has {count} parts, forward of {type(model).__name__} takes {len(names)} by name "
            f"({', '.join(names) or 'none'}): give a mapping by column, or a loss"
        )
    return names[:count]


def _stacked(data: object, names: Callable[[int], list[str]]) -> Arrays:
    missing = [name for name in ("__len__", "__getitem__") if isinstance(data, str) or not hasattr(data, name)]
    if missing:
        what = f"{type(data).__name__} has no {' and no '.join(missing)}"
        raise UserError(f"data: {what}, expected a mapping of columns, a map-style data set, or a callable")
    samples = cast(MapDataset, data)
    with users_code("data"):
        length = len(samples)
    rows: dict[str, list[NDArray[np.generic]]] = {}
    for number in range(length):
        with users_code(f"data: sample {number}"):
            sample = samples[number]
        named = _named(sample, names)
        if number and named.keys() != rows.keys():
            raise UserError(f"data: sample {number}: has columns {', '.join(named)}, sample 0 has {', '.join(rows)}")
        for name, value in named.items():
            found = _array(value, name)
            if number and found.shape != rows[name][0].shape:
                raise UserError(
                    f"data: sample {number}, column {name!r}: shape {found.shape}, sample 0 has {rows[name][0].shape}"
                )
            rows.setdefault(name, []).append(found)
    if not rows:
        raise UserError("data: holds no samples")
    return {name: np.stack(found) for name, found in rows.items()}


def _named(sample: object, names: Callable[[int], list[str]]) -> Mapping[str, object]:
    if isinstance(sample, Mapping):
        return cast("Mapping[str, object]", sample)
    parts = cast("Sequence[object]", sample) if isinstance(sample, tuple | list) else (sample,)
    return dict(zip(names(len(parts)), parts, strict=True))


def _array(value: object, name: str) -> NDArray[np.generic]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
        return value.numpy()
    found: NDArray[np.generic] = np.asarray(value)
    if found.dtype == object:
        raise UserError(f"data: column {name!r}: got {type(value).__name__}, expected tensors, arrays or numbers")
    return found
