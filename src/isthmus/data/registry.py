"""The data sets by kind: ours, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from isthmus.data.arrays import DigitsOptions, NpzOptions, load_digits, load_npz
from isthmus.data.callables import is_callable_name, load_callable
from isthmus.data.dataset import SPLITS, Dataset, Split, missing_members
from isthmus.data.hugging_face import HUB, DiskOptions, HubOptions, load_disk, load_hub
from isthmus.data.images import folder, parquet
from isthmus.data.leaf import KIND as LEAF
from isthmus.data.leaf import LeafOptions, load_leaf
from isthmus.data.pairs import PairsOptions, load_pairs
from isthmus.data.streams.dataset import StreamOptions, load_stream
from isthmus.data.streams.files import KIND as STREAM
from isthmus.data.text import TextOptions, load_text
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import import_object, load_third_party, read_options, third_party
from isthmus.option_docs import OptionDoc, argument_docs, first_line, option_docs

ENTRY_POINTS = "isthmus.datasets"


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which data to use: a `kind` of `dataset_kinds()`, or `package.module:callable`, and JSON `options` that the
    kind's options struct or the callable takes. Naming a callable runs it: a device checks somebody else's spec against
    what its owner allows before it loads anything."""

    kind: str
    """One of `isthmus datasets`, or `package.module:callable` of your own."""
    options: dict[str, object] = {}
    """Settings of that kind: `isthmus describe KIND` lists them."""
    description: str = ""
    """A file that says what the data are like, where they are not (`isthmus describe-data`)."""
    of: dict[str, dict[str, object]] = {}
    """By holder, where each has data of its own: options that stand in place of those above."""

    def at(self, holder: str) -> DataSpec:
        """As one holder reads them."""
        return msgspec.structs.replace(self, options={**self.options, **self.of.get(holder, {})}, of={})


_OURS: Mapping[str, tuple[type[msgspec.Struct], Callable[[Any, Split], Dataset]]] = {
    "digits": (DigitsOptions, load_digits),
    "disk": (DiskOptions, load_disk),
    HUB: (HubOptions, load_hub),
    folder.KIND: (folder.ImageFolderOptions, folder.load_image_folder),
    parquet.KIND: (parquet.ImageParquetOptions, parquet.load_image_parquet),
    LEAF: (LeafOptions, load_leaf),
    "npz": (NpzOptions, load_npz),
    "pairs": (PairsOptions, load_pairs),
    STREAM: (StreamOptions, load_stream),
    "text": (TextOptions, load_text),
}
"""By kind: what its options are, and what loads it."""


def dataset_kinds() -> list[str]:
    """The kinds that `load_dataset` knows, entry points of the group `isthmus.datasets` included, sorted."""
    return sorted({*_OURS, *third_party(ENTRY_POINTS)})


def describe_dataset(kind: str) -> tuple[str, tuple[OptionDoc, ...]]:
    """One line on a kind of data, and its options. UserError for an unknown one, or a package that cannot be read."""
    if kind in _OURS:
        options, load = _OURS[kind]
        return first_line(options), option_docs(options)
    others = third_party(ENTRY_POINTS)
    if not is_callable_name(kind) and kind not in others:
        raise unknown_name("data kind", kind, dataset_kinds())
    load = import_object("data kind", kind) if is_callable_name(kind) else load_third_party(others[kind])
    return first_line(load), argument_docs(load)


def load_dataset(spec: DataSpec, split: Split) -> Dataset:
    """The data of `spec`. An entry point is called as `load(options, split)` and returns a `Dataset`.

    Raises `UserError` for an unknown kind, split or option, a value, a missing file, or a split without samples.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if spec.kind in _OURS:
        options, load_ours = _OURS[spec.kind]
        return load_ours(read_options(spec.kind, spec.options, options), split)
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
