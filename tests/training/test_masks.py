"""Masks across cuts: infinite and very small numbers, and NaN of rows without a key, are values like others.

Each idiom is cut everywhere into two stages. Losses, gradients and held-out losses are the plain loop's bits, and no
stage says that the step was not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from in_process import Pipeline, capture_of, copies, module_of, weights_of
from tests.tiers import represented_by
from tests.training.reference import reference_loss, reference_step
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.data import ColumnSpec
from isthmus.graph import Flow, Ref, StageGraph, cuts
from isthmus.protocol.finite import NonFinite, earliest
from isthmus.runtime.device.finite import FiniteWatch
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.engine import EngineConfig, TorchEngine

LENGTH, WIDTH = 5, 4
MIN = torch.finfo(torch.float32).min
CONFIG = EngineConfig(micro_batches=2, micro_batch_size=3)
COLUMNS = {
    "ids": ColumnSpec(dtype="int64", shape=(LENGTH,), limit=7),
    "keep": ColumnSpec(dtype="int64", shape=(LENGTH,), limit=2),
    "labels": ColumnSpec(dtype="int64", shape=(), limit=3),
}


class Attention(nn.Module):
    """Two layers of attention and a classifier. What makes the mask and how scores take it is an idiom's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def mask(self, keep: Tensor) -> Any:
        """Made once, before the first layer."""
        return keep

    def attend(self, layer: nn.Module, x: Tensor, mask: Any) -> Tensor:
        query, key, value = layer(x).chunk(3, -1)
        return self.masked(query @ key.mT / math.sqrt(WIDTH), mask).softmax(-1) @ value

    def masked(self, scores: Tensor, mask: Any) -> Tensor:
        """[batch, LENGTH, LENGTH]."""
        return scores + mask

    def forward(self, ids: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
        x, mask = self.embedding(ids), self.mask(keep)
        for layer in self.layers:
            x = x + self.attend(layer, x, mask)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class BoolPerLayer(Attention):
    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill((mask == 0)[:, None], -math.inf)


class BoolOnce(Attention):
    def mask(self, keep: Tensor) -> Tensor:
        return keep.bool()[:, None]

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, scores, -math.inf)


class InfinityOnce(Attention):
    def mask(self, keep: Tensor) -> Tensor:
        return torch.zeros(keep.shape).masked_fill(keep == 0, -math.inf)[:, None]


class InfinityPerLayer(Attention):
    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + torch.zeros(mask.shape).masked_fill(mask == 0, -math.inf)[:, None]


class SmallestOnce(Attention):
    def mask(self, keep: Tensor) -> Tensor:
        return (1.0 - keep[:, None].float()) * MIN


