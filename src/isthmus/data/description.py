"""A coordinator's knowledge of data that stay with their holder: columns, counts and keyed digests; and the data of
several holders as one set: a run that they feed together equals a plain loop over it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from isthmus.combinations import refused
from isthmus.data.dataset import Blocked, ColumnSpec, Dataset, Split, joined_columns
from isthmus.data.layout import Layout, check_layout
from isthmus.data.registry import DataSpec, load_dataset
from isthmus.errors import UserError, unknown_name
from isthmus.plans import OwnSamples
from isthmus.plans.schedule import whole
from isthmus.reading import read_json
from isthmus.run_files import as_json
from isthmus.wire_types import Count, Name, Table, Text

if TYPE_CHECKING:
    pass


BYTES_OF = {  # types that a column may have
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
MOST_COLUMNS, MOST_NAME, MOST_DIMS = 256, 200, 16
MOST_SAMPLE_BYTES = 1 << 32  # bytes of one column's sample
MOST_SAMPLES = 1 << 32  # a shuffled order keeps eight bytes per sample
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DataDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A description of one holder's data. A model is captured from it, and a run is planned with it."""

    columns: Table[Text, ColumnSpec]
    train: Count  # samples
    heldout: Count = 0  # samples; 0 where none were asked for
    digests: Table[Name, Name] = {}
    """The fingerprint of each split's samples under the holder's key (`concealed`), in hexadecimal: equal for equal
    data of one holder. Empty where nobody compares."""
    layout: Layout | None = None
    """Blocks of the training samples: with their count, the seed and `shuffle` the order of their use."""
    holders: Table[Name, OwnSamples] = {}
    """The data of several holders, each of whom has its own, by name, in their order. The counts above are sums."""

    def heldout_batches(self, size: int) -> int:
        """Whole micro-batches of held-out samples, each of which is of one holder."""
        return sum(whole(tuple(h.heldout for h in self.holders.values()) or (self.heldout,), size))


def describe(spec: DataSpec, *, heldout: bool, conceal: Callable[[str], str] | None = None) -> DataDescription:
    """Opens the data. `conceal` makes a digest of a fingerprint; without it there are no digests.

    Raises UserError for whatever is wrong with the data.
    """
    sets: dict[Split, Dataset] = {"train": load_dataset(spec, "train")}
    if heldout:
        sets["heldout"] = load_dataset(spec, "heldout")
    counts = {split: len(found) for split, found in sets.items()}
    digests: dict[str, str] = {}
    if conceal is not None:
        digests = {split: conceal(found.fingerprint) for split, found in sets.items()}
    return DataDescription(
        columns=dict(sets["train"].columns),
        train=counts["train"],
        heldout=counts.get("heldout", 0),
        digests=digests,
        layout=sets["train"].layout if isinstance(sets["train"], Blocked) else None,
    )


class _DescriptionFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1] = 1
    kind: str
    options: dict[str, object]
    columns: dict[str, ColumnSpec]
    train: int
    heldout: int
    layout: Layout | None = None


def description_file(spec: DataSpec, description: DataDescription) -> bytes:
    """For a machine that does not have the data: JSON, without digests."""
    d = description
    file = _DescriptionFile(
        kind=spec.kind, options=spec.options, columns=d.columns, train=d.train, heldout=d.heldout, layout=d.layout
    )
    return as_json(file) + b"\n"


def read_description(path: Path, spec: DataSpec, *, heldout: bool) -> DataDescription:
    """Read a file of `description_file`. UserError for a file that is none, or of other data than `spec`'s."""
    try:
        found = read_json(path, _DescriptionFile, f"data.description: {path}")
    except FileNotFoundError:
        raise UserError(f"data.description: {path}: not found") from None
    for field, got, expected in (("kind", found.kind, spec.kind), ("options", found.options, spec.options)):
        if got != expected:
            raise UserError(f"data.description: {path}: {field}: got {got!r}, the job has {expected!r}")
    if heldout and not found.heldout:
        raise UserError(
            f"data.description: {path}: heldout: got none, but the job evaluates (training.eval_every): make it again "
            "with `isthmus describe-data`"
        )
    description = DataDescription(columns=found.columns, train=found.train, heldout=found.heldout, layout=found.layout)
    try:
        check_description(description, heldout=heldout)
    except UserError as e:
        raise UserError(f"data.description: {path}: {e}") from None
    return description


