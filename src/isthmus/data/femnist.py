"""Data in the shape of FEMNIST: 28 x 28 grey images of 62 classes by writers of very different numbers of samples.

Nothing is downloaded: each class has a smooth random shape, each writer a slant, a shift, a stroke weight and a taste
for some classes, each sample its own noise. So writers differ in style and in labels as LEAF's do, and a model has
something to learn. Sizes follow LEAF's FEMNIST (Caldas et al. 2018, Table 1: mean 226.83, standard deviation 88.94 a
writer), as a log-normal within `smallest` and `largest`. A writer's samples are drawn when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.data.dataset import ColumnSpec, as_tensors, fingerprint_of, joined
from isthmus.errors import UserError
from isthmus.rng import stream

if TYPE_CHECKING:
    import torch

SIDE, CLASSES = 28, 62
LEAF_MEAN, LEAF_DEVIATION = 226.83, 88.94


class FemnistOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`mean` and `deviation` of the writers' sizes; those of LEAF's FEMNIST are the defaults."""

    writers: Annotated[int, Meta(ge=1)] = 3400
    seed: Annotated[int, Meta(ge=0)] = 0
    mean: Annotated[float, Meta(gt=0)] = LEAF_MEAN
    deviation: Annotated[float, Meta(ge=0)] = LEAF_DEVIATION
    smallest: Annotated[int, Meta(ge=1)] = 10
    largest: Annotated[int, Meta(ge=1)] = 1200
    noise: Annotated[float, Meta(ge=0)] = 0.15


class FemnistShaped:
    """The writers as clients, numbered from 0. A negative number is a writer outside the population, for tests."""

    def __init__(self, options: FemnistOptions) -> None:
        if options.largest < options.smallest:
            raise UserError(f"femnist option 'largest': got {options.largest}, expected at least {options.smallest}")
        self._options = options
        draws = stream(options.seed, "data")
        # Log-normal of the wanted mean and deviation, before the ends are cut.
        variance = np.log1p((options.deviation / options.mean) ** 2)
        sizes = draws.lognormal(np.log(options.mean) - variance / 2, np.sqrt(variance), options.writers)
        self.sizes = np.clip(sizes.round(), options.smallest, options.largest).astype(np.int64)
        self._shapes = _shapes(stream(options.seed, "data", 1))

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return {
            "pixel_values": ColumnSpec(dtype="float32", shape=(1, SIDE, SIDE)),
            "labels": ColumnSpec(dtype="int64", limit=CLASSES),
        }

    @property
    def fingerprint(self) -> str:
        return fingerprint_of({"kind": "femnist", **msgspec.to_builtins(self._options)}, ())

    def load(self, client: int) -> dict[str, torch.Tensor]:
        return self._draw(stream(self._options.seed, "data", 2, client), int(self.sizes[client]))

    def load_many(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        return joined([self.load(client) for client in clients])

    def held_out(self, samples: int) -> dict[str, torch.Tensor]:
        """Samples of writers who are not in the population, 20 of each."""
        parts = [
            self._draw(stream(self._options.seed, "data", 3, writer), min(20, samples - start))
            for writer, start in enumerate(range(0, samples, 20))
        ]
        return joined(parts)

    def _draw(self, draws: np.random.Generator, count: int) -> dict[str, torch.Tensor]:
        taste = draws.dirichlet(np.full(CLASSES, 1.0))
        labels = draws.choice(CLASSES, count, p=taste)
        slant, shift = draws.normal(0, 0.15), draws.integers(-2, 3, 2)
        weight = draws.uniform(0.7, 1.3)
        rows = np.arange(SIDE)
        columns = np.rint(rows[None] + slant * (rows[:, None] - SIDE / 2)).astype(np.int64) % SIDE
        style = np.roll(self._shapes[:, rows[:, None], columns], tuple(shift), axis=(1, 2))
        images = style[labels] * weight
        images = images + draws.normal(0, self._options.noise, images.shape)
        pixels = np.clip(images, 0, 1).astype(np.float32)[:, None]
        return as_tensors({"pixel_values": pixels, "labels": labels.astype(np.int64)})


def _shapes(draws: np.random.Generator) -> NDArray[np.float64]:
    """[classes, side, side] in 0 .. 1: noise without its fine detail, a stroke where it is high."""
    spectrum = np.fft.rfft2(draws.normal(size=(CLASSES, SIDE, SIDE)))
    frequency = np.hypot(np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None])
    smooth = np.fft.irfft2(spectrum * np.exp(-((frequency / 0.09) ** 2)), s=(SIDE, SIDE))
    smooth /= smooth.std(axis=(1, 2), keepdims=True)
    return 1 / (1 + np.exp(-4 * (smooth - 0.8)))
