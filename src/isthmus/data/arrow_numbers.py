"""Columns of Arrow as arrays of numbers, by their declared type. What numpy has no place for is refused by its row: a
null would become another number, and so would a whole number above 2^63."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from isthmus.data.dataset import Array, ColumnSpec
from isthmus.errors import UserError
from isthmus.extensions import import_extra

MOST_WHOLE = 2**63 - 1


def inner_type(held: Any) -> Any:
    """Return the type of a list's elements or of an extension's storage; None for all other types."""
    types = import_extra("pyarrow.types")
    if types.is_list(held) or types.is_large_list(held) or types.is_fixed_size_list(held):
        return held.value_type
    return getattr(held, "storage_type", None)


def number_type(held: Any) -> str | None:
    """Whole numbers are int64, fractions float32, as torch takes Python's; None for a type that holds no numbers."""
    types = import_extra("pyarrow.types")
    while (inner := inner_type(held)) is not None:
        held = inner
    if types.is_boolean(held):
        return "bool"
    if types.is_integer(held):
        return "int64"
    return "float32" if types.is_floating(held) else None


def numbers_of(
    values: Any, named: str, rows: Sequence[int] | NDArray[np.int64], *, scalars_as_declared: bool = False
) -> Array:
    """[rows, *shape] of pyarrow's array; with `scalars_as_declared` a column without lists keeps its type. UserError,
    which says where by `named` and the row (`rows` are their numbers from 0, it says it from 1), for nulls, rows of
    several shapes, and numbers that int64 has no place for."""
    wanted = number_type(values.type)
    if wanted is None:
        raise UserError(f"{named}: got {values.type}, expected numbers")
    shape = [len(values)]
    while (inner := inner_type(values.type)) is not None:
        values = getattr(values, "storage", values)  # Hugging Face's Array2D and others
        if values.type == inner:
            continue
        check_nulls(values, named, rows, shape)
        lengths = np.asarray(values.value_lengths().to_numpy(zero_copy_only=False))
        if len(different := np.flatnonzero(lengths != lengths[:1])):
            row = _row(int(different[0]), shape, rows)
            got = f"{int(lengths[different[0]])} numbers where the first has {int(lengths[0])}"
            raise UserError(f"{named}, row {row}: got {got}: rows differ in shape, expected one of all")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
    check_nulls(values, named, rows, shape)
    found = values.to_numpy(zero_copy_only=False)
    if len(found) != math.prod(shape):
        raise UserError(f"{named}: rows differ in shape, expected one of all")
    if scalars_as_declared and len(shape) == 1:
        return found
    if found.dtype == np.uint64 and len(large := np.flatnonzero(found > MOST_WHOLE)):
        _refuse_large(int(found[large[0]]), f"{named}, row {_row(int(large[0]), shape, rows)}")
    return found.reshape(shape).astype(wanted, copy=False)


def spec_of(first: Any, named: str, row: int) -> ColumnSpec:
    """Return the spec of a column of scalars as declared, by its first row in pyarrow. UserError as `numbers_of`."""
    found = numbers_of(first, named, [row], scalars_as_declared=True)
    return ColumnSpec(dtype=found.dtype.name, shape=found.shape[1:])


def as_numbers(values: Array, named: str) -> Array:
    """Arrays of other sources: whole numbers as int64, fractions as float32. UserError as `numbers_of`."""
    if values.dtype.kind == "u" and values.size and int(values.max()) > MOST_WHOLE:
        _refuse_large(int(values.max()), named)
    wanted = {"i": "int64", "u": "int64", "f": "float32"}.get(values.dtype.kind)
    return values if wanted is None else values.astype(wanted, copy=False)


def check_nulls(values: Any, named: str, rows: Sequence[int] | NDArray[np.int64], shape: Sequence[int] = (1,)) -> None:
    """UserError for a null, with its row; `values` are those of rows of this `shape`, [rows, ...]."""
    if values.null_count:
        missing = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
        what = "got null, expected a value in every row"
        raise UserError(f"{named}, row {_row(int(missing[0]), shape, rows)}: {what}")


def _row(place: int, shape: Sequence[int], rows: Sequence[int] | NDArray[np.int64]) -> int:
    """Counted from 1, of a place among all numbers."""
    return int(rows[place // max(1, math.prod(shape[1:]))]) + 1


def _refuse_large(number: int, named: str) -> NoReturn:
    raise UserError(f"{named}: got {number}, expected whole numbers up to 2^63 - 1")