def refuse_description(spec: DataSpec) -> None:
    """UserError where a job whose clients have the data names a description of them."""
    if spec.description:
        raise refused("a description", "federated", repr(spec.description))


def check_description(description: DataDescription, *, heldout: bool) -> None:
    """UserError for what no data are like: somebody else wrote it. `heldout`: whether held-out samples are needed."""
    columns = description.columns
    if not 1 <= len(columns) <= MOST_COLUMNS:
        raise UserError(f"columns: got {len(columns)}, expected 1 to {MOST_COLUMNS}")
    for name, column in columns.items():
        _check_column(name, column)
    if description.holders:
        raise UserError(f"holders: got {len(description.holders)}, expected none: a device describes its own data")
    counts = {"train": description.train, "heldout": description.heldout}
    for split, count in counts.items():
        least = 1 if split == "train" or heldout else 0
        if not least <= count <= MOST_SAMPLES:
            raise UserError(f"{split}: got {count} samples, expected {least} to {MOST_SAMPLES}")
    if description.layout is not None:
        check_layout(description.layout, description.train)
    for split, digest in description.digests.items():
        if not _DIGEST.fullmatch(digest):
            raise UserError(f"digests.{split}: got {len(digest)} characters, expected 64 hexadecimal digits")


def _check_column(name: str, column: ColumnSpec) -> None:
    if not 1 <= len(name) <= MOST_NAME or not name.isprintable():
        raise UserError(f"columns: got a name of {len(name)} characters, expected 1 to {MOST_NAME} that can be printed")
    if column.dtype not in BYTES_OF:
        raise UserError(f"columns.{name}: {unknown_name('dtype', column.dtype[:MOST_NAME], BYTES_OF)}")
    if len(column.shape) > MOST_DIMS or any(not 0 < size <= MOST_SAMPLE_BYTES for size in column.shape):
        raise UserError(
            f"columns.{name}: got shape {str(list(column.shape))[:MOST_NAME]}, expected up to {MOST_DIMS} dims above 0"
        )
    size_bytes = math.prod(column.shape) * BYTES_OF[column.dtype]
    if size_bytes > MOST_SAMPLE_BYTES:
        raise UserError(f"columns.{name}: got {size_bytes} bytes per sample, expected up to {MOST_SAMPLE_BYTES}")
    if column.limit is not None and not 1 <= column.limit < 1 << 63:
        raise UserError(f"columns.{name}: got limit {column.limit}, expected at least 1")


def difference(a: DataDescription, b: DataDescription, *, counts: bool) -> str | None:
    """Return what differs though two holders have the same data: the first column, or count of samples, that differs,
    with both values; None where there is none. Without `counts` each has samples of its own: as many as it likes, and
    of ids and classes other ones."""
    for name in sorted({*a.columns, *b.columns}):
        one, other = a.columns.get(name), b.columns.get(name)
        if one != other and (counts or one is None or other is None or not one.fits(other)):
            return f"column {name!r}: {_shown(one)} and {_shown(other)}"
    sizes: Mapping[str, tuple[int, int]] = {"training": (a.train, b.train), "held-out": (a.heldout, b.heldout)}
    for split, (one, other) in sizes.items():
        if counts and one != other:
            return f"{one} and {other} {split} samples"
    if counts and a.layout != b.layout:
        return "blocks of other sizes, or another `shuffle_blocks`"
    return None


def _shown(column: ColumnSpec | None) -> str:
    if column is None:
        return "none"
    limit = f" below {column.limit}" if column.limit is not None else ""
    return f"{column.dtype} {list(column.shape)}{limit}"


def joined_descriptions(described: Mapping[str, DataDescription]) -> DataDescription:
    """Return the description of several holders' data together, in their order. UserError where their columns differ,
    or one's are a stream."""
    for name, found in described.items():
        if found.layout is not None:
            raise refused("streams", "own data", f"a stream of {name}", "data")
    return DataDescription(
        columns=joined_columns({name: found.columns for name, found in described.items()}),
        train=sum(found.train for found in described.values()),
        heldout=sum(found.heldout for found in described.values()),
        holders={name: OwnSamples(train=found.train, heldout=found.heldout) for name, found in described.items()},
    )
