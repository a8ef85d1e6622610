"""Codecs on an accelerator: bytes that the CPU's codecs read, and the other way round."""

from __future__ import annotations

import pytest
import torch
from codec_cases import DTYPES, EVERY, KINDS, LOSSY, make

from isthmus.accelerators import accelerator_names, open_accelerator
from isthmus.errors import UserError
from isthmus.training.compression import Codec, Sparse2Bit
from isthmus.training.compression.selection import DIRECT, largest

DEVICE = open_accelerator(next(iter(accelerator_names()), "checked:0")).device
"""The emulated accelerator, where the machine has none: its kernels are the CPU's, but tensors are out of reach."""


LONG_SHAPES = [pytest.param(shape, marks=pytest.mark.long) for shape in ((1,), (5, 1, 1001), (700, 700))]


@pytest.mark.parametrize("codec", EVERY, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (3, 4096), *LONG_SHAPES])
def test_either_device_reads_what_the_other_wrote(codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = make("normal", shape, dtype, 1)
    here, there = codec.encode(x), codec.encode(x.to(DEVICE))
    assert there.device == DEVICE
    assert there.numel() == here.numel()
    crossed = codec.decode(there.cpu(), shape, dtype)
    if not isinstance(codec, Sparse2Bit):  # among equal magnitudes a device may take any of a chunk
        assert torch.equal(here, there.cpu())
    assert torch.equal(crossed, codec.decode(there, shape, dtype).cpu())
    assert torch.equal(codec.decode(here.to(DEVICE), shape, dtype).cpu(), codec.decode(here, shape, dtype))
    bound = (x.double() - codec.decode(here, shape, dtype).double()).norm()
    assert (x.double() - crossed.double()).norm() <= bound * 1.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [1000, 3 * DIRECT + 5])
def test_selection_is_that_of_the_cpu(kind: str, dtype: torch.dtype, elements: int) -> None:
    x = make(kind, (elements,), dtype, 4)
    for count in (1, elements // 100, elements // 2):
        assert torch.equal(largest(x.to(DEVICE), count).cpu(), largest(x, count))


@pytest.mark.parametrize("codec", LOSSY, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused(codec: Codec, bad: float) -> None:
    x = torch.randn(20_000, device=DEVICE)
    x[9999] = bad
    with pytest.raises(UserError, match=f"{codec.name} of 'op': got NaN or Inf"):
        codec.encode(x, "op")
