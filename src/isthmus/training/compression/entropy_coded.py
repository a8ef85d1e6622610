"""A codec's payload in fewer bytes: Huffman's code of what it writes, which loses nothing."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.training.compression.codec import Codec

_MEMORY = 9  # the largest blocks, so the fewest tables


@dataclass(frozen=True)
class EntropyCoded:
    """The payload of another codec, deflated without a search for repetitions: levels are no text, and do not repeat,
    but those near the middle are more frequent than those at the ends.

    A payload of the other codec's size is that codec's own, a shorter one is deflated. It is never longer.
    """

    codec: Codec

    @property
    def name(self) -> str:
        return self.codec.name

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        plain = self.codec.encode(tensor, name)
        packer = zlib.compressobj(
            zlib.Z_BEST_SPEED, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY, strategy=zlib.Z_HUFFMAN_ONLY
        )
        packed = packer.compress(plain.cpu().numpy().tobytes()) + packer.flush()
        if len(packed) >= plain.numel():
            return plain
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(plain.device)

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        size = self.wire_bytes(math.prod(shape), dtype)
        if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() >= size:
            return self.codec.decode(payload, shape, dtype, name)
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            plain = unpacker.decompress(payload.cpu().numpy().tobytes(), size + 1)
        except zlib.error as e:
            raise PeerError(f"{self.name} of {name!r}: the payload cannot be inflated: {e}") from None
        if len(plain) != size or not unpacker.eof or unpacker.unused_data:
            raise PeerError(f"{self.name} of {name!r}: the payload inflates to other than {size} bytes")
        found = torch.frombuffer(bytearray(plain), dtype=torch.uint8).to(payload.device)
        return self.codec.decode(found, shape, dtype, name)

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """The most bytes of a payload."""
        return self.codec.wire_bytes(elements, dtype)
