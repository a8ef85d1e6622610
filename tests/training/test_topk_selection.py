"""Selection by threshold finds exactly what sorting finds, whatever the sample said."""

from __future__ import annotations

import pytest
import torch
from codec_cases import DTYPES, KINDS, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.training.compression.selection import CHUNK, DIRECT, SAMPLE, largest


def by_sorting(x: Tensor, count: int) -> Tensor:
    order = torch.nan_to_num(x.abs().double(), nan=torch.inf, posinf=torch.finfo(torch.float64).max)
    return torch.sort(order, descending=True, stable=True).indices[:count].sort().values


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 3000), st.floats(0, 1), st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_small_tensors(kind: str, elements: int, share: float, dtype: torch.dtype, seed: int) -> None:
    x, count = make(kind, (elements,), dtype, seed), int(share * elements)
    assert torch.equal(largest(x, count), by_sorting(x, count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("elements", "ratio"), [(DIRECT + 1, 1.01), (3 * DIRECT, 100), (3 * DIRECT + 5, 20_000)])
def test_tensors_that_are_sampled(kind: str, elements: int, ratio: float) -> None:
    x, count = make(kind, (elements,), torch.float32, 5), int(elements / ratio)
    assert torch.equal(largest(x, count), by_sorting(x, count))


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_than_one_chunk(dtype: torch.dtype) -> None:
    x = make("normal", (CHUNK + 12_345,), dtype, 6)
    assert torch.equal(largest(x, 10_000), by_sorting(x, 10_000))


@pytest.mark.parametrize("low", [0.0, 1e-3])
def test_a_sample_that_misleads_costs_no_accuracy(low: float) -> None:
    """What is sampled is large, and the rest is not: the threshold is far too high."""
    elements = 4 * SAMPLE
    x = torch.full((elements,), low) * torch.randn(elements, generator=torch.Generator().manual_seed(1))
    x[:: elements // SAMPLE | 1] = 5.0
    count = elements // 2
    assert torch.equal(largest(x, count), by_sorting(x, count))
    x = torch.where(x == 5.0, 0.0, 1.0)  # and far too low
    assert torch.equal(largest(x, 100), by_sorting(x, 100))


def test_nan_is_larger_than_inf_and_inf_than_any_number() -> None:
    x = torch.randn(2 * DIRECT, generator=torch.Generator().manual_seed(1))
    x[[7, 9]] = torch.tensor([torch.inf, -torch.nan])
    assert largest(x, 1).tolist() == [9]
    assert largest(x, 2).tolist() == [7, 9]
