"""For sync deltas: the largest elements of every chunk, a sign and one of two levels each (SparseLoCo).

To be used with `ErrorFeedback`: what a payload leaves out must come later, or a model learns from its largest
parameters alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.plans import Packing
from isthmus.plans.packing import SPARSE_CHUNK, kept, kept_in_chunks
from isthmus.training.compression.codec import (
    as_bytes,
    check_decoded,
    check_extremes,
    checked_payload,
    flat_floats,
    from_wide,
    to_bf16,
)
from isthmus.training.compression.selection import pack_flags, pack_positions, unpack_flags, unpack_positions


@dataclass(frozen=True)
class Sparse2Bit:
    """Sends ceil(4096 / ratio) of every 4,096 elements, in 9 bits each at ratio 32: positions, signs, levels.

    The two levels of a chunk are the mean magnitudes of what lies above and below the mean of all that is kept of it,
    so what comes back is never further from the tensor than zeros would be: |x - decoded|^2 <= |x|^2. Layout: levels
    (low, high of each chunk, bfloat16), signs, which level, positions. SparseLoCo (arXiv 2508.15706) writes
    12-bit indexes.
    """

    ratio: float = 32.0
    name: str = "sparse2bit"

    def __post_init__(self) -> None:
        Packing(codec=self.name, ratio=self.ratio)  # UserError for a ratio below 1

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        flat = flat_floats(tensor, self.name, name)
        if not flat.numel():
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        where = self._selected(flat)
        values = flat[where]
        check_extremes(values.abs().max().item(), self.name, name)  # NaN and Inf are the largest: any was taken
        magnitudes = values.abs().to(torch.float32)
        chunk = where // SPARSE_CHUNK
        chunks = -(-flat.numel() // SPARSE_CHUNK)
        high = magnitudes > _means(magnitudes, chunk, chunks)[chunk]
        levels = _means(magnitudes, 2 * chunk + high, 2 * chunks)
        return torch.cat(
            [as_bytes(to_bf16(levels)), pack_flags(torch.cat([values < 0, high])), pack_positions(where, flat.numel())]
        )

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        data = checked_payload(self, payload, shape, dtype, name)
        elements = math.prod(shape)
        count, chunks = kept_in_chunks(elements, self.ratio), -(-elements // SPARSE_CHUNK)
        levels_end = 4 * chunks
        flags_end = levels_end + -(-2 * count // 8)
        levels = data[:levels_end].view(torch.bfloat16)
        check_decoded(levels, self.name, name)
        where = unpack_positions(data[flags_end:], elements, count, f"{self.name} of {name!r}")
        negative, high = unpack_flags(data[levels_end:flags_end], 2 * count).view(2, count)
        magnitudes = from_wide(levels, dtype)[2 * (where // SPARSE_CHUNK) + high]
        found = torch.zeros(elements, dtype=dtype, device=payload.device)
        found[where] = torch.where(negative, -magnitudes, magnitudes)
        return found.view(tuple(shape))

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return Packing(codec=self.name, ratio=self.ratio).wire_bytes(elements)

    def _selected(self, flat: Tensor) -> Tensor:
        """Positions of what is kept, ascending."""
        whole, rest = divmod(flat.numel(), SPARSE_CHUNK)
        body, tail = flat[: whole * SPARSE_CHUNK].view(-1, SPARSE_CHUNK), flat[whole * SPARSE_CHUNK :]
        found = [torch.empty(0, dtype=torch.int64, device=flat.device)]
        if whole:
            starts = torch.arange(whole, device=flat.device)[:, None] * SPARSE_CHUNK
            found.append((_top(body, kept(SPARSE_CHUNK, self.ratio)) + starts).view(-1))
        if rest:
            found.append(_top(tail[None], kept(rest, self.ratio))[0] + whole * SPARSE_CHUNK)
        return torch.cat(found)


def _top(rows: Tensor, count: int) -> Tensor:
    """Columns of the largest magnitudes of each row, ascending."""
    return rows.abs().topk(count, dim=1, sorted=False).indices.sort(dim=1).values


def _means(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Mean of each group; zero for one without members. Sums of magnitudes near float32's largest need float64."""
    sums = torch.zeros(groups, dtype=torch.float64, device=values.device).index_add_(0, group, values.to(torch.float64))
    counts = torch.bincount(group, minlength=groups).clamp(min=1)
    return (sums / counts).to(torch.float32)
