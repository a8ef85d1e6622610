"""LEAF's FEMNIST (Caldas et al. 2018) as its scripts write it: JSON files of writers, a client each.

A writer's samples are read out of the middle of its file when they are asked for; the files are parsed once, for the
places of the writers in them. A writer that is in several files, or twice in one, is one client with all its samples.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.data.dataset import (
    Array,
    ColumnSpec,
    Indices,
    Split,
    as_tensors,
    check_columns,
    checked,
    fingerprint_of,
    rows_of_split,
)
from isthmus.data.digests import digests_of
from isthmus.data.within import check_within, opener
from isthmus.errors import UserError
from isthmus.reading import parse_json

if TYPE_CHECKING:
    import torch

KIND = "leaf-femnist"
TRAIN, HELD_OUT = "train", "test"
_LEVELS = 255


class LeafOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FEMNIST as LEAF's `preprocess.sh` writes it; ink is 0 and paper 1."""

    path: str  # A folder with `train/*.json` and `test/*.json`, or with `*.json` or `all_data/*.json`.
    side: Annotated[int, Meta(ge=1)] = 28  # Height and width in pixels.
    classes: Annotated[int, Meta(ge=1)] = 62  # Different labels.
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the writers that training never sees, where there is no `test` folder."""


class _LeafFile(msgspec.Struct):
    users: list[str]
    num_samples: list[int]
    user_data: msgspec.Raw


class _Part(NamedTuple):
    """Where samples of a writer lie."""

    file: int
    start: int
    length_bytes: int


class _Writer(msgspec.Struct, frozen=True):
    """All samples of one writer, in whichever files, in their order."""

    name: str
    parts: tuple[_Part, ...]
    samples: int


class _Samples(msgspec.Struct):
    x: list[list[float]]
    y: list[int]


class LeafWriters:
    """The writers of some files, in the files' order."""

    def __init__(self, files: Sequence[Path], options: LeafOptions) -> None:
        """UserError for files that are not LEAF's."""
        self._files = files
        self._options = options
        self._open = opener()
        parts: dict[str, list[_Part]] = {}
        samples: Counter[str] = Counter()
        for number in range(len(files)):
            counts, places = self._entries(number)
            for name, part in places:
                parts.setdefault(name, []).append(part)
            samples.update({name: counts[name] for name, _ in places})
        self.writers = [_Writer(name, tuple(found), samples[name]) for name, found in parts.items() if samples[name]]
        self.samples_of = lru_cache(maxsize=None)(self.read)  # as `read`, kept in memory: a byte a pixel

    def _entries(self, number: int) -> tuple[Counter[str], list[tuple[str, _Part]]]:
        """Return how many samples a file says each writer has, and where they are; of a writer there may be several
        places."""
        path = self._files[number]
        try:
            with self._open(path) as file:
                text = file.read()
        except OSError as e:
            raise UserError(f"{KIND}: cannot read {path}: {e.strerror}") from e
        what = f"{KIND}: {path} is no file of LEAF's"
        found = parse_json(text, _LeafFile, what)
        data = bytes(found.user_data)
        places = list(_places(data, what))
        if len(found.users) != len(found.num_samples):
            raise UserError(f"{KIND}: {path}: got {len(found.users)} users and {len(found.num_samples)} num_samples")
        counts: Counter[str] = Counter()
        for name, count in zip(found.users, found.num_samples, strict=True):
            counts[name] += count
        if unknown := next((name for name, _, _ in places if name not in counts), None):
            raise UserError(f"{KIND}: {path}: user_data has {unknown!r}, users has not")
        begin = text.index(data)
        return counts, [(name, _Part(number, begin + start, length)) for name, start, length in places]

    def read(self, number: int) -> tuple[Array, NDArray[np.int64]]:
        """Pixels [samples, side * side], uint8 where the file's fractions are of 255, else float32; labels.

        UserError for samples that are not as the options say."""
        writer = self.writers[number]
        x: list[list[float]] = []
        y: list[int] = []
        for part in writer.parts:
            path = self._files[part.file]
            try:
                with self._open(path) as file:
                    file.seek(part.start)
                    text = file.read(part.length_bytes)
            except OSError as e:
                raise UserError(f"{KIND}: {path}: user {writer.name!r} cannot be read: {e}") from e
            samples = parse_json(text, _Samples, f"{KIND}: {path}: user {writer.name!r}")
            x += samples.x
            y += samples.y
        path, found = self._files[writer.parts[0].file], _Samples(x, y)
        if not len(x) == len(y) == writer.samples:
            raise UserError(
                f"{KIND}: {path}: user {writer.name!r} has {len(x)} x and {len(y)} y, "
                f"expected {writer.samples} as num_samples says"
            )
        size = self._options.side**2
        wrong = next((len(x) for x in found.x if len(x) != size), None)
        if wrong is not None:
            raise UserError(
                f"{KIND}: {path}: user {writer.name!r}: got {wrong} pixels, expected {size} (option 'side')"
            )
        labels = np.array(found.y, dtype=np.int64)
        if labels.min() < 0 or labels.max() >= self._options.classes:
            raise UserError(
                f"{KIND}: {path}: user {writer.name!r}: got labels of {labels.min()} to {labels.max()}, expected "
                f"0 to {self._options.classes - 1} (option 'classes')"
            )
        exact = np.array(found.x)
        if exact.min() < 0 or exact.max() > 1:
            raise UserError(
                f"{KIND}: {path}: user {writer.name!r}: got pixels of {exact.min():g} to {exact.max():g}, "
                "expected 0 to 1"
            )
        levels = np.rint(exact * _LEVELS)
        whole = (np.abs(exact * _LEVELS - levels) < 1e-6).all()
        return levels.astype(np.uint8) if whole else exact.astype(np.float32), labels

    def columns(self) -> Mapping[str, ColumnSpec]:
        shape = (1, self._options.side, self._options.side)
        return {
            "pixel_values": ColumnSpec(dtype="float32", shape=shape),
            "labels": ColumnSpec(dtype="int64", limit=self._options.classes),
        }

    def images(self, values: Array) -> NDArray[np.float32]:
        """float32 [samples, 1, side, side]"""
        shaped = values.reshape(-1, 1, self._options.side, self._options.side)
        fractions = shaped.astype(np.float32)
        return fractions / np.float32(_LEVELS) if shaped.dtype == np.uint8 else fractions

    def fingerprint(self, numbers: Sequence[int]) -> str:
        names = [self.writers[number].name for number in numbers]
        settings = {"kind": KIND, "side": self._options.side, "classes": self._options.classes, "writers": names}
        return fingerprint_of(settings, [digests_of(self._files, self._open)])


