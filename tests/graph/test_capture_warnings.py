"""Warnings of a forward that is captured: of torch, which may be the only word on a wrong result, and of the user."""

from __future__ import annotations

import warnings

import pytest
from torch import Tensor, nn

from isthmus.graph.capture import Column, capture


class Broadcasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            warnings.warn("of the model's author", stacklevel=1)
        return nn.functional.mse_loss(self.layer(x), y)


def test_a_warning_is_shown_once() -> None:
    columns = {"x": Column("float32", (3,)), "y": Column("float32", ())}
    with pytest.warns(UserWarning) as shown:
        capture(Broadcasts, columns)
    texts = [str(one.message) for one in shown]
    assert sum("different to the input size" in text for text in texts) == 1, texts
    assert texts.count("of the model's author") == 1


def test_what_a_recurrent_layer_caches_is_not_worth_a_word(recwarn: pytest.WarningsRecorder) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x)[0].square().mean()

    capture(Recurrent, {"x": Column("float32", (2, 3))})
    assert not recwarn.list
