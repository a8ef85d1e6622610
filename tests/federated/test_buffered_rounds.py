"""Rounds that overlap (FedBuff), simulated: who is late, and what late updates are worth."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.federated.algorithms import ClientUpdate
from isthmus.federated.server import staleness_weight
from isthmus.protocol.federated_participation import Buffer, Participation
from tests.federated.populations import CLIENTS, Run, module, population
from tests.federated.twins import ETA, SEED, FedAvgTwin, batches

STALENESS = 3
RULES = Participation(clients=6, quorum=0.5, staleness=STALENESS)
SCHEMES = {
    "one executor": {"executors": 1},
    "ours": {"executors": 3},
    "one result at a time": {"executors": 2, "single": True},
}


def buffer(rules: Participation = RULES) -> Buffer:
    return Buffer(rules, population().sizes, SEED)


class FedBuffTwin(FedAvgTwin):
    """Keeps every round's model."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.models: list[Tensor] = []

    def round(self, r: int, s: list[int]) -> None:
        self.models.append(self.x)
        total, weights = torch.zeros_like(self.x), 0
        for i, late in buffer().round(r).items():
            assert i in s
            y = self.models[r - late].clone()
            for b in batches(self.clients[i], i, r - late):
                y = y - ETA * self.grad(y, b)
            total += self.size(i) * (y - self.models[r - late]) / math.sqrt(1 + late)
            weights += self.size(i)
        self.x = self.x + total / weights


def test_late_updates_equal_their_twin_and_give_the_same_bits_anywhere(tmp_path: Path) -> None:
    data, played = population(), buffer()
    late = [n for r in range(10) for n in played.round(r).values()]
    assert {0, 1, 2} <= set(late), "else nothing is tried here"
    expected = FedBuffTwin(module(), data.clients, lambda r: np.array(list(buffer().round(r)))).run(10)
    found = []
    for scheme, options in SCHEMES.items():
        run = Run("fedavg", {}, tmp_path / scheme, buffer=buffer(), **options)
        assert run.run().outcome == "done"
        found.append(run.model)
        for record in run.records:
            assert dict(record.stale) == {c: n for c, n in played.round(record.round).items() if n}
    assert all(torch.equal(model, found[0]) for model in found)
    assert (found[0] - expected).norm() < 1e-6 * expected.norm()


def test_what_says_how_far_to_go_stays_where_the_change_fades(tmp_path: Path) -> None:
    """Of clients of the same size FedNova is FedAvg, late or not: its steps times its direction."""
    models = [
        Run(name, {}, tmp_path / f"{name}-{n}", buffer=buffer(), clients_per_size=CLIENTS, clients_per_vmap=n)
        for name, n in (("fedavg", 1), ("fednova", 1), ("fednova", 4))
    ]
    assert all(run.run().outcome == "done" for run in models)
    assert any(run.records[-1].stale or run.records[-2].stale for run in models)
    assert all(torch.allclose(models[0].model, run.model, rtol=1e-5, atol=1e-7) for run in models)


def test_late_clients_trained_together_agree_with_one_by_one(tmp_path: Path) -> None:
    models = [
        Run("fedavg", {}, tmp_path / str(n), buffer=buffer(), clients_per_size=3, clients_per_vmap=n) for n in (1, 4)
    ]
    assert all(run.run().outcome == "done" for run in models)
    assert torch.allclose(models[0].model, models[1].model, rtol=1e-5, atol=1e-9)


def test_a_run_goes_on_with_the_models_of_before(tmp_path: Path) -> None:
    whole = Run("fedavgm", {}, tmp_path / "whole", buffer=buffer(), rounds=8)
    first = Run("fedavgm", {}, tmp_path / "first", buffer=buffer(), rounds=5)
    assert whole.run().outcome == first.run().outcome == "done"
    rest = Run("fedavgm", {}, tmp_path / "rest", buffer=buffer(), kept=first.server.kept, rounds=8, first_round=5)
    assert any(buffer().round(5).values())
    assert rest.run().outcome == "done"
    assert torch.equal(rest.model, whole.model)
    forgetful = {name: value for name, value in first.server.kept.items() if not name.startswith("before-3")}
    with pytest.raises(UserError, match="got 10, expected at most 4, with which the run began"):
        Run("fedavgm", {}, tmp_path / "more", buffer=buffer(), kept=forgetful, first_round=5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_who_makes_a_round(weighted: bool, dropout: float) -> None:
    sizes = np.random.default_rng(0).integers(1, 60, 40)
    rules = Participation(clients=10, over_select=1.5, quorum=0.4, staleness=5, weighted=weighted, dropout=dropout)
    played = Buffer(rules, sizes, 7)
    assert (played.size, played.at_work) == (4, 15)
    assert rules.expected(40) == 4, "what noise of private runs is divided by"
    rounds = [played.round(r) for r in range(60)]
    assert all(len(made) == 4 and all(0 <= n <= min(5, r) for n in made.values()) for r, made in enumerate(rounds))
    begun = [(client, r - late) for r, made in enumerate(rounds) for client, late in made.items()]
    assert len(set(begun)) == len(begun), "what began once counts once"
    assert {5, 0} <= {late for made in rounds for late in made.values()}
    again = Buffer(rules, sizes, 7)
    assert [again.round(r) for r in (59, 3, 57, 58)] == [rounds[r] for r in (59, 3, 57, 58)]
    assert Buffer(rules, sizes, 8).round(2) != rounds[2]


def test_a_single_client_at_a_time_is_never_late() -> None:
    played = buffer(Participation(clients=1, staleness=9))
    assert all(set(played.round(r).values()) == {0} for r in range(20))


def test_only_clients_that_are_here_begin() -> None:
    played = Buffer(RULES, np.full(30, 5), 0, lambda r: np.arange(10 * r, 10 * r + 10))
    for r in range(3):
        for client, late in played.round(r).items():
            assert client // 10 == r - late


def test_where_everybody_is_at_work_and_waited_for_nobody_is_late() -> None:
    played = Buffer(Participation(clients=3, staleness=1), np.array([5, 5, 5]), 0)
    assert [played.round(r) for r in range(5)] == [{0: 0, 1: 0, 2: 0}] * 5


def test_a_late_change_of_one_number_counts_for_less() -> None:
    late = staleness_weight(ClientUpdate(values={"delta": torch.tensor([3.0]), "loss": torch.tensor(2.0)}), 8)
    assert late.values["delta"].tolist() == [1.0]  # nothing beside it is larger: it is the change
    late = staleness_weight(ClientUpdate(values={"delta": torch.tensor([3.0, 6.0]), "steps": torch.tensor(2.0)}), 8)
    assert late.values["delta"].tolist() == [1.0, 2.0]
    assert float(late.values["steps"]) == 2.0
    late = staleness_weight(ClientUpdate(values={"delta": torch.tensor([[3.0], [6.0]])}), 8, rows=True)
    assert late.values["delta"].tolist() == [[1.0], [2.0]]