class CausalBuffer(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + self.causal


class CausalOnce(Attention):
    def mask(self, keep: Tensor) -> Tensor:
        causal = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        return causal + torch.zeros(keep.shape).masked_fill(keep == 0, -math.inf)[:, None]


class Alibi(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.tensor(0.5))

    def mask(self, keep: Tensor) -> Tensor:
        place = torch.arange(LENGTH)
        distance = -(place[:, None] - place).abs() * self.slope
        return distance.masked_fill(place[:, None] < place, -math.inf).expand(keep.shape[0], -1, -1)


class Learned(Attention):
    """Relative positions: infinite values that carry gradients cross."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, LENGTH))

    def mask(self, keep: Tensor) -> Tensor:
        place = torch.arange(LENGTH)
        bias = self.bias[(place[:, None] - place).abs()]
        return bias.masked_fill((keep == 0)[:, None], -math.inf)


class Fused(Attention):
    """Boolean for torch's own attention."""

    def mask(self, keep: Tensor) -> Tensor:
        return keep.bool()[:, None].expand(-1, LENGTH, -1)

    def attend(self, layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*layer(x).chunk(3, -1), attn_mask=mask)


class FusedInfinity(Fused):
    def mask(self, keep: Tensor) -> Tensor:
        return torch.zeros(keep.shape).masked_fill(keep == 0, -math.inf)[:, None].expand(-1, LENGTH, -1)


class KeyPadding(Attention):
    """nn.MultiheadAttention's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

    def mask(self, keep: Tensor) -> Tensor:
        return keep == 0

    def attend(self, layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return layer(x, x, x, key_padding_mask=mask, need_weights=False)[0]


class EmptyRows(Attention):
    """Some rows have no key: NaN crosses forwards, and gradients that are NaN cross backwards. `masked_fill` and
    `where` replace both before a parameter sees them."""

    def mask(self, keep: Tensor) -> Tensor:
        return (keep == 0)[:, None] | (keep == 0)[:, :, None]

    def attend(self, layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = layer(x).chunk(3, -1)
        weights = (query @ key.mT).masked_fill(mask, -math.inf).softmax(-1)
        return torch.where(mask, 0.0, weights) @ value


IDIOMS = [
    BoolPerLayer, BoolOnce, InfinityOnce, InfinityPerLayer, SmallestOnce, CausalBuffer,
    CausalOnce, Alibi, Learned, Fused, FusedInfinity, KeyPadding, EmptyRows,
]  # fmt: skip


class Watched(TorchEngine):
    """An engine whose numbers are looked at as a device looks at them."""

    placeholders: Mapping[str, str] = {}

    def __init__(
        self,
        train: StageGraph,
        evaluation: StageGraph,
        config: EngineConfig,
        weights: Mapping[str, Tensor],
        **options: Any,
    ) -> None:
        super().__init__(train, evaluation, config, weights, **options)
        view = SimpleNamespace(stage=train.index, first=0)
        assignment = SimpleNamespace(view=view, train=train, engine=config, placeholders=self.placeholders)
        self.watch = FiniteWatch(cast(Assignment, assignment), self)
        self.saw: list[NonFinite | None] = []

    def forward(self, step: int, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        out = super().forward(step, micro_batch, inputs)
        self.watch.forward(micro_batch, inputs, out)
        return out

    def backward(self, micro_batch: int, arrived: Any) -> dict[Ref, Tensor]:
        gradients = super().backward(micro_batch, arrived)
        self.watch.backward(micro_batch, gradients)
        return gradients

    def collect(self, count: float | None) -> Tensor:
        norms = super().collect(count)
        assert self.watch.collected(norms)
        self.saw.append(self.watch.take())
        return norms


def micro_batches() -> list[dict[str, Tensor]]:
    """Every sample keeps a position, and leaves one out."""
    generator = torch.Generator().manual_seed(5)
    drawn = [
        {n: torch.randint(0, c.limit or 2, (3, *c.shape), generator=generator) for n, c in COLUMNS.items()}
        for _ in range(2)
    ]
    for batch in drawn:
        batch["keep"][:, 0], batch["keep"][:, -1] = 1, 0
    return drawn


@pytest.mark.parametrize("idiom", represented_by(IDIOMS, Learned, FusedInfinity, EmptyRows))
def test_a_mask_may_cross_any_cut(idiom: type[Attention]) -> None:
    captured, data = capture_of(idiom, COLUMNS), micro_batches()
    module, weights = module_of(idiom), weights_of(idiom, captured)
    expected_loss, expected = reference_step(module, copies(data), CONFIG)
    expected_heldout = reference_loss(module, copies(data))
    assert math.isfinite(expected_loss)
    positions = [cut.position for cut in cuts(Flow(captured.train))]
    assert len(positions) > 12
    crossed = 0
    for position in positions:
        pipeline = Pipeline(captured, [position], weights, CONFIG, engine=Watched)
        loss, gradients = pipeline.step(0, copies(data))
        assert loss == expected_loss
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(gradients[name], value), (position, name)
        assert pipeline.evaluate(copies(data)) == expected_heldout
        saw = [seen for engine in cast("list[Watched]", pipeline.engines) for seen in engine.saw]
        assert not any(seen is not None and seen.decides for seen in saw), position
        crossed += any(seen is not None for seen in saw)
    assert (crossed > 0) == (idiom not in (SmallestOnce, Fused))


def test_a_mask_is_not_where_numbers_stopped_being_finite() -> None:
    """After a finite step with a mask of -inf that crosses, a parameter of the second stage becomes NaN."""
    captured, data = capture_of(InfinityOnce, COLUMNS), micro_batches()
    flow = Flow(captured.train)
    position = next(c.position for c in cuts(flow) if len(c.values) == 2 and c.position > 5)
    pipeline = Pipeline(captured, [position], weights_of(InfinityOnce, captured), CONFIG, engine=Watched)
    first, second = cast("list[Watched]", pipeline.engines)
    pipeline.step(0, copies(data))
    (mask,) = (seen for seen in first.saw if seen is not None)
    assert mask.where == "output" and not mask.decides
    second.state()["head.weight"].fill_(math.nan)
    with pytest.raises(AssertionError):  # `collected` says no
        pipeline.step(1, copies(data))
    seen = {name: at.watch.take() for name, at in (("a", first), ("b", second))}
    found = earliest({name: at for name, at in seen.items() if at is not None})
    assert found is not None
    device, place = found
    assert (device, place.where, place.micro_batch, place.cause) == ("b", "loss", 0, "'head.weight'")
