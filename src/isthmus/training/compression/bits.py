"""Flags and short numbers as bytes, in torch operations that run on any device. The lowest bit comes first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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
