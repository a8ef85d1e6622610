"""The data sets by kind: ours, and those of other packages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, cast

import msgspec

from isthmus.data.callables import is_callable_name, load_callable
from isthmus.data.client_files import KIND as CLIENTS
from isthmus.data.client_files import ClientFile, ClientsOptions, client_files
from isthmus.data.csv_files import KIND as CSV
from isthmus.data.csv_files import CsvOptions, load_csv
from isthmus.data.dataset import (
    SPLITS,
    Dataset,
    DigitsOptions,
    JoinedDataset,
    NpzOptions,
    Split,
    load_digits,
    load_npz,
    missing_members,
)
from isthmus.data.hugging_face import HUB, DiskOptions, HubOptions, load_disk, load_hub
from isthmus.data.images import folder, parquet
from isthmus.data.leaf import KIND as LEAF
from isthmus.data.leaf import LeafOptions, load_leaf
from isthmus.data.pairs import PairsOptions, load_pairs
from isthmus.data.streams.dataset import StreamOptions, load_stream
from isthmus.data.streams.files import KIND as STREAM
from isthmus.data.text import TextOptions, load_text
from isthmus.data.within import check_pattern_within, confined_to
from isthmus.documents import beside
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import import_object, load_third_party, read_options, third_party
from isthmus.option_docs import OptionDoc, argument_docs, first_line, option_docs
from isthmus.wire_types import Name, Table, Text

ENTRY_POINTS = "isthmus.datasets"


class DataSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which data to use: a `kind` of `dataset_kinds()`, or `package.module:callable`, and JSON `options` that the
    kind's options struct or the callable takes. Naming a callable runs it: a device checks somebody else's spec against
    what its owner allows before it loads anything."""

    kind: Text  # One of `isthmus datasets`, or `package.module:callable` of your own.
    options: Table[Text, object] = {}  # Settings of that kind: `isthmus describe KIND` lists them.
    heldout: Text = ""
    """A path of held-out samples, of the same kind and form as those of `path` or `files`, which then all train."""
    description: Text = ""  # A file that says what the data are like, where they are not (`isthmus describe-data`).
    of: Table[Name, Table[Text, object]] = {}
    """For each holder that has data of its own: options that stand in place of those above."""
    folder: Text = ""
    """From where relative paths of the built-in kinds count: filled in with the folder of the file that says this. On
    a device of a fleet it is the folder that `isthmus join --data` names."""

    def at(self, holder: str) -> DataSpec:
        """Return the spec as one holder reads its data."""
        return msgspec.structs.replace(self, options={**self.options, **self.of.get(holder, {})}, of={})

    def counted_from(self, folder: str) -> DataSpec:
        """Return the spec as a file in this folder says it: with its paths."""
        description = self.description and beside(self.description, folder)
        return msgspec.structs.replace(self, description=description, folder=beside(self.folder or folder, folder))

    def training_alone(self) -> DataSpec:
        """Return the spec for where nothing is evaluated: all samples train, unless options say which do not."""
        options, said = self.options, self.options.keys() & {"holdout", "heldout_path"}
        if self.kind == CLIENTS:
            inner: Any = options.get("options") or {}
            own = DataSpec(kind=str(options.get("kind", CSV)), options=dict(inner), heldout=self.heldout)
            options = {**options, "options": own.training_alone().options}
        elif (
            self.kind in _OURS and "holdout" in _OURS[self.kind][0].__struct_fields__ and not said and not self.heldout
        ):
            options = {**options, "holdout": 0.0}
        return msgspec.structs.replace(self, options=options)

    @property
    def located(self) -> dict[str, object]:
        """The options, with paths that do not count from `folder` any more."""
        if self.kind not in _OURS:
            return self.options
        options = {**self.options, "heldout_path": self.heldout} if self.heldout else self.options
        return _with_paths(options, self.folder)


PATHS = ("path", "heldout_path", "files", "tokenizer", "options")
"""Options of our kinds that are paths, or lists of paths; or a table with such options, as of `clients`."""


def _with_paths(options: Mapping[str, object], folder: str) -> dict[str, object]:
    return {name: _located(value, folder) if name in PATHS else value for name, value in options.items()}


def _located(value: object, folder: str) -> object:
    if isinstance(value, Mapping):
        return _with_paths(cast("Mapping[str, object]", value), folder)
    if isinstance(value, list | tuple):
        return [_located(each, folder) for each in cast("Sequence[object]", value)]
    return beside(value, folder) if isinstance(value, str) else value


