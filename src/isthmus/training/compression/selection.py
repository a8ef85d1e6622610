"""The k elements of largest magnitude, found by a threshold: exact, in ascending order, and without sorting.

A sample says what the k-th magnitude is about. One pass collects the candidates above a threshold a little below that,
and among these few the exact k-th is found. A sample that misleads costs time, never accuracy. `torch.topk` has to
order a copy of everything. (Rejected: histograms of the bits, whose counting torch has no fast operation for on a CPU;
keeping the candidates as they are, which makes the payload's size a matter of luck.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE = 1 << 16
"""Elements of a sample at most; of small tensors a sixteenth."""
DIRECT = 1 << 14
"""Up to so many elements a threshold gains nothing."""
CHUNK = 1 << 20
"""Elements per step of the pass on a CPU: they stay in its caches, and one buffer serves all steps."""
DEVIATIONS = 4.0
"""How far below the sample's own estimate the threshold lies, in standard deviations of the estimate's rank."""
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def largest(values: Tensor, count: int) -> Tensor:
    """Positions, ascending int64, of the `count` largest magnitudes of a flat contiguous floating point tensor.

    Of equal magnitudes those at lower positions are taken. NaN counts as larger than Inf, Inf as larger than numbers.
    `count` is at most the number of elements.
    """
    elements = values.numel()
    if count == 0 or count == elements:
        return torch.arange(count, device=values.device)
    # Read as integers without their sign, floating point numbers keep their order, and NaN has a place in it.
    raw = values.view(_INTEGER[values.element_size()])
    floor = 0 if elements <= DIRECT else _estimate(raw, count)
    candidates = _at_least(raw, max(floor, 1))
    if candidates.numel() < count and floor > 1:  # the sample was not like the rest
        candidates = _at_least(raw, 1)
    if candidates.numel() < count:  # fewer than `count` are not zero
        return _filled_up(candidates, count)
    return candidates[_exactly(_magnitudes(raw[candidates]), count)]


def _magnitudes(raw: Tensor) -> Tensor:
    return raw & torch.iinfo(raw.dtype).max


def _estimate(raw: Tensor, count: int) -> int:
    """A magnitude that most likely at least `count` elements have, and not many more."""
    stride = max(16, raw.numel() // SAMPLE) | 1  # odd: a power of two would meet the same channel again and again
    sample = _magnitudes(raw[::stride])
    share = count / raw.numel() * sample.numel()
    rank = math.ceil(share + DEVIATIONS * math.sqrt(share)) + 1
    return int(sample.kthvalue(sample.numel() - rank + 1).values) if rank <= sample.numel() else 0


def _at_least(raw: Tensor, floor: int) -> Tensor:
    """Positions of magnitudes not below `floor`."""
    if raw.device.type != "cpu":
        return (_magnitudes(raw) >= floor).nonzero().squeeze(1)
    size = min(CHUNK, raw.numel())
    buffer, flags = torch.empty(size, dtype=raw.dtype), torch.empty(size, dtype=torch.bool)
    found: list[Tensor] = []
    for start in range(0, raw.numel(), CHUNK):
        part = raw[start : start + CHUNK]
        magnitudes = torch.bitwise_and(part, torch.iinfo(raw.dtype).max, out=buffer[: part.numel()])
        found.append(_where(torch.ge(magnitudes, floor, out=flags[: part.numel()])).add_(start))
    return torch.cat(found)


def _where(flags: Tensor) -> Tensor:
    """As `flags.nonzero()`, faster where few are set: eight at a time first."""
    if flags.numel() % 8:
        return flags.nonzero().squeeze(1)
    words = flags.view(torch.int64)
    some = words.nonzero().squeeze(1)
    inside = words[some].view(torch.bool).nonzero().squeeze(1)
    return (some[inside >> 3] << 3) + (inside & 7)


def _exactly(magnitudes: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest, ascending; of equal ones the first."""
    last = magnitudes.kthvalue(magnitudes.numel() - count + 1).values
    keep = magnitudes > last
    ties = (magnitudes == last).nonzero().squeeze(1)
    keep[ties[: count - int(keep.sum())]] = True
    return keep.nonzero().squeeze(1)


def _filled_up(positions: Tensor, count: int) -> Tensor:
    """These and the lowest others, `count` in all: the first `count` positions hold enough of them."""
    free = torch.ones(count, dtype=torch.bool, device=positions.device)
    free[positions[positions < count]] = False
    others = free.nonzero().squeeze(1)[: count - positions.numel()]
    return torch.cat([positions, others]).sort().values
