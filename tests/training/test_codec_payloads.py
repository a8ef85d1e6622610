"""Payloads from unknown_peers are refused, or decoded to finite numbers of the announced shape."""

from __future__ import annotations

import pytest
import torch
from codec_cases import EVERY, LOSSY, make
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import PeerError
from isthmus.plans.packing import kept
from isthmus.training.compression import Bf16, Codec, Int4, Int8, Sparse2Bit, TopK
from isthmus.training.compression.selection import pack_positions, unpack_positions

ELEMENTS = 5000


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(range(len(LOSSY))), st.binary(max_size=600), st.integers(0, ELEMENTS), st.integers(0, 10**6))
def test_any_bytes_are_refused_or_decoded_to_finite_numbers(which: int, noise: bytes, elements: int, at: int) -> None:
    codec = LOSSY[which]
    payload = codec.encode(make("normal", (elements,), torch.float32, at)).clone()
    start = at % max(1, payload.numel())
    piece = torch.frombuffer(bytearray(noise or b"\xff"), dtype=torch.uint8)[: payload.numel() - start]
    payload[start : start + piece.numel()] = piece
    try:
        found = codec.decode(payload, (elements,), torch.float32, "x")
    except PeerError as e:
        assert f"{codec.name} of 'x'" in str(e)
    else:
        assert found.shape == (elements,)
        assert found.isfinite().all()


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_a_payload_of_another_size_is_refused(codec: Codec) -> None:
    payload = codec.encode(make("normal", (ELEMENTS,), torch.float32, 1))
    wrong = [payload[:-1], torch.cat([payload, payload[:1]]), payload[:0], payload.view(1, -1), payload.to(torch.int16)]
    for bad in wrong:
        with pytest.raises(
            PeerError, match=rf"{codec.name} of 'x': got a payload of .* expected {payload.numel()} bytes"
        ):
            codec.decode(bad, (ELEMENTS,), torch.float32, "x")


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_absurd_shapes_are_refused_before_anything_is_allocated(codec: Codec) -> None:
    payload = codec.encode(make("normal", (ELEMENTS,), torch.float32, 1))
    for shape in ((1 << 62,), (1 << 40, 1 << 40), (-1, -ELEMENTS), (-ELEMENTS,)):
        with pytest.raises(PeerError, match="got a payload of"):
            codec.decode(payload, shape, torch.float32, "x")


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_other_types_are_refused(codec: Codec) -> None:
    payload = codec.encode(torch.ones(10))
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(PeerError, match=f"announced as {dtype}, expected a floating point type"):
            codec.decode(payload, (10,), dtype, "x")


@pytest.mark.parametrize("codec", [Bf16(), Int4(), Int8(), TopK(10.0), Sparse2Bit()], ids=str)
def test_nan_and_inf_in_a_payload_are_refused(codec: Codec) -> None:
    for bad in (b"\xff\xff\xff\xff", b"\x80\x7f\x80\x7f"):  # NaN; bfloat16's Inf, and a NaN as float32
        payload = codec.encode(make("normal", (ELEMENTS,), torch.float32, 1)).clone()
        payload[:4] = torch.frombuffer(bytearray(bad), dtype=torch.uint8)
        with pytest.raises(PeerError, match="the payload holds NaN or Inf"):
            codec.decode(payload, (ELEMENTS,), torch.float32, "x")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_positions_come_back(data: st.DataObject) -> None:
    elements = data.draw(st.one_of(st.integers(1, 40), st.integers(1, 1 << 20)))
    chosen = data.draw(st.sets(st.integers(0, elements - 1), max_size=200))
    positions = torch.tensor(sorted(chosen), dtype=torch.int64)
    packed = pack_positions(positions, elements)
    assert torch.equal(unpack_positions(packed, elements, len(chosen), "x"), positions)


@pytest.mark.parametrize("ratio", [2.0, 100.0])
def test_positions_that_no_sender_writes_are_refused(ratio: float) -> None:
    elements = 1000
    count = kept(elements, ratio)
    packed = pack_positions(torch.arange(count), elements)
    for wrong in (torch.zeros_like(packed), torch.full_like(packed, 255)):
        with pytest.raises(PeerError, match=f"x: the payload's positions are not {count} rising"):
            unpack_positions(wrong, elements, count, "x")


def test_the_drawing_and_positions_that_do_not_rise() -> None:
    drawn = torch.tensor([0x23, 0x25, 0b1001101], dtype=torch.uint8)
    assert pack_positions(torch.tensor([3, 18, 21, 50]), 64).tolist() == drawn.tolist()
    assert unpack_positions(drawn, 64, 4, "x").tolist() == [3, 18, 21, 50]
    equal = torch.tensor([0x33, 0x25, 0b1001011], dtype=torch.uint8)  # 3, 3, 21, 50
    beyond = torch.tensor([0x23, 0xF5, 0b10001101], dtype=torch.uint8)  # 3, 18, 21, 79
    for data, elements in ((equal, 64), (beyond, 65)):
        with pytest.raises(PeerError, match="positions are not 4 rising ones"):
            unpack_positions(data, elements, 4, "x")
