"""Four bits for every element, after a Hadamard transform of each tile (TAH-Quant, arXiv 2506.01352)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.plans.packing import INT4_TILE, int4_bytes
from isthmus.training.compression.codec import (
    check_decoded,
    check_extremes,
    checked_payload,
    flat_floats,
    from_wide,
    pieces,
    to_bf16,
)

LEVELS = 15


@dataclass(frozen=True)
class Int4:
    """Rounds to 16 levels between the lowest and the highest value of each transformed tile.

    The transform mixes the elements of a tile evenly, so that no outlier sets the step of the others. The largest
    element, the pivot, is first swapped to the front: the transform's first row is all ones, which makes an outlier an
    offset of the whole tile, and the lowest value takes it off. The transform is orthogonal, so the error's norm over a
    tile y of 64, transformed, is at most 8 (step / 2 + 2^-7 max |y|). The paper gives some tiles three bits by their
    entropy; here each has four, so that the size follows from the shape.

    Layout: steps, lowest values, pivots, and two elements in each byte.
    """

    tile: int = INT4_TILE  # elements that are mixed, and share a step: a power of two, 256 at most
    name: str = "int4"

    @property
    def _smaller(self) -> float:
        """Transformed values are divided by this power of two, which rounds nothing, so that no sum overflows."""
        return 2.0 * self.tile

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        flat = flat_floats(tensor, self.name, name)
        payload = torch.empty(self.wire_bytes(flat.numel(), flat.dtype), dtype=torch.uint8, device=flat.device)
        steps, lows, pivots, nibbles = self._fields(payload)
        # By a number GPUs multiply with its reciprocal, which rounds otherwise
        levels = torch.full((), float(LEVELS), device=flat.device)
        for part in pieces(flat):
            tiles = functional.pad(flat[part], (0, -(part.stop - part.start) % self.tile)).view(-1, self.tile)
            magnitudes = tiles.abs()
            extremes = magnitudes.amax(1, keepdim=True)
            check_extremes(extremes.max().item(), self.name, name)
            places = torch.arange(self.tile, device=flat.device)
            pivot = torch.where(magnitudes == extremes, places, self.tile).amin(1)  # the first: argmax takes any
            mixed = _hadamard(_swapped(tiles.to(torch.float32), pivot).div_(self._smaller))
            low = to_bf16(mixed.amin(1)).to(torch.float32)
            step = to_bf16((mixed.amax(1) - low).clamp_(min=0) / levels).to(torch.float32)
            found = ((mixed - low[:, None]) / torch.where(step > 0, step, 1.0)[:, None]).round_().clamp_(0, LEVELS)
            pairs = found.to(torch.uint8).view(-1, self.tile // 2, 2)
            at = self._of_tiles(part)
            steps[at], lows[at], pivots[at] = step.to(torch.bfloat16), low.to(torch.bfloat16), pivot.to(torch.uint8)
            nibbles[at] = pairs[..., 0] | pairs[..., 1] << 4
        return payload

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        data = checked_payload(self, payload, shape, dtype, name)
        steps, lows, pivots, nibbles = self._fields(data)
        found = torch.empty(math.prod(shape), dtype=dtype, device=data.device)
        for part in pieces(found):
            at = self._of_tiles(part)
            step, low = (x[at].to(torch.float32)[:, None] for x in (steps, lows))
            levels = torch.stack([nibbles[at] & LEVELS, nibbles[at] >> 4], -1).view(-1, self.tile).to(torch.float32)
            mixed = levels.mul_(step).add_(low)
            check_decoded(mixed, self.name, name)
            largest = torch.finfo(torch.bfloat16).max / self._smaller
            small = _hadamard(mixed.div_(self.tile)).clamp_(-largest, largest)
            tiles = _swapped(small.mul_(self._smaller), pivots[at].clamp(max=self.tile - 1))
            found[part] = from_wide(tiles.view(-1)[: part.stop - part.start], dtype)
        return found.view(tuple(shape))

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return int4_bytes(elements, self.tile)

    def _fields(self, payload: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Steps, lowest values, pivots, and the levels of each tile."""
        tiles = payload.numel() // int4_bytes(1, self.tile)
        steps, lows, pivots, nibbles = payload.split([2 * tiles, 2 * tiles, tiles, tiles * self.tile // 2])
        return steps.view(torch.bfloat16), lows.view(torch.bfloat16), pivots, nibbles.view(tiles, self.tile // 2)

    def _of_tiles(self, part: slice) -> slice:
        return slice(part.start // self.tile, -(-part.stop // self.tile))


def _swapped(tiles: Tensor, pivot: Tensor) -> Tensor:
    """A copy with each tile's first element and its pivot exchanged."""
    found, at = tiles.clone(), pivot[:, None].to(torch.int64)
    found[:, :1] = tiles.gather(1, at)
    return found.scatter_(1, at, tiles[:, :1])


def _hadamard(tiles: Tensor) -> Tensor:
    """Transform each row, unscaled: rounds of sums and differences, in an order that no hardware changes."""
    (rows, width), half = tiles.shape, 1
    while half < width:
        a, b = tiles.view(rows, -1, 2, half).unbind(2)
        tiles = torch.stack([a + b, a - b], 2).view(rows, width)
        half *= 2
    return tiles
