"""Payloads that are Huffman coded: the same values in fewer bytes, and nothing else is taken for one."""

from __future__ import annotations

import zlib

import pytest
import torch

from isthmus.cost import Decoupled
from isthmus.errors import PeerError
from isthmus.training.compression import EntropyCoded, Int4, Int8
from isthmus.training.decoupled import delta_codec

ELEMENTS = 100_000
NORMAL = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("plain", [Int4(), Int4(256), Int8()], ids=str)
def test_the_values_are_those_of_the_plain_payload(plain: Int4 | Int8) -> None:
    coded, payload = EntropyCoded(plain), plain.encode(NORMAL)
    packed = coded.encode(NORMAL)
    assert packed.numel() < payload.numel() == coded.wire_bytes(ELEMENTS, torch.float32)
    expected = plain.decode(payload, NORMAL.shape, NORMAL.dtype)
    assert torch.equal(coded.decode(packed, NORMAL.shape, NORMAL.dtype), expected)
    assert torch.equal(coded.decode(payload, NORMAL.shape, NORMAL.dtype), expected)  # as the other codec has it


def test_deltas_take_eight_times_fewer_bytes_than_float32() -> None:
    codec = delta_codec(Decoupled(codec="int4"))
    heavy = NORMAL * NORMAL.roll(1).abs()  # few large ones
    for values in (NORMAL, heavy, 1e-6 * NORMAL):
        assert 8 * codec.encode(values).numel() < 4 * ELEMENTS


def test_a_payload_that_gets_no_shorter_is_sent_as_it_is() -> None:
    one = torch.tensor([1.5])
    codec = EntropyCoded(Int8())
    assert torch.equal(codec.encode(one), Int8().encode(one))
    assert torch.equal(codec.decode(codec.encode(one), (1,), torch.float32), one)


def deflated(data: bytes) -> torch.Tensor:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return torch.frombuffer(bytearray(packer.compress(data) + packer.flush()), dtype=torch.uint8)


def test_what_no_sender_packs_is_refused() -> None:
    codec = EntropyCoded(Int4(256))
    size, packed = codec.wire_bytes(ELEMENTS, torch.float32), codec.encode(NORMAL)
    wrong = {
        "cannot be inflated": [torch.full((50,), 255, dtype=torch.uint8)],
        f"other than {size} bytes": [
            deflated(bytes(size - 1)),
            deflated(bytes(size + 1)),
            deflated(bytes(1 << 24)),  # no more than it should be is unpacked of it
            packed[:-5],
            torch.cat([packed, torch.zeros(3, dtype=torch.uint8)]),
            packed[:0],
        ],
        "got a payload of": [torch.cat([packed, torch.zeros(size, dtype=torch.uint8)]), packed.view(1, -1)],
    }
    for text, payloads in wrong.items():
        for payload in payloads:
            with pytest.raises(PeerError, match=text):
                codec.decode(payload, (ELEMENTS,), torch.float32)
