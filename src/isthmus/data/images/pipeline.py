"""A job's list of transforms, read and applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.data.images.decoding import CHANNELS, pixels
from isthmus.data.images.torchvision_transforms import TorchvisionTransform
from isthmus.data.images.transforms import BUILT_IN, Transform
from isthmus.errors import UserError
from isthmus.extensions import read_options

if TYPE_CHECKING:
    from PIL.Image import Image

Table = dict[str, object]
"""`name`, and the options of the transform of that name."""


class Normalize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """(pixels - mean) / std, a number per channel; the last of the list."""

    mean: Annotated[tuple[float, ...], Meta(min_length=1)]
    std: Annotated[tuple[float, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(f"got {len(self.mean)} means and {len(self.std)} deviations, expected as many")
        for mean, std in zip(_narrow(self.mean), _narrow(self.std), strict=True):
            if not (np.isfinite(mean) and np.isfinite(std) and std):
                raise ValueError(
                    f"got mean {mean:g} and std {std:g}, expected finite numbers (float32), std other than 0"
                )


def _narrow(numbers: Sequence[float]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return np.array(numbers, dtype=np.float32)


class ImagePipeline:
    """What an image goes through, from decoded to float32 [channels, height, width]."""

    def __init__(self, transforms: Sequence[Transform], normalize: Normalize | None) -> None:
        self._transforms = transforms
        self._normalize = normalize

    @property
    def versions(self) -> list[str]:
        """Of libraries that the pixels depend on, besides Pillow."""
        return sorted({f"torchvision {t.version}" for t in self._transforms if isinstance(t, TorchvisionTransform)})

    def __call__(self, image: Image, draws: np.random.Generator) -> NDArray[np.float32]:
        """ValueError, or whatever a transform of torchvision's raises, for an image that cannot go through."""
        for transform in self._transforms:
            image = transform.apply(image, draws)
        found = pixels(image)
        if self._normalize is None:
            return found
        mean, std = (_narrow(v)[:, None, None] for v in (self._normalize.mean, self._normalize.std))
        return (found - mean) / std

    def heldout(self) -> ImagePipeline:
        """The same without chance: random crops become central ones, flips are left out. UserError where a transform
        of torchvision's does not say what that is."""
        instead: list[Transform] = []
        for transform in self._transforms:
            found = transform.heldout()
            if found is None:
                raise UserError(
                    "data option 'heldout_transforms': missing, expected what held-out images go through: of a "
                    "transform of torchvision's it is not known here"
                )
            instead += found
        return ImagePipeline(instead, self._normalize)


def read_pipeline(tables: Sequence[Table], mode: str, option: str) -> ImagePipeline:
    """UserError that names the option, the number of the transform in it, and what is wrong there."""
    transforms: list[Transform] = []
    normalize: Normalize | None = None
    for number, table in enumerate(tables, start=1):
        where = f"data option {option!r}, transform {number}"
        name = table.get("name")
        if not isinstance(name, str):
            raise UserError(f"{where}: got {name!r} as name, expected one such as 'Resize'")
        if normalize is not None:
            raise UserError(f"{where}: got {name!r} after 'Normalize', expected nothing after it")
        options = {key: value for key, value in table.items() if key != "name"}
        if name == Normalize.__name__:
            normalize = read_options(f"{where} ({name})", options, Normalize)
            if len(normalize.mean) not in (1, CHANNELS[mode]):
                raise UserError(
                    f"{where} (Normalize) option 'mean': got {len(normalize.mean)} numbers, expected "
                    f"{CHANNELS[mode]} for mode {mode!r}"
                )
        else:
            transforms.append(_read(name, options, where))
    return ImagePipeline(transforms, normalize)


def _read(name: str, options: Mapping[str, object], where: str) -> Transform:
    kinds = {kind.__name__: kind for kind in BUILT_IN}
    if name in kinds:
        kind = cast("type[msgspec.Struct]", kinds[name])
        return cast(Transform, read_options(f"{where} ({name})", options, kind))
    try:
        return TorchvisionTransform(name, options, (*kinds, Normalize.__name__))
    except UserError as e:
        raise UserError(f"{where}: {e}") from None
