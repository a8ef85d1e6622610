"""Codecs: what comes back is within the stated bound, in exactly the bytes that a plan states."""

from __future__ import annotations

import math

import pytest
import torch
from codec_cases import DTYPES, EVERY, LOSSY, PACKINGS, make, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import UserError
from isthmus.plans import Packing
from isthmus.plans.packing import CODECS, INT4_TILE, INT8_BLOCK, SPARSE_CHUNK, int4_bytes, kept, kept_in_chunks
from isthmus.training.compression import (
    Bf16,
    Codec,
    Int4,
    Int8,
    NoCodec,
    Sparse2Bit,
    TopK,
    codec_of,
)
from isthmus.training.compression.codec import PIECE


def round_trip(codec: Codec, x: Tensor) -> Tensor:
    payload = codec.encode(x, "x")
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.wire_bytes(x.numel(), x.dtype),)
    found = codec.decode(payload, x.shape, x.dtype, "x")
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    return found


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_none_is_bit_for_bit(x: Tensor) -> None:
    assert torch.equal(round_trip(NoCodec(), x), x)


def test_none_takes_any_type_and_any_value() -> None:
    for x in (torch.tensor([True, False]), torch.arange(5), torch.tensor([math.nan, math.inf]), torch.tensor(3 + 4j)):
        assert torch.equal(NoCodec().encode(round_trip(NoCodec(), x)), NoCodec().encode(x))


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_bf16_keeps_eight_bits(x: Tensor) -> None:
    found = round_trip(Bf16(), x).double()
    assert ((found - x.double()).abs() <= x.double().abs() * 2**-8 + 2**-134).all()


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_int8_is_within_half_a_scale(x: Tensor) -> None:
    found, flat = round_trip(Int8(), x).double().reshape(-1), x.double().reshape(-1)
    for start in range(0, flat.numel(), INT8_BLOCK):
        block, got = flat[start : start + INT8_BLOCK], found[start : start + INT8_BLOCK]
        largest = block.abs().max()
        rounding = largest * 2 * torch.finfo(x.dtype).eps + torch.finfo(torch.float32).tiny
        assert ((got - block).abs() <= largest / 254 * (1 + 1e-5) + rounding).all()


@settings(max_examples=80, deadline=None)
@given(tensors(), st.sampled_from([1.0, 2.5, 10.0, 100.0]))
def test_topk_keeps_the_largest_and_nothing_else(x: Tensor, ratio: float) -> None:
    found, flat = round_trip(TopK(ratio), x).reshape(-1), x.reshape(-1)
    order = torch.sort(flat.abs(), descending=True, stable=True).indices[: kept(flat.numel(), ratio)]
    expected = torch.zeros_like(flat)
    expected[order] = Bf16().decode(Bf16().encode(flat[order]), (order.numel(),), x.dtype)
    assert torch.equal(found, expected)


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from([1.0, 4.0, 32.0]))
def test_sparse2bit_is_never_further_than_zeros(x: Tensor, ratio: float) -> None:
    found, flat = round_trip(Sparse2Bit(ratio), x).double().reshape(-1), x.double().reshape(-1)
    tiny = torch.finfo(x.dtype).tiny
    for start in range(0, flat.numel(), SPARSE_CHUNK):
        chunk, got = flat[start : start + SPARSE_CHUNK], found[start : start + SPARSE_CHUNK]
        assert torch.linalg.norm(chunk - got) <= torch.linalg.norm(chunk) * (1 + 1e-9) + tiny * math.sqrt(chunk.numel())
        assert int((got != 0).sum()) <= kept(chunk.numel(), ratio)
        assert got.abs().unique().numel() <= 3  # two levels and zero
        assert ((got == 0) | (chunk == 0) | (got.sign() == chunk.sign())).all()