_KEY = re.compile(rb'\s*,?\s*("(?:[^"\\]|\\.)*")\s*:\s*')


def _places(user_data: bytes, what: str) -> Iterator[tuple[str, int, int]]:
    """The keys of a JSON object whose values are objects of numbers, with the start and the length of each value: all
    of them, also those of a key that is there twice. UserError, which begins with `what`, for another object."""
    at = user_data.find(b"{") + 1
    while (key := _KEY.match(user_data, at)) is not None:
        end = user_data.find(b"}", key.end()) + 1
        if user_data[key.end()] != ord("{") or not end:
            raise UserError(f"{what}: user_data: {key[1].decode()}: expected an object with x and y")
        yield parse_json(key[1], str, what), key.end(), end - key.end()
        at = end
    if user_data[at:].strip() != b"}":
        raise UserError(f"{what}: user_data: expected an object of users, each with x and y")


class LeafClients:
    """The writers of the training split as clients."""

    def __init__(self, options: LeafOptions) -> None:
        self._all, self._numbers = _split(options, "train")

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return self._all.columns()

    @property
    def names(self) -> Sequence[str]:
        return [self._all.writers[number].name for number in self._numbers]

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([self._all.writers[number].samples for number in self._numbers], dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        return self._all.fingerprint(self._numbers)

    def load(self, client: int) -> dict[str, torch.Tensor]:
        return self.load_many([client])

    def load_many(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        parts = [self._all.read(self._numbers[client]) for client in clients]
        images = np.concatenate([self._all.images(values) for values, _ in parts])
        return as_tensors({"pixel_values": images, "labels": np.concatenate([labels for _, labels in parts])})


class LeafDataset:
    """All samples of the writers of a split, writer by writer. Writers that were read are kept, a byte a pixel."""

    def __init__(self, options: LeafOptions, split: Split) -> None:
        self._all, self._numbers = _split(options, split)
        self._ends = np.cumsum([self._all.writers[number].samples for number in self._numbers])

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return self._all.columns()

    @property
    def fingerprint(self) -> str:
        return self._all.fingerprint(self._numbers)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        check_columns(columns, self.columns)
        samples = checked(indices, len(self))
        owners = np.searchsorted(self._ends, samples, side="right")
        images = np.empty((len(samples), *self.columns["pixel_values"].shape), dtype=np.float32)
        labels = np.empty(len(samples), dtype=np.int64)
        for owner in np.unique(owners):
            rows = np.flatnonzero(owners == owner)
            values, known = self._all.samples_of(self._numbers[owner])
            at = samples[rows] - self._ends[owner]  # from the writer's end: numpy counts back from there
            images[rows], labels[rows] = self._all.images(values[at]), known[at]
        arrays: dict[str, Array] = {"pixel_values": images, "labels": labels}
        return as_tensors({name: arrays[name] for name in columns})


def _split(options: LeafOptions, split: Split) -> tuple[LeafWriters, list[int]]:
    """The writers of the files of a split, and the numbers of those that belong to it. UserError where none do."""
    root = Path(options.path).expanduser()
    if not root.is_dir():
        raise UserError(f"{KIND} option 'path': no folder {options.path}")
    check_within(root)
    divided = {name: sorted((root / name).glob("*.json")) for name in (TRAIN, HELD_OUT)}
    if all(divided.values()):
        writers = LeafWriters(divided[TRAIN if split == "train" else HELD_OUT], options)
        numbers = list(range(len(writers.writers)))
    else:
        files = divided[TRAIN] or sorted(root.glob("*.json")) or sorted((root / "all_data").glob("*.json"))
        if not files:
            raise UserError(f"{KIND} option 'path': {root} has no .json files, neither by themselves nor in train/")
        writers = LeafWriters(files, options)
        numbers = [int(n) for n in rows_of_split(len(writers.writers), options.holdout, split, f"{KIND} {root}")]
    if not numbers:
        raise UserError(f"{KIND} {root}: holds no samples")
    return writers, numbers


def load_leaf(options: LeafOptions, split: Split) -> LeafDataset:
    """The samples of `split`. UserError for files that are missing or not LEAF's."""
    return LeafDataset(options, split)