def load_client(file: ClientFile, split: Split) -> Dataset:
    """One client's samples. UserError as `load_dataset`."""
    return load_dataset(DataSpec(kind=file.kind, options=file.options), split)


def _load_clients(options: ClientsOptions, split: Split) -> Dataset:
    """The samples of all of them, one client after another. Held-out samples may be in a path of their own."""
    files = client_files(options)
    shared = split == "heldout" and options.heldout_path is not None
    return JoinedDataset([load_client(file, split) for file in (files[:1] if shared else files)])


_OURS: Mapping[str, tuple[type[msgspec.Struct], Callable[[Any, Split], Dataset]]] = {
    CLIENTS: (ClientsOptions, _load_clients),
    CSV: (CsvOptions, load_csv),
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
"""The options and the loader of each kind."""


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
    if spec.heldout:
        _check_heldout(spec)
    if spec.kind in _OURS:
        options, load_ours = _OURS[spec.kind]
        return load_ours(read_options(spec.kind, spec.located, options), split)
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


def _check_heldout(spec: DataSpec) -> None:
    """UserError for a kind whose held-out samples have no path of their own."""
    takes = [kind for kind, (options, _) in _OURS.items() if "heldout_path" in options.__struct_fields__]
    kind = spec.options.get("kind", CSV) if spec.kind == CLIENTS else spec.kind
    if kind not in takes:
        raise UserError(
            f"data.heldout: got {spec.heldout!r} with kind {kind!r}, expected one of {', '.join(takes)}: others "
            "have data.options.holdout, or an argument `split`"
        )
    if "heldout_path" in spec.options:
        raise UserError("data.heldout: got one beside data.options.heldout_path, expected one of the two")


@contextlib.contextmanager
def allowed(data: DataSpec, kinds: Collection[str] | None, *, foreign: bool) -> Generator[DataSpec]:
    """While inside, the data that are given may be opened. With `foreign` somebody else's coordinator asks, and only
    what lies in the folder where this process runs is for it. UserError for a kind that is not among those that the
    device's owner allows, None for all that are installed; and for options that lead out of that folder, by themselves
    or by a link in it."""
    check_kind(data, kinds, foreign=foreign)
    if not foreign:
        yield data
        return
    with _own_folder(data):
        yield msgspec.structs.replace(data, folder="")


@contextlib.contextmanager
def _own_folder(data: DataSpec) -> Generator[None]:
    refuse_paths(data)
    with confined_to(Path.cwd()):
        for _, text in _texts("data", data.options):
            check_pattern_within(text)
        yield


def check_kind(data: DataSpec, allowed: Collection[str] | None, *, foreign: bool) -> None:
    """UserError for a kind that this device's owner does not allow. Nothing of it has been imported.

    `allowed` None allows all that are installed; with `foreign` a callable, and what is fetched from the hub, has to
    be among those that are listed.
    """
    if allowed is not None and data.kind not in allowed:
        raise UserError(
            f"data.kind: got {data.kind!r}, expected one of: {', '.join(sorted(allowed))}: the owner of this device "
            "allows no others (`isthmus join --data-kinds`)"
        )
    if allowed is None and foreign and data.kind == HUB:
        raise UserError(
            f"data.kind: got {HUB!r}, expected data that are here: nothing is fetched for somebody else unless the "
            "owner of this device names it (`isthmus join --data-kinds`)"
        )
    fetches = data.kind == STREAM and any("://" in text for _, text in _texts("", data.options))
    if allowed is None and foreign and fetches:
        raise UserError(
            f"data.kind: got {STREAM!r} with a URL, expected data that are here: nothing is fetched for somebody else "
            "unless the owner of this device names the kind (`isthmus join --data-kinds`)"
        )
    if allowed is None and foreign and is_callable_name(data.kind):
        raise UserError(
            f"data.kind: got {data.kind!r}, expected an installed kind: a callable is imported for nobody else unless "
            "the owner of this device names it (`isthmus join --data-kinds`)"
        )


def refuse_paths(data: DataSpec) -> None:
    """UserError for options that name something outside of the folder where this process runs."""
    for name, text in _texts("data", data.options):
        if "\0" in text or text.startswith("~") or PurePath(text).is_absolute() or ".." in PurePath(text).parts:
            raise UserError(
                f"{name}: got {text!r}, expected a relative path: devices of a fleet read from the folder that their "
                "owner named (`isthmus join --data`)"
            )


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[object, object]", value).items():
            yield from _texts(name, key)
            yield from _texts(f"{name}.{key}", inner)
    elif isinstance(value, Sequence):
        for inner in cast("Sequence[object]", value):
            yield from _texts(name, inner)
