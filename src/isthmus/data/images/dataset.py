"""Images and their labels as a data set: nothing is decoded before a batch asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, BinaryIO, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.data.dataset import Array, ColumnSpec, Indices, Split, as_tensors, check_columns, checked, fingerprint_of
from isthmus.data.images.decoding import PixelOptions, decode
from isthmus.data.images.pipeline import Table, pipeline_of
from isthmus.errors import StepError, UserError
from isthmus.rng import stream

if TYPE_CHECKING:
    import torch

PIXELS, LABELS = "pixel_values", "labels"


class ImageOptions(PixelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every kind of image data. `transforms` are tables with a `name` of torchvision.transforms.v2 and its
    options; without `heldout_transforms` held-out images go through the same, with random crops made central and flips
    left out."""

    transforms: tuple[Table, ...] = ()
    """Tables with the `name` of a transform of torchvision.transforms.v2 and its arguments, in order."""
    heldout_transforms: tuple[Table, ...] | None = None
    """For held-out images; without it the same, with random crops made central and flips left out."""
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the images that training never sees, where the data have no split for it."""


class EncodedImages(Protocol):
    """Where encoded images lie. Sample i is an image, its label and its name."""

    @property
    def labels(self) -> Array:
        """(samples,)"""
        ...

    @property
    def classes(self) -> int | None:
        """The bound that integer labels stay below; None for labels that are no classes."""
        ...

    def name(self, sample: int) -> str: ...

    def open(self, sample: int) -> BinaryIO:
        """UserError where it cannot be read."""
        ...

    def contents(self) -> Iterable[Array]:
        """The parts that distinguish the encoded images, without decoding one."""
        ...


class ImageDataset:
    """Columns: `pixel_values`, float32 [channels, height, width], 0 to 1 before `Normalize`; `labels`.

    The height and width are those of the first sample; a sample that comes out otherwise is an error that names it.
    Random transforms of a sample draw from (seed, epoch, sample), so they are alike wherever it is read.
    Raises UserError for options that are wrong, `StepError` that names the image for one that cannot be used.
    """

    def __init__(self, images: EncodedImages, options: ImageOptions, split: Split, kind: str) -> None:
        self._images = images
        self._options = options
        self._kind = kind
        self._pipeline = pipeline_of(split, options.transforms, options.heldout_transforms, options.mode)

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return {
            PIXELS: ColumnSpec(dtype="float32", shape=self._shape),
            LABELS: ColumnSpec(dtype=self._images.labels.dtype.name, limit=self._images.classes),
        }

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        return self._decoded(0, 0, 0).shape

    @property
    def fingerprint(self) -> str:
        """Digests the split's encoded bytes, labels and settings, and nothing decoded."""
        settings = {
            "kind": self._kind,
            "versions": self._pipeline.versions,
            **{name: value for name, value in msgspec.to_builtins(self._options).items() if name in _OF_SAMPLES},
        }
        return fingerprint_of(settings, [self._images.labels, *self._images.contents()])

    def __len__(self) -> int:
        return len(self._images.labels)

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        """Random transforms as those of seed 0 in epoch 0."""
        return self.drawn(indices, columns, 0, np.zeros(len(indices), dtype=np.int64))

    def drawn(
        self, indices: Indices, columns: Sequence[str], seed: int, epochs: NDArray[np.int64]
    ) -> dict[str, torch.Tensor]:
        """Return the same as `batch`, of these epochs."""
        check_columns(columns, (PIXELS, LABELS))
        samples = checked(indices, len(self))
        arrays: dict[str, Array] = {}
        if PIXELS in columns:
            arrays[PIXELS] = values = np.empty((len(samples), *self._shape), dtype=np.float32)
            for row, (sample, epoch) in enumerate(zip(samples, epochs, strict=True)):
                found = self._decoded(int(sample), seed, int(epoch))
                if found.shape != self._shape:
                    raise StepError(
                        self._named(int(sample)),
                        f"got {_sides(found.shape)}, expected {_sides(self._shape)} as the first sample has: "
                        "resize or crop to one size (data option 'transforms')",
                    )
                values[row] = found
        if LABELS in columns:
            arrays[LABELS] = self._images.labels[samples]
        return as_tensors({name: arrays[name] for name in columns})

    def _decoded(self, sample: int, seed: int, epoch: int) -> NDArray[np.float32]:
        named = self._named(sample)
        with self._images.open(sample) as file:
            image = decode(file, named, self._options)
        return self._pipeline.applied(image, stream(seed, "augment", epoch, sample), named)

    def _named(self, sample: int) -> str:
        return f"{self._kind} {self._images.name(sample)} (sample {sample})"

    def owners(self, column: str) -> NDArray[np.generic]:
        """(samples,) a column's values, where the images come with columns that say whose they are; or UserError."""
        owners = getattr(self._images, "owners", None)
        if owners is None:
            raise UserError(f"data of kind {self._kind!r} has no column {column!r}, only a label")
        return owners(column)


_OF_SAMPLES = (*PixelOptions.__struct_fields__, "transforms", "heldout_transforms")


def _sides(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[2]} pixels (height x width)"
