"""Exact sums on the device: the host's integers for a million numbers and weights that are no powers of two."""

from __future__ import annotations

import pytest
import torch

from isthmus.accelerators import Accelerator
from isthmus.accelerators.copies import to_host
from isthmus.federated.device_sum import DeviceSum, sums_on
from isthmus.federated.fixed_point import FixedSum, scale_exponent


def test_the_integers_are_the_hosts(gpu: Accelerator) -> None:
    if not sums_on(gpu.device):
        pytest.skip(f"no double precision on {gpu.device}: sums are the host's there")
    size, weights = 1 << 20, (1.0, 3.0, 1 / 3, 17.7)
    exponent = scale_exponent(sum(weights))
    host = FixedSum(size, exponent)
    device = DeviceSum(size, exponent, gpu.device, lambda value: to_host(gpu, {"": value})[""])
    for number, weight in enumerate(weights):
        term = torch.randn(size, generator=torch.Generator().manual_seed(number))
        host.add(term, weight)
        device.add(term.to(gpu.device), weight)
    assert torch.equal(host.total, device.total)
