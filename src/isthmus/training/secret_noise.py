"""Gaussian noise that nobody else can draw again.

Torch's generator uses 32 bits of a seed, and the state of numpy's generators follows from enough of their output. An
attacker could compute the noise of either, and subtract it. This module uses ChaCha20's key stream under a key of 256
bits from the system, as Gaussian numbers by Box and Muller (1958).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

KEY_BYTES = 32
_START = bytes(16)
"""ChaCha20's counter and nonce: each key is used for one stream."""
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
