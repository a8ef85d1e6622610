"""The elements of a tensor that are sent: the k of largest magnitude, found by a threshold without sorting, and their
positions in a few bits each. Flags and short numbers travel as bytes, the lowest bit first.

A sample says what the k-th magnitude is about. One pass collects the candidates above a threshold a little below that,
and among these few the exact k-th is found. A sample that misleads costs time, never accuracy. `torch.topk` has to
order a copy of everything. (Rejected: histograms of the bits, whose counting torch has no fast operation for on a CPU;
keeping the candidates as they are, which makes the payload's size a matter of luck.)

Where more than a fourth is sent, a bitmap. Otherwise the code of Elias (1974) and Fano (1971): the low bits of every
position as they are; the high parts, which rise slowly, in unary, as a row of flags with a one for each position and a
zero for each step up. Its length depends on the counts alone.

    positions 3, 18, 21, 50 of 64      low 4 bits: 3 2 5 2      high: 0 1 1 3  ->  1  0 1 1  0 0 1
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.errors import PeerError
from isthmus.plans.packing import high_bits, low_bits, position_bytes, uses_bitmap

SAMPLE = 1 << 16  # elements of a sample at most; of small tensors a sixteenth
DIRECT = 1 << 14  # up to so many elements a threshold gains nothing
CHUNK = 1 << 20  # elements per step of the pass on a CPU: they stay in its caches, and one buffer serves all steps
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
    """Return the same as `flags.nonzero()`, faster where few are set: eight at a time first."""
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


def pack_positions(positions: Tensor, elements: int) -> Tensor:
    """`position_bytes` bytes for rising int64 positions below `elements`."""
    count, device = positions.numel(), positions.device
    if uses_bitmap(elements, count):
        return pack_flags(_flags(positions, elements))
    bits = low_bits(elements, count)
    steps = (positions >> bits) + torch.arange(count, device=device)
    low = pack_numbers(positions & (1 << bits) - 1, bits)
    return torch.cat([low, pack_flags(_flags(steps, high_bits(elements, count)))])


def unpack_positions(data: Tensor, elements: int, count: int, whose: str) -> Tensor:
    """The positions, from `position_bytes` bytes. PeerError where they are not `count` rising ones below `elements`."""
    assert data.numel() == position_bytes(elements, count), "the caller has checked the payload's size"
    if uses_bitmap(elements, count):
        found = unpack_flags(data, elements).nonzero().squeeze(1)
        fits = found.numel() == count
    else:
        found = _decoded(data, elements, count)
        fits = found.numel() == count and bool((found.diff() > 0).all()) and bool((found[-1:] < elements).all())
    if not fits:
        raise PeerError(f"{whose}: the payload's positions are not {count} rising ones below {elements}")
    return found


def _decoded(data: Tensor, elements: int, count: int) -> Tensor:
    """None at all where the number of ones is wrong."""
    bits = low_bits(elements, count)
    split = -(-count * bits // 8)
    steps = unpack_flags(data[split:], high_bits(elements, count)).nonzero().squeeze(1)
    if steps.numel() != count:
        return steps[:0]
    high = steps - torch.arange(count, device=data.device)
    return (high << bits) + unpack_numbers(data[:split], bits, count)


def _flags(positions: Tensor, count: int) -> Tensor:
    flags = torch.zeros(count, dtype=torch.bool, device=positions.device)
    flags[positions] = True
    return flags


_GATHER = 0x0102040810204080
"""Times eight bytes that are 0 or 1, read as one number: byte i becomes bit 56 + i, and nothing else reaches there."""


def pack_flags(flags: Tensor) -> Tensor:
    """A flat bool tensor as ceil(n / 8) bytes."""
    words = functional.pad(flags.view(torch.uint8), (0, -flags.numel() % 8)).view(torch.int64)
    return (words * _GATHER >> 56).to(torch.uint8)


def unpack_flags(data: Tensor, count: int) -> Tensor:
    """The first `count` flags of `pack_flags`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data[:, None] >> shifts & 1).view(-1)[:count].view(torch.bool)


def pack_numbers(numbers: Tensor, bits: int) -> Tensor:
    """Flat int64 numbers below 2**bits as ceil(n x bits / 8) bytes, one after the other without gaps."""
    shifts = torch.arange(bits, device=numbers.device)
    return pack_flags((numbers[:, None] >> shifts & 1).view(-1).to(torch.bool))


def unpack_numbers(data: Tensor, bits: int, count: int) -> Tensor:
    """The `count` numbers of `pack_numbers`, as int64."""
    flags = unpack_flags(data, count * bits).view(count, bits)
    return (flags.to(torch.int64) << torch.arange(bits, device=data.device)).sum(1)