def hadamard() -> Tensor:
    """Sylvester's construction: symmetric and orthogonal."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < INT4_TILE:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / math.sqrt(INT4_TILE)


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_int4_is_within_half_a_step_of_the_transformed_tile(x: Tensor) -> None:
    found, flat = round_trip(Int4(), x).double().reshape(-1), x.double().reshape(-1)
    info = torch.finfo(x.dtype)
    for start in range(0, flat.numel(), INT4_TILE):
        tile, got = flat[start : start + INT4_TILE], found[start : start + INT4_TILE]
        whole = torch.zeros(INT4_TILE, dtype=torch.float64)
        whole[: tile.numel()] = tile
        pivot = int(whole.abs().argmax())
        whole[[0, pivot]] = whole[[pivot, 0]]
        mixed = hadamard() @ whole
        step, largest = (mixed.max() - mixed.min()) / 15, mixed.abs().max()
        bound = math.sqrt(INT4_TILE) * (step / 2 * (1 + 2**-6) + largest * 2**-6)
        assert torch.linalg.norm(got - tile) <= bound + info.eps * torch.linalg.norm(tile) + 64 * info.tiny + 1e-36


def test_int4_takes_an_outlier_off_the_other_elements() -> None:
    x = make("normal", (INT4_TILE,), torch.float32, 1)
    plain = (round_trip(Int4(), x) - x).norm()
    x[17] = 500.0
    assert (round_trip(Int4(), x) - x).norm() < 4 * plain  # 16 levels over 500 would leave nothing of the others


@pytest.mark.parametrize("codec", [Bf16(), Int4(), Int8()], ids=str)
def test_a_large_tensor_is_its_pieces(codec: Codec) -> None:
    x = make("spread", (2 * PIECE + 301,), torch.float32, 8)
    assert torch.equal(round_trip(codec, x), torch.cat([round_trip(codec, part) for part in x.split(PIECE)]))


def test_sparse2bit_levels_are_the_means_above_and_below_the_mean() -> None:
    x = torch.zeros(SPARSE_CHUNK)
    x[[5, 100, 2000, 4095]] = torch.tensor([1.0, -3.0, 10.0, -12.0])  # mean 6.5; 2 below it, 11 above
    found = round_trip(Sparse2Bit(SPARSE_CHUNK / 4), x)
    assert found[[5, 100, 2000, 4095]].tolist() == [2.0, -2.0, 11.0, -11.0]
    assert int((found != 0).sum()) == 4


@settings(max_examples=80, deadline=None)
@given(tensors(), st.sampled_from(PACKINGS))
def test_every_codec_writes_the_bytes_that_a_plan_states(x: Tensor, packing: Packing) -> None:
    codec = codec_of(packing)
    assert codec.name == packing.codec
    assert round_trip(codec, x).isfinite().all()
    assert codec.encode(x).numel() == packing.wire_bytes(x.numel(), x.element_size())


@pytest.mark.parametrize("codec", LOSSY, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused_with_the_op_named(codec: Codec, dtype: torch.dtype, bad: float) -> None:
    for elements, place in ((1, 0), (300, 299), (9000, 4500)):
        x = make("normal", (elements,), dtype, 1)
        x[place] = bad
        with pytest.raises(UserError, match=rf"{codec.name} of 'blocks.3.mlp:0': got NaN or Inf"):
            codec.encode(x, "blocks.3.mlp:0")


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_numbers_beyond_float32_are_refused(codec: Codec) -> None:
    x = torch.tensor([1.0, 1e300], dtype=torch.float64)
    with pytest.raises(UserError, match=r"of 'loss': got an element beyond float32"):
        codec.encode(x, "loss")


@pytest.mark.parametrize("codec", LOSSY, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_other_types_are_refused(codec: Codec, dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=rf"{codec.name} of 'mask': got {dtype}, expected a floating point type"):
        codec.encode(torch.ones(5, dtype=dtype), "mask")


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_the_tensor_is_left_alone_and_the_payload_is_a_copy(codec: Codec) -> None:
    x = make("normal", (5000,), torch.float32, 3).requires_grad_()
    before = x.detach().clone()
    payload = codec.encode(x)
    written = payload.clone()
    with torch.no_grad():
        assert torch.equal(x, before)
        x.zero_()
    assert torch.equal(payload, written)
    assert not payload.requires_grad


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_a_payload_may_lie_anywhere_in_memory(codec: Codec) -> None:
    x = make("normal", (777,), torch.float32, 3)
    payload = codec.encode(x)
    expected = codec.decode(payload, x.shape, x.dtype)
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]
    rows = torch.stack([payload, payload], dim=1)[:, 0]  # strided
    assert torch.equal(codec.decode(odd, x.shape, x.dtype), expected)
    assert torch.equal(codec.decode(rows, x.shape, x.dtype), expected)


def test_a_kept_element_takes_four_bytes_at_most() -> None:
    """Of a tensor of one kept element or more for every position byte that rounding adds."""
    for ratio in (1.0, 1.5, 2.0, 4.0, 8.0, 10.0, 32.0, 100.0, 1000.0, 10_000.0, 16_384.0):
        count = kept(1 << 30, ratio)
        assert Packing(codec="topk", ratio=ratio).wire_bytes(1 << 30) <= 4 * count + 2
    assert Packing(codec="topk", ratio=100.0).wire_bytes(10**7) / 10**5 == pytest.approx(3.07, abs=0.01)
    assert 8 * Packing(codec="sparse2bit", ratio=32.0).wire_bytes(10**7) / kept_in_chunks(10**7, 32.0) < 9.3


@settings(max_examples=100)
@given(st.integers(0, 1 << 40), st.floats(1, 1e6), st.sampled_from(sorted(CODECS)))
def test_sizes_are_those_of_any_sane_tensor(elements: int, ratio: float, name: str) -> None:
    packing = Packing(codec=name, ratio=ratio if CODECS[name].is_sparse else 1.0)
    size = packing.wire_bytes(elements)
    assert 0 <= size <= 4 * elements + (int4_bytes(1) if name == "int4" else 8)  # a tile is sent whole
    assert packing.wire_bytes(elements + 1) >= size - 1  # a little more may allow a shorter code


def test_bad_settings() -> None:
    with pytest.raises(UserError, match="unknown codec 'topkk': did you mean 'topk'"):
        Packing(codec="topkk")
    for ratio in (0.5, math.nan, math.inf):
        with pytest.raises(UserError, match=r"ratio: got .*, expected a finite number of at least 1"):
            Packing(codec="topk", ratio=ratio)
        for made in (TopK, Sparse2Bit):
            with pytest.raises(UserError, match="ratio: got"):
                made(ratio)
    with pytest.raises(UserError, match=r"ratio: got 2\.0 for 'int8', expected 1"):
        Packing(codec="int8", ratio=2.0)
