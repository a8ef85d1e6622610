"""Every algorithm against its naive twin, and the same bits whoever trains whom."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.federated.populations import Run, members, module, population
from tests.federated.twins import TWINS

SCHEMES = {
    "one executor": {"executors": 1},
    "parrot": {"executors": 3, "planner": "parrot", "steals": False, "warm_up_rounds": 2},
    "ours": {"executors": 3},
    "one result at a time": {"executors": 2, "single": True},
}


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
