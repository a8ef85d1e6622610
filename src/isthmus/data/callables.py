"""A data set of the user's own, named in a job as `package.module:callable`."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from isthmus.data.dataset import (
    Array,
    ArrayDataset,
    ColumnSpec,
    Dataset,
    Indices,
    Split,
    as_tensors,
    check_columns,
    checked,
    fingerprint_of,
    missing_members,
)
from isthmus.errors import StepError, UserError, users_code
from isthmus.extensions import check_arguments, import_extra, import_object, takes
from isthmus.rng import stream

if TYPE_CHECKING:
    import torch


class MapStyle(Protocol):
    """A map-style `torch.utils.data.Dataset`: sample i is a dict of numbers, arrays or tensors, by column."""

    def __len__(self) -> int: ...
    def __getitem__(self, sample: int, /) -> Mapping[str, object]: ...


def is_callable_name(kind: str) -> bool:
    return ":" in kind


def load_callable(kind: str, options: Mapping[str, object], split: Split) -> Dataset:
    """Return what `callable(split=..., **options)` makes: a `Dataset`, a map-style one of torch's, which is wrapped, or
    a mapping of columns.

    UserError for a callable that cannot be imported, refuses the options, or returns something else.
    """
    make = import_object("data kind", kind)
    if not callable(make):
        raise UserError(f"data kind {kind!r}: expected a callable that returns a data set, got {make!r}")
    if "split" in options:
        raise UserError(f"data kind {kind!r}: got an option 'split', which is train or heldout: expected another name")
    if not takes(make, "split"):
        raise UserError(f"data kind {kind!r}: takes no argument 'split', expected one: it is given train or heldout")
    given = {"split": split, **options}
    check_arguments("data kind", kind, make, given)
    with users_code(f"data kind {kind!r}"):
        made: object = make(**given)
    if isinstance(made, Mapping):
        columns = cast("Mapping[object, object]", made)
        arrays = {str(name): np.asarray(column) for name, column in columns.items()}
        return ArrayDataset(arrays, f"data kind {kind!r}")
    missing = missing_members(made)
    if not missing:
        return cast(Dataset, made)
    if {"__len__", "__getitem__"} <= set(dir(made)):
        return MappedDataset(cast(MapStyle, made), kind)
    raise UserError(
        f"data kind {kind!r}: {type(made).__name__} has no {', '.join(missing)}; a map-style data set has __len__ and "
        "__getitem__"
    )


class MappedDataset:
    """A map-style data set. What it draws from the generators of torch, numpy and Python while a sample is read is
    set by (seed, epoch, sample), and the generators are put back. Columns are those of sample 0.

    UserError for samples that are no dicts of numbers, `StepError` for one that differs from sample 0 in shape.
    """

    def __init__(self, samples: MapStyle, kind: str) -> None:
        self._samples = samples
        self._kind = kind
        if not len(samples):
            raise UserError(f"data kind {kind!r}: holds no samples")

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return self._columns

    @cached_property
    def _columns(self) -> Mapping[str, ColumnSpec]:
        with users_code(f"data kind {self._kind!r}, sample 0"):
            first = self._read(0, 0, 0)
        return {name: ColumnSpec(dtype=array.dtype.name, shape=array.shape) for name, array in first.items()}

    @property
    def fingerprint(self) -> str:
        """Its own where it has one; else all samples are read, as they are in epoch 0."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        own: object = getattr(self._samples, "fingerprint", None)
        if isinstance(own, str):
            return own
        digest = hashlib.sha256(self._kind.encode())
        for sample in range(len(self)):
            with users_code(f"data kind {self._kind!r}, sample {sample}"):
                found = self._read(sample, 0, 0)
            digest.update(fingerprint_of({"columns": list(found)}, found.values()).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        """Samples draw as with seed 0 in epoch 0."""
        return self.drawn(indices, columns, 0, np.zeros(len(indices), dtype=np.int64))

    def drawn(
        self, indices: Indices, columns: Sequence[str], seed: int, epochs: NDArray[np.int64]
    ) -> dict[str, torch.Tensor]:
        """Return the same as `batch`, of these epochs."""
        check_columns(columns, self.columns)
        samples = checked(indices, len(self))
        arrays: dict[str, Array] = {
            name: np.empty((len(samples), *self.columns[name].shape), dtype=self.columns[name].dtype)
            for name in columns
        }
        for row, (sample, epoch) in enumerate(zip(samples, epochs, strict=True)):
            found = self._read(int(sample), seed, int(epoch))
            for name in columns:
                self._check(found, name, int(sample))
                arrays[name][row] = found[name]
        return as_tensors(arrays)

    def _check(self, found: Mapping[str, Array], name: str, sample: int) -> None:
        if name not in found:
            raise StepError(f"data kind {self._kind!r}, sample {sample}", f"has no column {name!r}, sample 0 has")
        if found[name].shape != self.columns[name].shape:
            raise StepError(
                f"data kind {self._kind!r}, sample {sample}",
                f"column {name!r}: got shape {list(found[name].shape)}, expected {list(self.columns[name].shape)} as "
                "sample 0 has",
            )

        if not np.can_cast(found[name].dtype, self.columns[name].dtype, "same_kind"):
            raise StepError(
                f"data kind {self._kind!r}, sample {sample}",
                f"column {name!r}: got {found[name].dtype}, expected {self.columns[name].dtype} as sample 0 has",
            )

    def _read(self, sample: int, seed: int, epoch: int) -> dict[str, Array]:
        with _seeded(stream(seed, "augment", epoch, sample)):
            found = cast(object, self._samples[sample])
        if not isinstance(found, Mapping):
            raise UserError(
                f"data kind {self._kind!r}, sample {sample}: got {type(found).__name__}, expected a dict of columns"
            )
        columns = cast("Mapping[object, object]", found)
        return {str(name): self._array(value, f"{name!r} of sample {sample}") for name, value in columns.items()}

    def _array(self, value: object, named: str) -> Array:
        array = np.asarray(value)
        if isinstance(value, float):
            array = array.astype(np.float32)  # as torch takes Python's numbers
        if array.dtype.kind not in "biuf":
            raise UserError(f"data kind {self._kind!r}: column {named}: got {array.dtype}, expected numbers")
        return array


@contextlib.contextmanager
def _seeded(draws: np.random.Generator) -> Generator[None]:
    torch = import_extra("torch", "the data")
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seeds = draws.integers(2**32, size=3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))
    torch.default_generator.manual_seed(int(seeds[2]))  # `torch.manual_seed` seeds every accelerator too
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
