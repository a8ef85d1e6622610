"""Keyed digests of tensors: a leaf for each tensor, and a node over leaves (BLAKE3).

Gradients, of which only the device itself speaks, have leaves of XXH3-128, three times as fast. A device that knows the
key could find two tensors with one such digest. A device that lies need not: it reports the digest of what it should
have computed, and is found by what it sends in the step after. A bit that flips is found by either hash.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec
from blake3 import blake3
from torch import Tensor
from xxhash import xxh3_128

from isthmus.training.layout import bytes_of

KEY_BYTES = 32
DIGEST_BYTES = 16


def leaf(key: bytes, value: Tensor | float) -> str:
    """Return the digest of a host tensor (type, shape, and elements in the order of indices), or of a number."""
    if not isinstance(value, Tensor):
        return blake3(struct.pack("<d", value), key=key).hexdigest(length=DIGEST_BYTES)
    return blake3(_form(value), key=key).update(_elements(value)).hexdigest(length=DIGEST_BYTES)


def quick_leaf(key: bytes, value: Tensor) -> str:
    """Return the same as `leaf`, where nobody gains by two tensors with one digest."""
    made = xxh3_128(_form(value), seed=int.from_bytes(key[:8], "little"))
    made.update(_elements(value))
    return made.hexdigest()


def _form(value: Tensor) -> bytes:
    return f"{value.dtype} {tuple(value.shape)} ".encode()


def _elements(value: Tensor) -> memoryview:
    dense = value.detach().to_dense() if value.is_sparse else value.detach()
    return bytes_of(dense.contiguous().resolve_conj().resolve_neg().view(-1))


def fold(key: bytes, leaves: Mapping[str, str]) -> str:
    """Return the digest of a node: names and digests of its leaves, in the order of their names."""
    return blake3(msgspec.json.encode(sorted(leaves.items())), key=key).hexdigest(length=DIGEST_BYTES)
