"""Exact sums on the device: the host's integers for a million numbers, and for products next to a half."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from isthmus.accelerators import Accelerator
from isthmus.accelerators.copies import to_host
from isthmus.federated.partial import FRACTION_BITS, DeviceSum, FixedSum, scale_exponent, sums_on


@pytest.fixture
def summing(gpu: Accelerator) -> Accelerator:
    if not sums_on(gpu.device):
        pytest.skip(f"no double precision on {gpu.device}: sums are the host's there")
    return gpu


def _both(size: int, exponent: int, gpu: Accelerator) -> tuple[FixedSum, DeviceSum]:
    device = DeviceSum(size, exponent, gpu.device, lambda value: to_host(gpu, {"": value})[""])
    return FixedSum(size, exponent), device


def test_the_integers_are_the_hosts(summing: Accelerator) -> None:
    size, weights = 1 << 20, (1.0, 3.0, 1 / 3, 17.7)
    host, device = _both(size, scale_exponent(sum(weights)), summing)
    for number, weight in enumerate(weights):
        term = torch.randn(size, generator=torch.Generator().manual_seed(number))
        host.add(term, weight)
        device.add(term.to(summing.device), weight)
    assert torch.equal(host.total, device.total)


def _next_to_a_half(exponent: int) -> Iterator[tuple[Tensor, float]]:
    """Terms and weights whose exact product lies below k + 1/2 by less than a double can tell: where the product is
    rounded before it is added, the sum is another integer than where both are one operation (fused multiply-add)."""
    draws, unit = random.Random(0), Fraction(2) ** (FRACTION_BITS - exponent)
    while True:
        number, half = draws.randrange((1 << 23) + 1, 1 << 24, 2), draws.randrange(1 << 28, 1 << 29) + Fraction(1, 2)
        weight = float(half / number / unit)
        weight = math.nextafter(weight, 0.0) if Fraction(weight) * number * unit >= half else weight
        if number * weight * float(unit) == half and half // 1 % 2:  # else both come to the even integer
            yield torch.full((67,), float(number)), weight  # a vector's width, and a rest


def test_products_are_rounded_as_on_the_host(summing: Accelerator) -> None:
    exponent = scale_exponent(1.0)
    for (term, weight), _ in zip(_next_to_a_half(exponent), range(20), strict=False):
        host, device = _both(len(term), exponent, summing)
        host.add(term, weight)
        device.add(term.to(summing.device), weight)
        assert torch.equal(host.total, device.total), f"{float(term[0])} times {weight!r}"
