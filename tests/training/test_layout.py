"""Tensors travel with their bits and their strides; what no honest sender writes is refused before it costs memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.plans import Packing
from isthmus.training.compression import codec_of
from isthmus.training.layout import (
    MAX_DIMS,
    MAX_SPREAD_BYTES,
    TensorHeader,
    bytes_of,
    check_header,
    header_of,
    in_a_row,
    pack,
    receive_buffer,
    unpack,
)


def travel(tensor: Tensor) -> Tensor:
    """Through the wire format, without a wire."""
    header = header_of("x", tensor)
    check_header(header)
    flat, buffer = receive_buffer(header)
    sent = pack(tensor)
    assert sent.nbytes == header.nbytes == buffer.nbytes
    buffer[:] = sent
    return unpack(flat, header)


def bits(tensor: Tensor) -> bytes:
    return bytes(pack(tensor.contiguous()))


def assert_same(got: Tensor, sent: Tensor) -> None:
    assert (got.dtype, got.shape, got.stride()) == (sent.dtype, sent.shape, sent.stride())
    assert bits(got) == bits(sent)


def random_tensor(dtype: str, *shape: int) -> Tensor:
    """Any bit pattern of the type, NaNs and infinities included."""
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == "bool":
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (count * DTYPE_BYTES[dtype],), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).view(shape)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(1, 3),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "permuted slice of the batch": lambda t: t[1:].permute(2, 0, 3, 1),
    "slice with gaps": lambda t: t[:, 1:3],
    "every other": lambda t: t[..., ::2],
    "permuted, with gaps": lambda t: t.permute(3, 1, 0, 2)[1:, :2],
    "expanded": lambda t: t[:, :1].expand(-1, 5, -1, -1),
    "expanded scalar": lambda t: t[0, 0, 0, 0].expand(3, 4),
    "expanded, with gaps": lambda t: t[:, 1:3, None, :, ::2].expand(-1, -1, 3, -1, -1),
    "overlapping windows": lambda t: t.reshape(-1).unfold(0, 4, 2),
    "one element of many": lambda t: t[:1, :, :1, :1],
    "odd strides of sizes of one": lambda t: t.as_strided((1, 4, 1), (7, 1, 0)),
    "scalar": lambda t: t[1, 2, 3, 0],
    "empty": lambda t: t[:, :0],
    "nothing of an expansion": lambda t: t[:1].expand(3, -1, -1, -1)[:0],
    "empty, expanded": lambda t: t[:0, :1].expand(-1, 6, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_bits_and_strides_arrive(dtype: str, layout: str) -> None:
    sent = LAYOUTS[layout](random_tensor(dtype, 2, 4, 5, 3))
    assert_same(travel(sent), sent)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A tensor as a program gets it: a few views of fresh memory."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    view = random_tensor(draw(st.sampled_from(sorted(DTYPE_BYTES))), *shape)
    for _ in range(draw(st.integers(0, 5))):
        match draw(st.sampled_from(["permute", "slice", "select", "unsqueeze", "expand", "unfold"])):
            case "permute":
                view = view.permute(draw(st.permutations(range(view.dim()))))
            case "unsqueeze" if view.dim() < 6:
                view = view.unsqueeze(draw(st.integers(0, view.dim())))
            case "expand":
                view = view.expand([draw(st.integers(1, 4)) if size == 1 else size for size in view.shape])
            case kind if view.dim():
                dim = draw(st.integers(0, view.dim() - 1))
                size = view.shape[dim]
                start = draw(st.integers(0, size))
                if kind == "slice":
                    view = view.narrow(dim, start, draw(st.integers(0, size - start)))
                    every = (slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)
                    view = view[every]
                elif kind == "select" and start < size:
                    view = view.select(dim, start)
                elif kind == "unfold" and view.dim() < 6:
                    view = view.unfold(dim, start, draw(st.integers(1, 3)))
            case _:
                pass
    return view


@given(views())
def test_any_view_arrives_with_its_strides(sent: Tensor) -> None:
    assert_same(travel(sent), sent)


def test_lazily_conjugated_and_negated_tensors_arrive_as_they_look() -> None:
    base = random_tensor("float32", 3, 4, 2).nan_to_num(1.0)
    lazy = torch.view_as_complex(base).conj()
    assert lazy.is_conj() and lazy.imag.is_neg()
    for sent in (lazy, lazy.t(), lazy[:, ::2].t(), lazy.imag, lazy.t()[1:].imag, torch._neg_view(base)):
        assert_same(travel(sent), sent)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last", "slice with gaps"])
@pytest.mark.parametrize("packing", [Packing(codec="none"), Packing(codec="bf16"), Packing(codec="topk", ratio=3.0)])
def test_packed_tensors_arrive_with_their_strides_too(layout: str, packing: Packing) -> None:
    sent = LAYOUTS[layout](torch.randn(2, 4, 5, 3))
    header, codec = header_of("x", sent, packing), codec_of(packing)
    check_header(header)
    payload = codec.encode(in_a_row(sent))
    assert header.nbytes == payload.numel() == packing.wire_bytes(sent.numel())
    flat, buffer = receive_buffer(header)
    buffer[:] = bytes_of(payload)
    got = unpack(flat, header)
    assert (got.dtype, got.shape, got.stride()) == (sent.dtype, sent.shape, sent.stride())
    assert torch.equal(got, codec.decode(codec.encode(sent), sent.shape, sent.dtype))


def test_hostile_packings_are_refused() -> None:
    packing = Packing(codec="topk", ratio=2.0)
    header = TensorHeader("ids", "int64", (4,), (1,), packing)
    with pytest.raises(PeerError, match="dtype int64 packed as 'topk', expected a floating point type"):
        check_header(header)
    honest = TensorHeader("x", "float32", (64,), (1,), packing)
    with pytest.raises(PeerError, match="topk of 'x': the payload"):
        unpack(torch.full((honest.nbytes,), 255, dtype=torch.uint8), honest)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_on_a_device_arrives_as_it_lay_there(layout: str) -> None:
    sent = LAYOUTS[layout](random_tensor("bfloat16", 2, 4, 5, 3).cuda())
    assert_same(travel(sent), sent)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last", "permuted slice of the batch"])
def test_dense_tensors_are_neither_copied_to_be_sent_nor_when_received(layout: str) -> None:
    base = random_tensor("bfloat16", 2, 4, 5, 3).requires_grad_()
    sent = LAYOUTS[layout](base)
    assert np.frombuffer(pack(sent), np.uint8).ctypes.data == sent.data_ptr()
    header = header_of("x", sent)
    flat, buffer = receive_buffer(header)
    assert np.frombuffer(buffer, np.uint8).ctypes.data == unpack(flat, header).data_ptr()


def test_the_first_token_of_long_sequences_keeps_its_stride() -> None:
    sent = torch.randn(8, 4096, 16)[:, 0]
    assert_same(travel(sent), sent)


def test_gaps_show_nothing_of_either_sides_memory() -> None:
    sent = torch.ones(4001)[::2000]
    assert bytes(pack(sent)) == bytes(torch.ones(3).numpy().data)
    for _ in range(20):
        secrets = [torch.full((4001,), 7.0) for _ in range(20)]
        del secrets  # freed memory is given out again as it is
        seen = travel(sent).as_strided((4001,), (1,))
        assert seen.sum() == seen.count_nonzero() == 3


def test_a_layout_that_would_be_refused_for_its_gaps_is_sent_without() -> None:
    claimed = torch.empty(1).expand(2, 3).as_strided((2, 3), (0, 0))
    far = TensorHeader("x", "uint8", (2, 3), (MAX_SPREAD_BYTES, 1))
    with pytest.raises(PeerError, match="too far"):
        check_header(far)
    header = header_of("x", torch.empty_strided(far.shape, far.stride, dtype=torch.uint8, device="meta"))
    assert header.stride == (3, 1)
    check_header(header)
    assert header_of("x", claimed).stride == (0, 0)


HOSTILE = {
    "unknown dtype": (TensorHeader("x", "float7", (1,), (1,)), "unknown dtype 'float7', expected one of: bfloat16"),
    "an attribute of torch": (TensorHeader("x", "load", (1,), (1,)), "unknown dtype 'load'"),
    "fewer strides": (TensorHeader("x", "int8", (1, 2), (1,)), "2 sizes and 1 strides"),
    "more strides": (TensorHeader("x", "int8", (), (1,)), "0 sizes and 1 strides"),
    "many dims": (TensorHeader("x", "int8", (1,) * (MAX_DIMS + 1), (1,) * (MAX_DIMS + 1)), f"at most {MAX_DIMS}"),
    "negative size": (
        TensorHeader("x", "int8", (-1, 2), (2, 1)),
        "shape (-1, 2) with stride (2, 1) has a negative number",
    ),
    "two negative sizes": (TensorHeader("x", "int8", (-1, -2), (2, 1)), "negative number"),
    "negative stride": (TensorHeader("x", "int8", (2,), (-1,)), "shape (2,) with stride (-1,) has a negative number"),
    "overflowing shape": (TensorHeader("x", "int8", (2**32, 2**31), (2**31, 1)), "beyond any memory"),
    "overflowing bytes": (TensorHeader("x", "float64", (2**60,), (1,)), "beyond any memory"),
    "empty, overflowing": (TensorHeader("x", "int8", (0, 2**40, 2**40), (1, 1, 1)), "beyond any memory"),
    "overflowing stride": (TensorHeader("x", "int8", (2,), (2**63 - 1,)), "beyond any memory"),
    "overflowing stride of one": (TensorHeader("x", "int8", (1,), (2**64 - 1,)), "beyond any memory"),
    "overflowing expansion": (TensorHeader("x", "int8", (2**62, 2), (0, 0)), "beyond any memory"),
    "far apart": (TensorHeader("x", "int8", (2,), (2**40,)), "stride (1099511627776,) spreads its elements too far"),
    "endless name": (TensorHeader("x\n" * 10**6, "int8", (-1,) * 10**5, (1,) * 10**5), "100000 sizes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_no_honest_sender_writes_is_refused(case: str) -> None:
    header, expected = HOSTILE[case]
    with pytest.raises(PeerError) as caught:
        check_header(header)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message and len(message) < 400


numbers = st.one_of(st.integers(-2, 6), st.integers(0, 70).map(lambda p: 2**p), st.integers(-(2**64), 2**64))


@given(st.sampled_from([*DTYPE_BYTES, "size"]), st.lists(st.tuples(numbers, numbers), max_size=4))
def test_a_header_is_refused_or_its_layout_can_be_built(dtype: str, dims: list[tuple[int, int]]) -> None:
    header = TensorHeader("x", dtype, tuple(size for size, _ in dims), tuple(stride for _, stride in dims))
    try:
        check_header(header)
        if header.nbytes <= 1 << 20:
            built = unpack(receive_buffer(header)[0], header)
            assert (tuple(built.shape), built.stride()) == (header.shape, header.stride)
    except PeerError as e:
        assert "tensor 'x'" in str(e)


def test_memory_that_cannot_be_had_is_the_senders_fault() -> None:
    header = TensorHeader("x", "int8", (2**62,), (1,))
    check_header(header)
    with pytest.raises(PeerError, match=f"no memory here for its {2**62} bytes"):
        receive_buffer(header)
