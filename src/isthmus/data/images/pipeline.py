"""A job's list of transforms, read and applied; those that are torchvision's alone are called there.

They draw from torch's generator, which is set for each image from the image's own stream and put back afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.data.dataset import Split
from isthmus.data.images.decoding import CHANNELS, pixels
from isthmus.data.images.transforms import BUILT_IN, Transform
from isthmus.errors import StepError, UserError, unknown_name
from isthmus.extensions import import_extra, read_options

if TYPE_CHECKING:
    from PIL.Image import Image


MODULE = "torchvision.transforms.v2"
_MADE_HERE = frozenset({"ToTensor", "ToImage", "ToDtype", "ToPILImage", "PILToTensor", "ConvertImageDtype"})


def torchvisions() -> ModuleType:
    """UserError where it is not installed, or not of torch's build: it then raises anything while it is imported."""
    try:
        return importlib.import_module(MODULE)
    except ImportError:
        return import_extra(MODULE, "this transform")  # it says what installs it
    except Exception as e:
        raise UserError(
            f"torchvision cannot be imported beside this torch ({' '.join(str(e).split())}): install the one that was "
            "built for it, from the same index"
        ) from e


class TorchvisionTransform:
    """One of torchvision's. UserError for a name that it does not have, or options that it refuses."""

    def __init__(self, name: str, options: Mapping[str, object], built_in: Sequence[str]) -> None:
        if name in _MADE_HERE:
            raise UserError(f"transform {name!r}: pixels become float32 of 0 to 1 by themselves: leave it out")
        try:
            module = torchvisions()
        except UserError as e:
            raise UserError(f"{unknown_name('transform', name, built_in)}; others need torchvision: {e}") from e
        kind = getattr(module, name, None)
        if not (isinstance(kind, type) and issubclass(kind, module.Transform)):
            names = [n for n, found in vars(module).items() if isinstance(found, type)]
            raise unknown_name("transform", name, {*built_in, *names})
        try:
            self._transform = kind(**options)
        except Exception as e:  # each refuses its own options in its own way
            raise UserError(f"transform {name!r}: {' '.join(str(e).split())}") from e
        self._name = name
        self.version: str = import_extra("torchvision").__version__

    def apply(self, image: Image, draws: np.random.Generator) -> Image:
        torch = import_extra("torch", "the data")
        before = torch.get_rng_state()
        # Not `torch.manual_seed`, which seeds every accelerator too.
        torch.default_generator.manual_seed(int(draws.integers(2**62)))
        try:
            made: object = self._transform(image)
        finally:
            torch.set_rng_state(before)
        if not isinstance(made, import_extra("PIL.Image").Image):
            raise ValueError(f"{self._name}: returned {type(made).__name__}, expected an image")
        return cast("Image", made)

    def heldout(self) -> Sequence[Transform] | None:
        return None


Table = dict[str, object]  # `name`, and the options of the transform of that name


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
    """The steps of an image, from decoded to float32 [channels, height, width]."""

    def __init__(self, transforms: Sequence[Transform], normalize: Normalize | None) -> None:
        self._transforms = transforms
        self._normalize = normalize

    @property
    def versions(self) -> list[str]:
        """Versions of libraries that the pixels depend on, besides Pillow."""
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

    def applied(self, image: Image, draws: np.random.Generator, named: str) -> NDArray[np.float32]:
        """Return the same as a call. `StepError` that begins with `named` for an image that cannot go through."""
        try:
            return self(image, draws)
        except (UserError, StepError, MemoryError):
            raise
        except Exception as e:  # torchvision's transforms may raise anything
            raise StepError(named, " ".join(str(e).split()) or type(e).__name__) from e

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


def pipeline_of(split: Split, transforms: Sequence[Table], heldout: Sequence[Table] | None, mode: str) -> ImagePipeline:
    """The pipeline of a split, by its data's options. UserError as of `read_pipeline`, and `ImagePipeline.heldout`."""
    found = read_pipeline(transforms, mode, "transforms")
    if heldout is None:
        return found.heldout() if split == "heldout" else found
    other = read_pipeline(heldout, mode, "heldout_transforms")  # for training too: a mistake is refused at once
    return other if split == "heldout" else found


def _read(name: str, options: Mapping[str, object], where: str) -> Transform:
    kinds = {kind.__name__: kind for kind in BUILT_IN}
    if name in kinds:
        kind = cast("type[msgspec.Struct]", kinds[name])
        return cast(Transform, read_options(f"{where} ({name})", options, kind))
    try:
        return TorchvisionTransform(name, options, (*kinds, Normalize.__name__))
    except UserError as e:
        raise UserError(f"{where}: {e}") from None
