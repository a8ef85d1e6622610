"""Every algorithm against its naive twin, and the same bits whoever trains whom."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from isthmus.federated.algorithms import algorithm_names
from isthmus.federated.algorithms.algorithm import ClientUpdate, LocalTrainer, Values
from isthmus.federated.algorithms.fedavg import FedAvg
from isthmus.federated.resident import Resident
from isthmus.federated.stacked import HOT, Stacked, best_clients_per_vmap
from isthmus.protocol.federated_messages import ClientTask, PhaseId, PhaseSetup
from tests.federated.populations import Run, members, module, population
from tests.federated.twins import TWINS

SIZES = population().sizes

SCHEMES = {
    "one executor": {"executors": 1},
    "parrot": {"executors": 3, "planner": "parrot", "steals": False, "warm_up_rounds": 2},
    "ours": {"executors": 3},
    "one result at a time": {"executors": 2, "single": True},
}


def test_every_algorithm_has_a_twin() -> None:
    assert {algorithm for _, algorithm, _ in TWINS.values()} == set(algorithm_names())


@pytest.mark.parametrize("name", TWINS)
def test_equals_its_twin(name: str, tmp_path: Path) -> None:
    twin, algorithm, options = TWINS[name]
    data = population()
    expected = twin(module(), data.clients, lambda r: members(r, data.sizes)).run(10)
    found = Run(algorithm, options, tmp_path, executors=2)
    assert found.run().outcome == "done"
    error = (found.model - expected).norm() / expected.norm()
    assert error < 1e-6, f"{name}: {error}"
    moved = expected - torch.cat([p.detach().reshape(-1) for p in module().parameters()])
    assert moved.norm() > 1e-3 * expected.norm(), "a twin that stays where it was says nothing"


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "mime", "fednova"])
def test_the_same_bits_for_any_executors_and_schedule(name: str, tmp_path: Path) -> None:
    found = []
    for number, (scheme, options) in enumerate(SCHEMES.items()):
        draws = random.Random(number)
        run = Run(name, {}, tmp_path / scheme, rounds=4, pick=lambda ready, d=draws: d.randrange(len(ready)), **options)
        assert run.run().outcome == "done"
        found.append(run.model)
    assert all(torch.equal(model, found[0]) for model in found[1:])


@pytest.mark.parametrize("seed", range(6))
def test_the_same_bits_with_clients_stolen_in_any_order(seed: int, tmp_path: Path) -> None:
    alone = Run("scaffold", {}, tmp_path / "alone", rounds=3)
    alone.run()
    draws = random.Random(seed)
    # One executor acts far more often than the others: they fall behind, and it takes what they have not begun.
    weights = {"e0": 20, "e1": 1, "e2": 1}

    def pick(ready: list[str]) -> int:
        return draws.choices(range(len(ready)), [weights[name] for name in ready])[0]

    many = Run("scaffold", {}, tmp_path / "many", rounds=3, executors=3, pick=pick)
    assert many.run().outcome == "done"
    assert torch.equal(alone.model, many.model)
    assert all(sum(map(len, record.trained.values())) == 5 for record in many.records)


@pytest.mark.parametrize("name", TWINS)
def test_clients_trained_together_agree_with_one_by_one(name: str, tmp_path: Path) -> None:
    _, algorithm, options = TWINS[name]
    clients_per_vmap = Run(
        algorithm, options, tmp_path / "clients_per_vmap", rounds=3, clients_per_vmap=4, clients_per_size=3
    )
    alone = Run(algorithm, options, tmp_path / "alone", rounds=3, clients_per_size=3)
    assert alone.run().outcome == clients_per_vmap.run().outcome == "done"
    assert any(len(timed) > 1 for r in clients_per_vmap.records for timed in r.trained.values())
    assert torch.allclose(clients_per_vmap.model, alone.model, rtol=1e-5, atol=1e-9)


class GradientsAtTheModel(FedAvg, frozen=True):
    """FedSGD (McMahan et al. 2017, section 2): all gradients are taken at what was broadcast."""

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        x = broadcast["model"]
        delta = local.start(x).mul_(0)
        for batch in local.batches():
            delta.sub_(local.gradient(x, batch), alpha=local.learning_rate / local.steps)
        return ClientUpdate(values={"delta": delta.sub_(local.full_gradient(x), alpha=0.01)})


def test_clients_trained_together_take_gradients_at_what_was_broadcast(tmp_path: Path) -> None:
    models = []
    for together in (1, 4):
        run = Run(
            f"{__name__}:{GradientsAtTheModel.__name__}",
            {},
            tmp_path / f"{together}",
            rounds=2,
            clients_per_vmap=together,
            clients_per_size=3,
        )
        assert run.run().outcome == "done"
        models.append(run.model)
    assert torch.allclose(models[1], models[0], rtol=1e-5, atol=1e-9)


def test_operators_written_down_give_the_bits_of_the_module() -> None:
    resident = Resident(module())
    stacked = Stacked(resident)
    weights = resident.vector() + torch.randn(3, resident.size, dtype=torch.float64)
    data = population().load(5)
    batch = {name: torch.stack([column[:2], column[1:3], column[:2]]) for name, column in data.items()}
    expected = stacked.gradient(weights, batch)
    stacked.trace(weights, batch)
    assert torch.equal(stacked.gradient(weights, batch), expected)
    went = weights.clone()
    stacked.descend(went, [batch], 0.5)
    assert torch.equal(went, weights - 0.5 * expected)
    for row in range(3):
        alone = resident.gradient(weights[row], {name: column[row] for name, column in batch.items()})
        assert torch.allclose(alone, expected[row], rtol=1e-12)


@pytest.mark.parametrize("hot", [1, HOT])
def test_a_bad_client_among_many_is_the_only_one_refused(
    hot: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.federated.stacked.HOT", hot)
    run = Run("fedavg", {}, tmp_path, rounds=1, clients_per_vmap=4, clients_per_size=3)
    site = run.sites["e0"]
    data = population(per_size=3)
    alike = [c for c in range(len(data.clients)) if data.sizes[c] == data.sizes[0]]
    samples = int(data.sizes[0])
    site.open(PhaseSetup(phase=PhaseId(0), clients=3, samples=3 * samples), run.server.broadcast())
    data.clients[alike[1]]["pixel_values"][0] = float("nan")
    monkeypatch.setattr(site, "_data", data)
    timed, refused = site.train([ClientTask(c, samples, -1) for c in alike])
    assert [t.client for t in timed] == [alike[0], alike[2]]
    assert [r.client for r in refused] == [alike[1]]
    assert site.partial.clients == 2


def test_a_model_that_draws_is_trained_one_by_one() -> None:
    columns = {name: column[:4] for name, column in population().load(0).items()}
    assert best_clients_per_vmap(Resident(Dropping().double()), columns) == 1


class Dropping(nn.Module):
    """A classifier with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.dropout(self.linear(pixel_values)), labels)
