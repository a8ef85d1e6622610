"""Tensors of a module that share memory: eager training changes both at once, and a graph would train them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.errors import UserError
from isthmus.graph.capture import Column, capture
from isthmus.models.registry import build_given, give_model

COLUMNS = {"x": Column("float32", (8,)), "y": Column("int64", ())}


class Two(nn.Module):
    def __init__(self, share: Callable[[Two], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 4)
        self.register_buffer("table", torch.zeros(8, 8))
        self.register_buffer("other", torch.zeros(8, 8))
        share(self)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.b(self.a(x)) @ self.table @ self.other), y)


def tied_by_data(module: Two) -> None:
    module.a.weight.data = module.b.weight.data


def two_of_one(module: Two) -> None:
    tensor = torch.zeros(8, 8)
    module.a.weight, module.b.weight = nn.Parameter(tensor), nn.Parameter(tensor.t())


def overlapping_columns(module: Two) -> None:
    tensor = torch.zeros(8, 16)
    module.a.weight, module.b.weight = nn.Parameter(tensor[:, :8]), nn.Parameter(tensor[:, 7:15])


def buffer_of_a_parameter(module: Two) -> None:
    module.table = module.a.weight.detach()


def expanded(module: Two) -> None:
    module.a.weight = nn.Parameter(torch.zeros(8).expand(8, 8))


def built(share: Callable[[Two], None]) -> Callable[[], nn.Module]:
    return lambda: Two(share)


def given(share: Callable[[Two], None]) -> Callable[[], nn.Module]:
    name = give_model(Two(share))
    return lambda: build_given(name)


@pytest.mark.parametrize("how", [built, given])
@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (tied_by_data, "parameter 'a.weight' and parameter 'b.weight' share their memory"),
        (two_of_one, "parameter 'a.weight' and parameter 'b.weight' share their memory"),
        (overlapping_columns, "parameter 'a.weight' and parameter 'b.weight' share their memory"),
        (buffer_of_a_parameter, "parameter 'a.weight' and buffer 'table' share their memory"),
        (expanded, "parameter 'a.weight' was expanded"),
    ],
)
def test_what_would_be_trained_apart_is_refused(
    share: Callable[[Two], None], expected: str, how: Callable[[Callable[[Two], None]], Callable[[], nn.Module]]
) -> None:
    with pytest.raises(UserError, match=expected):
        capture(how(share), COLUMNS)


def halves(module: Two) -> None:
    tensor = torch.zeros(8, 16)
    module.a.weight, module.b.weight = nn.Parameter(tensor[:, :8]), nn.Parameter(tensor[:, 8:])
    module.table, module.other = torch.zeros(8, 12)[:, :8], module.table.t()


def frozen(module: Two) -> None:
    tied_by_data(module)
    module.a.weight.requires_grad = module.b.weight.requires_grad = False


def tied(module: Two) -> None:
    module.a.weight = module.b.weight


@pytest.mark.parametrize("how", [built, given])
@pytest.mark.parametrize("share", [halves, frozen, tied])
def test_parts_of_one_tensor_constants_and_one_parameter_are_allowed(
    share: Callable[[Two], None], how: Callable[[Callable[[Two], None]], Callable[[], nn.Module]]
) -> None:
    trained = 2 if share is frozen else 3 if share is tied else 4
    assert len(capture(how(share), COLUMNS).train.trainable) == trained
