"""Several data sets as one, with the columns that all of them have."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from isthmus.data.dataset import ColumnSpec, Dataset, Indices, checked, joined
from isthmus.errors import UserError

if TYPE_CHECKING:
    import torch


class JoinedDataset:
    """The samples of one part after those of another, in the order of the parts."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        """UserError where there are none, or their columns differ."""
        self._parts = tuple(parts)
        self._columns = joined_columns({f"part {number}": part.columns for number, part in enumerate(parts)})
        self._starts = list(itertools.accumulate((len(part) for part in parts), initial=0))

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return self._columns

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over those of the parts, in their order."""
        return hashlib.sha256("\n".join(part.fingerprint for part in self._parts).encode()).hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        parts = [self._sample(position, columns) for position in checked(indices, len(self)).tolist()]
        return joined(parts) if parts else self._parts[0].batch([], columns)

    def _sample(self, position: int, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        part = bisect.bisect_right(self._starts, position) - 1
        return self._parts[part].batch([position - self._starts[part]], columns)


def joined_columns(parts: Mapping[str, Mapping[str, ColumnSpec]]) -> dict[str, ColumnSpec]:
    """Join the holders' columns, each with its largest limit. UserError where they differ in more, or none is given."""
    if not parts:
        raise UserError("data of several holders: got none, expected one at least")
    found: dict[str, ColumnSpec] = {}
    first, columns = next(iter(parts.items()))
    for name, part in parts.items():
        if list(part) != list(columns):
            raise UserError(f"data: {name} has columns {', '.join(part)}, {first} has {', '.join(columns)}")
        for column, spec in part.items():
            known = found.setdefault(column, spec)
            if not known.fits(spec):
                raise UserError(f"data: column {column!r}: {name} has {spec}, {first} has {columns[column]}")
            if spec.limit is not None and known.limit is not None and spec.limit > known.limit:
                found[column] = spec
    return found
