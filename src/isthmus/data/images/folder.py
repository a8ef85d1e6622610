"""A folder of images with a sub-folder per class, as torchvision's `ImageFolder` and Hugging Face's `imagefolder`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from isthmus.data.dataset import Array, Split, rows_of_split
from isthmus.data.digests import digests_of
from isthmus.data.images.dataset import ImageDataset, ImageOptions
from isthmus.data.images.decoding import ENDINGS
from isthmus.data.within import check_within, opener
from isthmus.errors import UserError, unknown_name

KIND = "image-folder"
TRAIN = "train"
HELD_OUT_NAMES = ("validation", "valid", "val", "test")
Part = TypeVar("Part")


class ImageFolderOptions(ImageOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images in a folder per class."""

    path: str  # A folder with a folder per class; or with `train` and one of `validation`, `valid`, `val`, `test`.
    heldout_path: str | None = None
    """A folder of held-out images, with a folder per class; without it the one beside `train`, or a share."""
    classes: tuple[str, ...] = ()
    """Names of all classes, in the order of their numbers; without it those found, sorted."""


class FolderImages:
    """The files of a split: (root, relative names, labels)."""

    def __init__(self, root: Path, names: Sequence[str], labels: Array, classes: int) -> None:
        self._root = root
        self._names = names
        self.labels = labels
        self.classes = classes
        self._open = opener()

    def name(self, sample: int) -> str:
        return str(self._root / self._names[sample])

    def open(self, sample: int) -> BinaryIO:
        try:
            return self._open(self.name(sample))
        except OSError as e:
            raise UserError(f"{KIND}: cannot read {self.name(sample)}: {e.strerror}") from e

    def contents(self) -> Iterable[Array]:
        return [digests_of([self._root / name for name in self._names], self._open)]


def load_image_folder(options: ImageFolderOptions, split: Split) -> ImageDataset:
    """UserError for a folder that is missing, holds no class or an empty one, a class that `classes` or the training
    images lack, and for held-out images in several places."""
    root = _folder("path", options.path)
    divided = (root / TRAIN).is_dir() and bool(_folders(root / TRAIN))
    train = root / TRAIN if divided else root
    classes = _classes(train, options)
    held_out = _held_out(root, options, divided=divided)
    for path in held_out:  # for training too: a class of another name may be a mistake in either
        for folder in _folders(path):
            _check_class(path, folder, classes)
    if not held_out:
        return _shared(train, options, split)
    if split == "heldout":
        train = the_held_out(KIND, root, {path.name: path for path in held_out})
    names, labels = _files(train, classes, every=split == "train" and not options.classes)
    return _dataset(FolderImages(train, names, labels, len(classes)), options, split, train)


def _folder(option: str, named: str) -> Path:
    path = Path(named).expanduser()
    if not path.is_dir():
        raise UserError(f"{KIND} option {option!r}: no folder {named}")
    check_within(path)
    return path


def _held_out(root: Path, options: ImageFolderOptions, *, divided: bool) -> list[Path]:
    """Folders of held-out images; none where a share of the others is held out."""
    if options.heldout_path is not None:
        return [_folder("heldout_path", options.heldout_path)]
    return [root / name for name in HELD_OUT_NAMES if (root / name).is_dir()] if divided else []


def the_held_out(kind: str, root: Path, found: Mapping[str, Part]) -> Part:
    """The part of the data that is held out, of those found by name. UserError for several."""
    if len(found) > 1:
        raise UserError(
            f"{kind} option 'heldout_path': missing, expected which of {', '.join(found)} in {root} is held out"
        )
    (part,) = found.values()
    return part


def _shared(root: Path, options: ImageFolderOptions, split: Split) -> ImageDataset:
    classes = _classes(root, options)
    names, labels = _files(root, classes, every=not options.classes)
    rows = rows_of_split(len(names), options.holdout, split, f"{KIND} {root}") if names else np.arange(0)
    images = FolderImages(root, [names[row] for row in rows], labels[rows], len(classes))
    return _dataset(images, options, split, root)


def _dataset(images: FolderImages, options: ImageFolderOptions, split: Split, root: Path) -> ImageDataset:
    if not len(images.labels):
        raise UserError(f"{KIND} {root}: holds no samples")
    return ImageDataset(images, options, split, KIND)


def _classes(root: Path, options: ImageFolderOptions) -> Sequence[str]:
    found = _folders(root)
    if not found:
        raise UserError(f"{KIND} option 'path': {root} has no folder, expected one per class")
    if len(set(options.classes)) < len(options.classes):
        raise UserError(f"{KIND} option 'classes': got a name twice, expected each once")
    return options.classes or found


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def _files(root: Path, classes: Sequence[str], *, every: bool) -> tuple[list[str], Array]:
    """Names relative to the root, class by class, and labels. UserError for a folder that is no class, and with
    `every` for a class without images."""
    number_of = {name: number for number, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    for folder in sorted(_folders(root), key=lambda name: number_of.get(name, -1)):
        _check_class(root, folder, classes)
        found = sorted(_images_below(root / folder, root))
        if not found and every:
            raise UserError(f"{KIND} {root / folder}: holds no image, expected files such as NAME.png or NAME.jpg")
        names += found
        labels += [number_of[folder]] * len(found)
    return names, np.array(labels, dtype=np.int64)


def _check_class(root: Path, folder: str, classes: Sequence[str]) -> None:
    if folder not in classes:
        raise unknown_name(f"class of {root}", folder, classes)


def _images_below(folder: Path, root: Path) -> Iterable[str]:
    """Links to folders are followed once each: a loop of them ends."""
    seen: set[str] = set()
    for at, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(at)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in files:
            if os.path.splitext(name)[1].lower() in ENDINGS and not name.startswith("."):
                yield (Path(at) / name).relative_to(root).as_posix()
