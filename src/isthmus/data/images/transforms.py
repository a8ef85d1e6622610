"""Transforms of images under the names, options and meanings of `torchvision.transforms.v2`.

Those that nearly every job needs are computed here, by Pillow, as torchvision computes them on Pillow's images, so
that all devices agree whether they have torchvision or not. Random ones draw from the generator that they are given.
Any other name is torchvision's own (`others`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.data.images.decoding import MOST_PIXELS
from isthmus.extensions import import_extra

if TYPE_CHECKING:
    from PIL.Image import Image

# `_check_lengths` checks their ranges: msgspec 0.22 crashes on unions of numbers with limits and tuples.
Size = int | tuple[int, int]  # (height, width), or one number: of `Resize` the shorter side, elsewhere both
Padding = int | tuple[int, ...]  # pixels on all sides; left and right, top and bottom; or left, top, right, bottom
MOST_LENGTH = 8192
Share = Annotated[float, Meta(ge=0, le=1)]
PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
Interpolation = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
_PILLOWS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
_TRIES = 10


class Transform(Protocol):
    """An image becomes another one."""

    def apply(self, image: Image, draws: np.random.Generator) -> Image:
        """ValueError for an image that it cannot take."""
        ...

    def heldout(self) -> Sequence[Transform] | None:
        """Return the transforms of held-out images; None where they cannot be derived."""
        ...


class Resize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """To `size`; one number is the shorter side, and `max_size` bounds the longer one."""

    size: Size
    interpolation: Interpolation = "bilinear"
    max_size: int | None = None

    def __post_init__(self) -> None:
        _check_lengths("size", self.size, 1)
        if self.max_size is not None and (not isinstance(self.size, int) or self.max_size <= self.size):
            raise ValueError("max_size: expected more than size, which is the shorter side")

    def apply(self, image: Image, draws: np.random.Generator) -> Image:
        return _resized(image, self._size(*image.size), self.interpolation)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """(height, width)"""
        if not isinstance(self.size, int):
            return self.size
        short, long = self.size, int(self.size * max(width, height) / min(width, height))
        if self.max_size is not None and long > self.max_size:
            short, long = max(1, int(self.max_size * short / long)), self.max_size
        return (long, short) if width <= height else (short, long)

    def heldout(self) -> Sequence[Transform]:
        return [self]


class CenterCrop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The middle; an image that is smaller is put on black."""

    size: Size

    def __post_init__(self) -> None:
        _check_lengths("size", self.size, 1)

    def apply(self, image: Image, draws: np.random.Generator) -> Image:
        height, width = _sides(self.size)
        across, down = max(width - image.width, 0), max(height - image.height, 0)
        if across or down:
            margins = (across // 2, down // 2, (across + 1) // 2, (down + 1) // 2)
            image = _padded(image, margins, 0, "constant")
        top, left = round((image.height - height) / 2), round((image.width - width) / 2)
        return image.crop((left, top, left + width, top + height))

    def heldout(self) -> Sequence[Transform]:
        return [self]


class Pad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`fill` is of 0 to 255."""

    padding: Padding
    fill: Annotated[float, Meta(ge=0, le=255)] = 0
    padding_mode: PaddingMode = "constant"

    def __post_init__(self) -> None:
        _check_lengths("padding", self.padding, 0)

    def apply(self, image: Image, draws: np.random.Generator) -> Image:
        return _padded(image, _margins(self.padding), self.fill, self.padding_mode)

    def heldout(self) -> Sequence[Transform]:
        return [self]


class RandomCrop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any place alike. `pad_if_needed` pads an image that is smaller on both sides by what it lacks."""

    size: Size
    padding: Padding | None = None
    pad_if_needed: bool = False
    fill: Annotated[float, Meta(ge=0, le=255)] = 0
    padding_mode: PaddingMode = "constant"

    def __post_init__(self) -> None:
        _check_lengths("size", self.size, 1)
        if self.padding is not None:
            _check_lengths("padding", self.padding, 0)

    def apply(self, image: Image, draws: np.random.Generator) -> Image:
        height, width = _sides(self.size)
        left, top, right, bottom = (0, 0, 0, 0) if self.padding is None else _margins(self.padding)
        if self.pad_if_needed:
            down = max(height - (image.height + top + bottom), 0)
            across = max(width - (image.width + left + right), 0)
            left, top, right, bottom = left + across, top + down, right + across, bottom + down
        image = _padded(image, (left, top, right, bottom), self.fill, self.padding_mode)
        if image.height < height or image.width < width:
            raise ValueError(
                f"RandomCrop: got {image.height} x {image.width} pixels (height x width), expected at least "
                f"{height} x {width}"
            )
        y, x = int(draws.integers(image.height - height + 1)), int(draws.integers(image.width - width + 1))
        return image.crop((x, y, x + width, y + height))

    def heldout(self) -> Sequence[Transform]:
        return [CenterCrop(size=self.size)]


class RandomResizedCrop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of `scale` of the area and a `ratio` of width to height, resized to `size` (Szegedy et al. 2015)."""

    size: Size
    scale: tuple[Share, Share] = (0.08, 1.0)
    ratio: tuple[Annotated[float, Meta(gt=0)], Annotated[float, Meta(gt=0)]] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        _check_lengths("size", self.size, 1)
        if self.scale[0] > self.scale[1] or self.ratio[0] > self.ratio[1]:
            raise ValueError("scale and ratio: expected the smaller number first")
        if not self.scale[1] or not math.isfinite(self.ratio[1]):
            raise ValueError(f"got scale {self.scale} and ratio {self.ratio}, expected a part with an area")

    def apply(self, image: Image, draws: np.random.Generator) -> Image:
        left, top, width, height = self._box(image.width, image.height, draws)
        return _resized(image.crop((left, top, left + width, top + height)), _sides(self.size), self.interpolation)

    def _box(self, width: int, height: int, draws: np.random.Generator) -> tuple[int, int, int, int]:
        for _ in range(_TRIES):
            area = width * height * draws.uniform(*self.scale)
            ratio = math.exp(draws.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return int(draws.integers(width - w + 1)), int(draws.integers(height - h + 1)), w, h
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
        return (width - w) // 2, (height - h) // 2, w, h

    def heldout(self) -> Sequence[Transform]:
        return [Resize(size=max(_sides(self.size)), interpolation=self.interpolation), CenterCrop(size=self.size)]


class RandomHorizontalFlip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Left to right, with probability `p`."""

    p: Share = 0.5

    def apply(self, image: Image, draws: np.random.Generator) -> Image:
        return import_extra("PIL.ImageOps").mirror(image) if draws.random() < self.p else image

    def heldout(self) -> Sequence[Transform]:
        return []


class RandomVerticalFlip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Top to bottom, with probability `p`."""

    p: Share = 0.5

    def apply(self, image: Image, draws: np.random.Generator) -> Image:
        return import_extra("PIL.ImageOps").flip(image) if draws.random() < self.p else image

    def heldout(self) -> Sequence[Transform]:
        return []


def _check_lengths(option: str, given: int | tuple[int, ...], least: int) -> None:
    """ValueError for a size or padding of another form."""
    allowed = (2,) if option == "size" else (2, 4)
    if not isinstance(given, int) and len(given) not in allowed:
        raise ValueError(f"{option}: got {len(given)} numbers, expected 1 or {' or '.join(map(str, allowed))}")
    numbers = (given,) if isinstance(given, int) else given
    if not all(least <= number <= MOST_LENGTH for number in numbers):
        raise ValueError(f"{option}: got {given}, expected {least} to {MOST_LENGTH}")


def _sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _margins(padding: int | tuple[int, ...]) -> tuple[int, int, int, int]:
    """(left, top, right, bottom)"""
    if isinstance(padding, int):
        return padding, padding, padding, padding
    left, top = padding[:2]
    right, bottom = padding[2:] or padding
    return left, top, right, bottom


def _resized(image: Image, size: tuple[int, int], interpolation: str) -> Image:
    height, width = size
    _check_area(width, height)
    return image if image.size == (width, height) else image.resize((width, height), _PILLOWS[interpolation])


def _padded(image: Image, margins: tuple[int, int, int, int], fill: float, mode: PaddingMode) -> Image:
    left, top, right, bottom = margins
    if not any(margins):
        return image
    _check_area(image.width + left + right, image.height + top + bottom)
    values: NDArray[np.generic] = np.asarray(image)
    widths = [(top, bottom), (left, right), (0, 0)][: values.ndim]
    if mode == "constant":
        padded = np.pad(values, widths, constant_values=fill / 255 if image.mode == "F" else fill)
    else:
        padded = np.pad(values, widths, mode)
    return import_extra("PIL.Image").fromarray(padded)


def _check_area(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise ValueError(f"a transform makes {width} x {height} pixels, expected at most {MOST_PIXELS}")


BUILT_IN: tuple[type[Transform], ...] = (
    Resize,
    CenterCrop,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
)
