"""Values that leave a data holder: clipped per sample, covered with noise that nobody else can draw again, and what so
many releases of one sample tell (local differential privacy).

Torch's generator uses 32 bits of a seed, and the state of numpy's generators follows from enough of their output. An
attacker could compute the noise of either, and subtract it. This module uses ChaCha20's key stream under a key of 256
bits from the system, as Gaussian numbers by Box and Muller (1958).

For the values v of one sample, all that leave together in one vector, and a clip C:

    released = clip(v) + noise        clip(v) = v min(1, C / |v|)        noise ~ N(0, deviation^2) each

Gradients that come back are those of the released values, and go back through the clip; noise is a constant:

    dL/dv = s g                            where |v| <= C, s = 1
    dL/dv = s (g - v <v, g> / |v|^2)       elsewhere, s = C / |v|

A sample whose values are not finite counts as zero: it has no length to clip to, and must not differ from others. In
training the stage reports them, and the run ends as diverged.
Noise is drawn and added in float64 and rounded once to the type that travels. Floating-point noise is not the ideal
Gaussian: its lowest digits can tell values apart (Mironov 2012), which the accounting does not know of.

A release adds Gaussian noise of deviation m C to values whose joint norm is at most C. Local privacy is about one
sample put in another's place: both vectors lie in the ball of radius C, so they differ by at most 2 C (opposite vectors
do), and not by C, as where a sample is added or left out. Against that sensitivity the noise's multiplier is m / 2: one
release is mu-Gaussian differentially private with mu = 2 / m (Dong, Roth and Su 2022, Theorem 1). Releases, under
different multipliers too, compose to the square root of the sum of their mu^2 (Corollary 2 there), exactly.

There is no amplification by sampling: the receiver of a message knows which sample it is of.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import to_device
from isthmus.disclosure import SampleRange
from isthmus.extensions import import_extra
from isthmus.graph.opgraph import Ref
from isthmus.wire_types import Amount, Count, Many, NotNegative

KEY_BYTES = 32
_START = bytes(16)  # chaCha20's counter and nonce: each key is used for one stream
_UNIT = 2.0**-53


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


class SecretNoise:
    """One stream of numbers. 256 GiB of a key's stream are its own: 2^34 numbers."""

    def __init__(self, key: bytes | None = None) -> None:
        """A key of `KEY_BYTES`; a new one unless it is given, which is for tests."""
        self._stream = Cipher(ChaCha20(key or new_key(), _START), mode=None).encryptor()

    def normal(self, shape: Sequence[int]) -> Tensor:
        """The next numbers, float64: independent, of mean 0 and deviation 1. None is further from 0 than 8.6."""
        count = math.prod(shape)
        pairs = -(-count // 2)
        bits = np.frombuffer(self._stream.update(bytes(16 * pairs)), dtype="<u8") >> np.uint64(11)
        radius = np.sqrt(-2 * np.log((bits[:pairs] + np.uint64(1)) * _UNIT))  # of (0, 1]: 0 has no logarithm
        angle = 2 * np.pi * (bits[pairs:] * _UNIT)
        found = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return torch.from_numpy(found[:count]).view(tuple(shape))


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """The values that leave a stage for devices that hold no data, in one pass of one of its graphs."""

    values: Many[tuple[Ref, Amount]] = ()
    """Each with the axis along which the samples lie. All of a sample's are clipped together."""
    per_sample: Amount = 0  # how many numbers they are
    targets: Many[Count] = ()  # stages that take them
    clip: NotNegative = 0.0
    deviation: NotNegative = 0.0


class Released(msgspec.Struct, frozen=True, kw_only=True):
    train: Boundary
    evaluation: Boundary


class _Clipped(NamedTuple):
    values: Mapping[Ref, Tensor]  # as they were computed, in float64, samples first: zero where not finite
    squared: Tensor  # their squared norms, [samples]
    scale: Tensor  # min(1, C / norm), [samples]; 0 where values are not finite


def clip(values: Mapping[Ref, Tensor], boundary: Boundary) -> _Clipped:
    """Norms and factors of all samples. Values are of equal numbers of samples."""
    rows = {ref: values[ref].detach().to(torch.float64).movedim(axis, 0) for ref, axis in boundary.values}
    squared = torch.stack([_sums(row * row) for row in rows.values()]).sum(0)
    whole = squared.isfinite()
    squared = torch.where(whole, squared, 0.0)
    rows = {ref: torch.where(_along(whole, row), row, 0.0) for ref, row in rows.items()}
    # Not C / max(norm, C): where a norm is C to the last digit, the quotient may come out above 1.
    scale = torch.where(squared > boundary.clip**2, boundary.clip / squared.sqrt(), 1.0) * whole
    return _Clipped(rows, squared, scale)


def _sums(rows: Tensor) -> Tensor:
    return rows.flatten(1).sum(1) if rows.ndim > 1 else rows


def _along(per_sample: Tensor, rows: Tensor) -> Tensor:
    return per_sample.view(-1, *[1] * (rows.ndim - 1))


def clip_backward(clipped: _Clipped, gradients: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
    """Gradients of the values from those of the released ones, samples first; where one has none it is zero."""
    inner = torch.stack([_sums(clipped.values[ref] * g) for ref, g in gradients.items()]).sum(0)
    pull = torch.where(clipped.scale < 1, inner / clipped.squared.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    return {ref: _along(clipped.scale, g) * (g - _along(pull, g) * clipped.values[ref]) for ref, g in gradients.items()}


class Privatizer:
    """Clips one stage's values before they leave, and their gradients on the way back, and adds noise.

    Every release draws its noise under a key of its own, from the system's source of random numbers: the job's seed,
    which the coordinator knows, has no part in it, and neither a second pass nor a repeated step draws the same again.
    """

    def __init__(
        self,
        released: Released,
        *,
        keeps: bool,
        accelerator: Accelerator = HOST,
        draw_key: Callable[[], bytes] = new_key,
    ) -> None:
        """`keeps`: gradients of released values will be asked for. `draw_key` is another in tests alone: no job and no
        message reaches it."""
        self.released = released
        self._accelerator = accelerator
        self._keeps = keeps
        self._draw_key = draw_key
        self._clipped: dict[int, _Clipped] = {}

    def forward(self, micro_batch: int, values: Mapping[Ref, Tensor], *, training: bool) -> dict[Ref, Tensor]:
        """Return new tensors to send in place of the boundary's values, with their types and strides."""
        boundary = self.released.train if training else self.released.evaluation
        if not boundary.values:
            return {}
        clipped = clip(values, boundary)
        if training and self._keeps:
            self._clipped[micro_batch] = clipped
        draws = SecretNoise(self._draw_key())
        found: dict[Ref, Tensor] = {}
        for ref, axis in boundary.values:
            row = clipped.values[ref]
            noise = boundary.deviation * draws.normal(row.shape)
            noisy = _along(clipped.scale, row) * row + to_device(self._accelerator, noise)
            found[ref] = torch.empty_like(values[ref]).copy_(noisy.movedim(0, axis))
        return found

    def covers(self, target: int) -> bool:
        """Return whether values for this stage are to be released ones."""
        return target in {*self.released.train.targets, *self.released.evaluation.targets}

    def backward(self, micro_batch: int, arrived: Mapping[int, Mapping[Ref, Tensor]]) -> list[Mapping[Ref, Tensor]]:
        """Gradients of the values as they were computed, from those that came back from each stage."""
        if not self._keeps or not self.released.train.values:
            return list(arrived.values())
        clipped = self._clipped.pop(micro_batch)
        axes, like, sums = dict(self.released.train.values), dict[Ref, Tensor](), dict[Ref, Tensor]()
        for target, given in arrived.items():
            for ref, gradient in given.items() if self.covers(target) else ():
                rows = gradient.to(torch.float64).movedim(axes[ref], 0)
                like[ref], sums[ref] = gradient, sums[ref] + rows if ref in sums else rows
        found = clip_backward(clipped, sums) if sums else {}
        own = {ref: torch.empty_like(like[ref]).copy_(g.movedim(0, axes[ref])) for ref, g in found.items()}
        return [*(given for target, given in arrived.items() if not self.covers(target)), own]


OWNER = "[privacy] activations"


def squared_mu(noise_multiplier: float, releases: int = 1) -> float:
    """mu^2 of so many releases of a sample."""
    return releases * (2 / noise_multiplier) ** 2


@lru_cache(maxsize=1 << 12)
def epsilon_of(mu_squared: float, delta: float) -> float:
    """Convert exactly for the Gaussian mechanism (Balle and Wang 2018, Theorem 8), by dp-accounting."""
    if mu_squared == 0:
        return 0.0
    dp = import_extra("dp_accounting", OWNER)
    with np.errstate(divide="ignore"):  # of a logarithm that is minus infinity, as it is to be
        return float(dp.get_epsilon_gaussian(1 / math.sqrt(mu_squared), delta))


def noise_multiplier_for(epsilon: float, delta: float, releases: int) -> float:
    """The smallest with which so many releases of a sample have this epsilon together."""
    dp = import_extra("dp_accounting", OWNER)
    return 2 * float(dp.get_sigma_gaussian(epsilon, delta)) * math.sqrt(releases)


def spent_by_epoch(stretches: Sequence[SampleRange], size: int) -> list[float]:
    """After each pass over `size` samples, the largest sum of mu^2 that any of them has: that of each pass added up.

    A pass uses each sample once, in an order of its own. Exact where all of a pass is sent equally often, else an upper
    bound.
    """
    passes = -(-max((s.end for s in stretches), default=0) // size)
    each = (_deepest(_within(stretches, e * size, (e + 1) * size)) for e in range(passes))
    return list(itertools.accumulate(each))


def _within(stretches: Iterable[SampleRange], first: int, end: int) -> list[SampleRange]:
    clipped = (SampleRange(first=max(s.first, first), end=min(s.end, end), mu_squared=s.mu_squared) for s in stretches)
    return [s for s in clipped if s.first < s.end]


def _deepest(stretches: Sequence[SampleRange]) -> float:
    """The largest sum over the stretches that share a position."""
    starts = {s.first for s in stretches}
    return max((math.fsum(s.mu_squared for s in stretches if s.first <= at < s.end) for at in starts), default=0.0)
