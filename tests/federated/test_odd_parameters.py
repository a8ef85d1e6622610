"""Models whose parameters are no plain matrices: of no dim, with sparse gradients, shared, frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isthmus.federated.resident import Resident
from isthmus.federated.stacked import Stacked

BATCH = {"ids": torch.tensor([[1, 4], [4, 2]])}


class Odd(nn.Module):
    """Its loss is `scale` x ||tanh(W W e)||^2 of embedded numbers, with W twice in it, plus what is frozen."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, sparse=sparse)
        self.first, self.second, self.frozen = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embedding(ids)
        return self.scale * (torch.tanh(self.second(self.first(embedded))) + self.frozen(embedded)).square().mean()


def by_autograd(module: nn.Module) -> Tensor:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([g.to_dense().reshape(-1) for g in torch.autograd.grad(module(**BATCH), parameters)])


def test_gradients_of_odd_parameters() -> None:
    for sparse in (False, True):
        torch.manual_seed(0)
        module = Odd(sparse=sparse)
        expected = by_autograd(module)
        resident = Resident(module)
        model = resident.vector()
        assert model.shape == (5 * 3 + 3 * 3 + 1,)
        assert torch.allclose(resident.gradient(model, BATCH), expected, rtol=1e-12)
        moved = model.clone()
        resident.descend(moved, BATCH, 0.5, out=moved)
        assert torch.allclose(moved, model - 0.5 * expected, rtol=1e-12)
        for weights in (model, model.clone()):
            change = torch.empty_like(model)
            resident.arrive(weights, BATCH, 0.5, model, out=change)
            assert torch.allclose(change, -0.5 * expected, rtol=1e-12, atol=1e-15)


def test_several_models_of_odd_parameters() -> None:
    resident = Resident(Odd(sparse=False))
    models = resident.vector() * torch.tensor([[1.0], [0.5], [2.0]], dtype=torch.float64)
    several = Stacked(resident).gradient(models, {"ids": BATCH["ids"].expand(3, 2, 2)})
    one_by_one = torch.stack([resident.gradient(model, BATCH).clone() for model in models])
    assert torch.allclose(several, one_by_one, rtol=1e-10)
