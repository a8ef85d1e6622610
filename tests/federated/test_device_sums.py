"""Sums where clients train are those of the host, to the bit, for any grouping and any weights."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from isthmus.errors import PeerError
from isthmus.federated.partial import DeviceSum, FixedSum, scale_exponent

NUMBERS = st.floats(-1e4, 1e4, width=32)
TERMS = st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=5)


def device_sum(exponent: int) -> DeviceSum:
    return DeviceSum(3, exponent, torch.device("cpu"), lambda value: value)


@given(TERMS, st.floats(0.125, 64), st.booleans())
@example([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]], 1.0348026203203986, False)  # rounded up
def test_the_bits_are_those_of_the_host(summands: list[list[float]], weight: float, in_rows: bool) -> None:
    exponent = scale_exponent(64.0 * len(summands))
    host, device = FixedSum(3, exponent), device_sum(exponent)
    for _ in range(2):  # a sum that begins again keeps nothing
        host.begin(exponent)
        device.begin(exponent)
        for term in summands:
            host.add(torch.tensor(term), weight)
        if in_rows:
            device.add_rows(torch.tensor(summands), weight)
        else:
            for term in summands:
                device.add(torch.tensor(term), weight)
        assert torch.equal(host.total, device.total)
    device.add(torch.tensor(summands[0]), -weight)
    host.add(torch.tensor(summands[0]), -weight)
    assert torch.equal(host.total, device.total)
    for total in (device, host):
        assert total.bound >= float(total.total.abs().max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_bad_number_leaves_the_sum_as_it_was(bad: float) -> None:
    device = device_sum(4)
    device.add(torch.tensor([1.0, 2.0, 3.0]))
    before, bound = device.total.clone(), device.bound
    with pytest.raises(PeerError, match="expected numbers within"):
        device.add(torch.tensor([0.0, bad, 0.0]))
    assert torch.equal(device.total, before)
    assert device.bound == bound


def test_a_sum_that_got_nothing_is_zero() -> None:
    device = device_sum(0)
    device.add(torch.ones(3))
    assert device.total.any()
    device.begin(0)
    assert not device.total.any()
