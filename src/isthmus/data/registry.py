"""The data sets by kind: ours, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from isthmus.data.arrays import DigitsOptions, NpzOptions, load_digits, load_npz
from isthmus.data.callables import is_callable_name, load_callable
from isthmus.data.dataset import SPLITS, Dataset, Split, missing_members
from isthmus.data.disk import DiskOptions, load_disk
from isthmus.data.images import folder, parquet
from isthmus.data.leaf import KIND as LEAF
from isthmus.data.leaf import LeafOptions, load_leaf
from isthmus.data.pairs import PairsOptions, load_pairs
from isthmus.data.text import TextOptions, load_text
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import load_third_party, read_options, third_party

ENTRY_POINTS = "isthmus.datasets"


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which data to use: a `kind` of `dataset_kinds()`, or `package.module:callable`, and JSON `options` that the
    kind's options struct or the callable takes. Naming a callable runs it: a device checks somebody else's spec against
    what its owner allows before it loads anything."""

    kind: str
    options: dict[str, object] = {}
    description: str = ""
    """A file that says what the data are like, where they are not (`isthmus describe`)."""
    of: dict[str, dict[str, object]] = {}
    """By holder, where each has data of its own: options that stand in place of those above."""

    def at(self, holder: str) -> DataSpec:
        """As one holder reads them."""
        return msgspec.structs.replace(self, options={**self.options, **self.of.get(holder, {})}, of={})


def _text(options: Mapping[str, object], split: Split) -> Dataset:
    return load_text(read_options("text", options, TextOptions), split)


def _pairs(options: Mapping[str, object], split: Split) -> Dataset:
    return load_pairs(read_options("pairs", options, PairsOptions), split)


def _npz(options: Mapping[str, object], split: Split) -> Dataset:
    return load_npz(read_options("npz", options, NpzOptions), split)


def _digits(options: Mapping[str, object], split: Split) -> Dataset:
    return load_digits(read_options("digits", options, DigitsOptions), split)


def _disk(options: Mapping[str, object], split: Split) -> Dataset:
    return load_disk(read_options("disk", options, DiskOptions), split)


def _image_folder(options: Mapping[str, object], split: Split) -> Dataset:
    return folder.load_image_folder(read_options(folder.KIND, options, folder.ImageFolderOptions), split)


def _image_parquet(options: Mapping[str, object], split: Split) -> Dataset:
    return parquet.load_image_parquet(read_options(parquet.KIND, options, parquet.ImageParquetOptions), split)


def _leaf(options: Mapping[str, object], split: Split) -> Dataset:
    return load_leaf(read_options(LEAF, options, LeafOptions), split)


_BUILT_IN: Mapping[str, Callable[[Mapping[str, object], Split], Dataset]] = {
    "text": _text,
    "pairs": _pairs,
    "npz": _npz,
    "digits": _digits,
    "disk": _disk,
    folder.KIND: _image_folder,
    parquet.KIND: _image_parquet,
    LEAF: _leaf,
}


def dataset_kinds() -> list[str]:
    """The kinds that `load_dataset` knows, entry points of the group `isthmus.datasets` included, sorted."""
    return sorted({*_BUILT_IN, *third_party(ENTRY_POINTS)})


def load_dataset(spec: DataSpec, split: Split) -> Dataset:
    """The data of `spec`. An entry point is called as `load(options, split)` and returns a `Dataset`.

    Raises `UserError` for an unknown kind, split or option, a value, a missing file, or a split without samples.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if spec.kind in _BUILT_IN:
        return _BUILT_IN[spec.kind](spec.options, split)
    if is_callable_name(spec.kind):
        return load_callable(spec.kind, spec.options, split)
    others = third_party(ENTRY_POINTS)
    if spec.kind not in others:
        raise unknown_name("data kind", spec.kind, dataset_kinds())
    load = load_third_party(others[spec.kind])
    if not callable(load):
        raise UserError(f"data kind {spec.kind!r}: expected a callable (options, split), got {load!r}")
    try:
        loaded: object = load(spec.options, split)
    except IsthmusError:
        raise
    except Exception as e:
        raise UserError(f"data kind {spec.kind!r} failed: {type(e).__name__}: {e}") from e
    if missing := missing_members(loaded):
        raise UserError(f"data kind {spec.kind!r}: {type(loaded).__name__} has no {', '.join(missing)}")
    return cast(Dataset, loaded)
