"""Keyed digests of tensors (BLAKE3): a leaf for each tensor, and a node over leaves."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec
from blake3 import blake3
from torch import Tensor

from isthmus.training.layout import bytes_of

KEY_BYTES = 32
DIGEST_BYTES = 16


def leaf(key: bytes, value: Tensor | float) -> str:
    """Of a tensor on the host, its type, its shape and its elements in the order of their indices; or of a number."""
    if not isinstance(value, Tensor):
        return blake3(struct.pack("<d", value), key=key).hexdigest(length=DIGEST_BYTES)
    dense = value.detach().to_dense() if value.is_sparse else value.detach()
    flat = dense.contiguous().resolve_conj().resolve_neg().view(-1)
    made = blake3(f"{value.dtype} {tuple(value.shape)} ".encode(), key=key)
    return made.update(bytes_of(flat)).hexdigest(length=DIGEST_BYTES)


def fold(key: bytes, leaves: Mapping[str, str]) -> str:
    """Of a node: names and digests of its leaves, in the order of their names."""
    return blake3(msgspec.json.encode(sorted(leaves.items())), key=key).hexdigest(length=DIGEST_BYTES)
