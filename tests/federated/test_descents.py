"""SGD from a model as algorithms ask for it: the steps, one after another, whatever is spared on the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.federated.local import LocalConfig, PlainLocal, Workspace
from isthmus.federated.resident import Resident, pieces_of
from isthmus.federated.stacked import Stacked, StackedLocal


class Wide(nn.Module):
    """A layer larger than a block, and a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))
        self.wide = nn.Linear(7, 6000)
        self.narrow = nn.Linear(6000, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.narrow(torch.relu(self.wide(pixel_values))), labels)


CLIENTS, SAMPLES = 2, 5


def samples() -> dict[str, Tensor]:
    """Of all clients."""
    count, draws = CLIENTS * SAMPLES, torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 7, dtype=torch.float64, generator=draws)
    return {"pixel_values": pixels, "labels": torch.arange(count) % 3}


def locals_of(config: LocalConfig) -> tuple[Resident, list[PlainLocal], StackedLocal]:
    torch.manual_seed(0)
    resident = Resident(Wide().double())
    workspace = Workspace(resident)
    rows = samples()
    each = [{name: column[c * SAMPLES :][:SAMPLES] for name, column in rows.items()} for c in range(CLIENTS)]
    plain = [PlainLocal(resident, workspace, config, d, seed=1, round_=2, client=c) for c, d in enumerate(each)]
    stacked = StackedLocal(Stacked(resident), config, rows, seed=1, round_=2, clients=range(CLIENTS))
    return resident, plain, stacked


@pytest.mark.parametrize(("epochs", "batch_size", "steps"), [(1, 9, 1), (2, 5, 2), (2, 2, 6)])
def test_a_descent_is_its_steps(epochs: int, batch_size: int, steps: int) -> None:
    resident, plain, stacked = locals_of(LocalConfig(epochs=epochs, batch_size=batch_size, learning_rate=0.3))
    model = resident.vector()
    before, changes = model.clone(), list[Tensor]()
    for local in plain:
        assert local.steps == stacked.steps == steps
        weights = model.clone()
        for batch in local.batches():
            weights -= 0.3 * resident.gradient(weights, batch)
        changes.append(weights - model)
        assert changes[-1].norm() > 0.01
        found = local.descend(model)
        assert torch.allclose(found, changes[-1], rtol=1e-9, atol=1e-15)
        assert not resident.named(found)["unused"].any()
        assert torch.equal(local.descend(model), found), "the client before leaves nothing"
        assert torch.equal(model, before)
    assert torch.allclose(stacked.descend(model), torch.stack(changes), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("batch_size", "sizes"), [(2, [2, 2]), (5, [5]), (9, [5])])
def test_a_last_batch_that_is_smaller_is_left_out_unless_it_is_the_only_one(batch_size: int, sizes: list[int]) -> None:
    config = LocalConfig(batch_size=batch_size, drop_last=True)
    resident, plain, stacked = locals_of(config)
    assert [len(batch["labels"]) for batch in plain[0].batches()] == sizes
    assert [batch["labels"].shape[1] for batch in stacked.batches()] == sizes
    assert plain[0].steps == stacked.steps == len(sizes)
    model = resident.vector()
    expected = resident.gradient(model, {name: column[: sum(sizes)] for name, column in samples().items()}).clone()
    assert torch.allclose(plain[0].full_gradient(model), expected, rtol=1e-9, atol=1e-15)
    assert torch.allclose(stacked.full_gradient(stacked.start(model))[0], expected, rtol=1e-9, atol=1e-15)


def test_a_batch_cut_into_micro_batches_has_the_sum_of_their_gradients() -> None:
    config = LocalConfig(epochs=2, batch_size=4, learning_rate=0.3, micro_batches=2)
    resident, (local, _), _ = locals_of(config)
    resident.micro_batches = config.micro_batches
    weights = resident.vector()
    for batch in local.batches():  # of 4 samples and of 1
        halves = [
            {name: column[n : n + 2] for name, column in batch.items()} for n in range(0, len(batch["labels"]), 2)
        ]
        resident.bind(weights)
        loss = torch.stack([resident.module(**half) for half in halves]).mean()
        gradients = torch.autograd.grad(loss, list(resident.module.parameters()), allow_unused=True)
        flat = [
            torch.zeros(p.numel()) if g is None else g.reshape(-1)
            for p, g in zip(resident.module.parameters(), gradients, strict=True)
        ]
        assert torch.allclose(resident.gradient(weights, batch), torch.cat(flat), rtol=1e-12, atol=0)
    assert [pieces_of(n, 4) for n in (1, 3, 4, 6, 7, 20)] == [1, 3, 4, 3, 1, 4]
