"""Masks over vectors of 64-bit integers, mod 2^64: a key's stream is added to one update and taken off another.

The sums are the exact ones of `fixed_point`. Addition mod 2^64 is associative, so the masks cancel to the last bit, and
a sum is the same with them as without.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import PeerError

Vector = NDArray[np.uint64]
_START = bytes(16)  # ChaCha20's counter and nonce: each key is used for one stream
_BLOCK = 1 << 16  # numbers that are masked while they lie in the processor's caches
WEIGHTS = "/weights"
"""Weights of a masked update, in units of 2^-20, and the number of updates in it. A client's value has no such name."""


def add_mask(vector: Vector, key: bytes, sign: int = 1) -> None:
    """Add the stream of a key of 32 bytes to a vector, or with `sign` -1 take it off, in place."""
    stream = Cipher(ChaCha20(key, _START), mode=None).encryptor()
    most = 8 * min(len(vector), _BLOCK)
    zeros, block = memoryview(bytes(most)), bytearray(most + 64)
    for start in range(0, len(vector), _BLOCK):
        part = vector[start : start + _BLOCK]
        size = 8 * len(part)
        stream.update_into(zeros[:size], block)
        numbers = np.frombuffer(block, dtype="<u8", count=len(part))
        (np.add if sign > 0 else np.subtract)(part, numbers, out=part)


def joined(values: Mapping[str, Tensor]) -> Vector:
    """Values of int64 as one vector, in the order of their names: a copy."""
    return np.concatenate([values[name].numpy().view(np.uint64) for name in sorted(values)])


def parted(vector: Vector, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The values of a vector again, int64; they share its memory."""
    found: dict[str, Tensor] = {}
    start = 0
    for name in sorted(sizes):
        found[name] = torch.from_numpy(vector[start : start + sizes[name]].view(np.int64))
        start += sizes[name]
    return found


def check_masked(values: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
    """PeerError for what is no masked update of these sizes. What is in it nobody can see."""
    got = {name: (value.dtype, tuple(value.shape)) for name, value in values.items()}
    expected = {name: (torch.int64, (size,)) for name, size in sizes.items()}
    if got != expected:
        raise PeerError(f"sent a masked update of {len(got)} values, expected int64 vectors {dict(sizes)}")
