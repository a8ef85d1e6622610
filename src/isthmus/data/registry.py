"""The data sets by kind: ours, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from isthmus.data.arrays import DigitsOptions, NpzOptions, load_digits, load_npz
from isthmus.data.dataset import SPLITS, Dataset, Split
from isthmus.data.disk import DiskOptions, load_disk
from isthmus.data.pairs import PairsOptions, load_pairs
from isthmus.data.text import TextOptions, load_text
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import load_third_party, read_options, third_party

ENTRY_POINTS = "isthmus.datasets"


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which data to use: a `kind` of `dataset_kinds()`, and JSON `options` that the kind's options struct takes."""

    kind: str
    options: dict[str, object] = {}
    description: str = ""
    """A file that says what the data are like, where they are not (`isthmus describe`)."""


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


_BUILT_IN: Mapping[str, Callable[[Mapping[str, object], Split], Dataset]] = {
    "text": _text,
    "pairs": _pairs,
    "npz": _npz,
    "digits": _digits,
    "disk": _disk,
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
    missing = [name for name in ("columns", "fingerprint", "batch", "__len__") if not hasattr(loaded, name)]
    if missing:
        raise UserError(f"data kind {spec.kind!r}: {type(loaded).__name__} has no {', '.join(missing)}")
    return cast(Dataset, loaded)
