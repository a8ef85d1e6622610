"""Which elements of a tensor are sent: a rising row of positions in a few bits each.

Where more than a fourth is sent, a bitmap. Otherwise the code of Elias (1974) and Fano (1971): the low bits of every
position as they are; the high parts, which rise slowly, in unary, as a row of flags with a one for each position and a
zero for each step up. Its length depends on the counts alone.

    positions 3, 18, 21, 50 of 64      low 4 bits: 3 2 5 2      high: 0 1 1 3  ->  1  0 1 1  0 0 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.plans.packing import high_bits, low_bits, position_bytes, uses_bitmap
from isthmus.training.compression.bits import pack_flags, pack_numbers, unpack_flags, unpack_numbers


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
