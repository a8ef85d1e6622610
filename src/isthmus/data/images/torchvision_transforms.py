"""Transforms that are torchvision's alone, by their names in `torchvision.transforms.v2`.

They draw from torch's generator, which is set for each image from the image's own stream and put back afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

import numpy as np

from isthmus.data.images.transforms import Transform
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_extra

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
