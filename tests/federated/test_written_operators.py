"""Operators that are written down do what the function did, whatever is left out of them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.federated.stacked import Operation, written_down
from isthmus.rng import orders, stream


def idle(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [(x.view(2, 3) * 1 + torch.exp(y)).expand(2, 3) - torch.exp(y)]


def in_place(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    """The same expression twice, of which one is changed in between."""
    return [(x + y).relu_(), x + y]


def given_back(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [torch.mul(x, 1), torch.mul(y, 1)]


def several(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    """An operator with two results, as pooling has."""
    found = torch.max(x, dim=1)
    return [found.values * 1 + y.sum(dim=1), torch.nn.functional.max_pool1d(x, 2) * 1]


def constant(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return [torch.ones_like(x), x * torch.ones_like(y) + torch.zeros_like(x) + torch.scalar_tensor(2.5)]


def of_its_shape(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    """What is computed of `y` is not needed."""
    return [x * torch.ones_like(torch.exp(y))]


def turned(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    product = torch.mul(x, y).transpose(0, 1)
    return [product.transpose(1, 0), product.transpose(0, 1) + product.transpose(0, 1).transpose(0, 1).reshape(2, 3)]


def named(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    """Operators whose functions take other arguments, or have none."""
    made = torch.full_like(x, 2.0) + x.new_ones(2, 3) + torch.arange(3.0)
    return [made * x.to(torch.float64).to(torch.float32), torch.ops.aten.threshold_backward(y, x, 0.5)]


@pytest.mark.parametrize("act", [idle, in_place, given_back, several, constant, of_its_shape, turned, named])
def test_as_the_function_itself(act: Operation) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        given = torch.randn(2, 3), torch.randn(2, 3)
        written = written_down(act, (torch.zeros(2, 3), torch.zeros(2, 3)))
        found, expected = written(*given), act(*given)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        shared_bounds = {t.data_ptr() for t in (*given, *written(*given))}
        assert not shared_bounds & {t.data_ptr() for t in found}


def test_what_is_not_needed_is_not_computed() -> None:
    given = torch.randn(2, 3), torch.randn(2, 3)
    assert "exp" not in inspect.getsource(written_down(of_its_shape, given))


def test_orders_belong_to_a_client_whoever_else_is_asked_for() -> None:
    clients = (5, 0, 5, 2**40)
    many = orders(3, 7, clients, 9, 3)
    assert many.shape == (4, 3, 9)
    assert (np.sort(many) == np.arange(9)).all()
    for client, one in zip(clients, many, strict=True):
        assert np.array_equal(orders(3, 7, [client], 9, 3)[0], one)
    unlike = [many[0], many[1], many[3], *(orders(*of, [5], 9, 3)[0] for of in ((3, 8), (4, 7), (2, 8), (-3, 7)))]
    assert len({tuple(order) for each in unlike for order in each.tolist()}) == 3 * len(unlike)


def test_every_order_comes_as_often_as_another() -> None:
    found = orders(0, 0, range(6000), 4, 2).reshape(-1, 4)
    _, counts = np.unique(found, axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 500.0) ** 2 / 500.0).sum() < 49.7  # chi-squared of 23 degrees: exceeded by chance in 0.1 %


def test_streams_are_apart() -> None:
    others = [
        stream(3, "order", 7, 5),
        stream(4, "order", 7, 5),
        stream(3, "model", 7, 5),
        stream(3, "order", 8, 5),
        stream(3, "order", 7, 6),
        stream(3, "order", 5, 7),
    ]
    assert len({tuple(draws.integers(2**60, size=4)) for draws in others}) == len(others)
