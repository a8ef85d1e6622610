"""Clients that compute in bfloat16: a plain loop with float32 weights and sums, on any number of executors."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from isthmus.federated import LocalConfig
from isthmus.federated.job import Deployment, FederatedConfig, FederatedJob, site_identity
from isthmus.federated.local import FederatedTraining
from isthmus.federated.resident import Resident, buffers_of
from isthmus.models import ModelSpec
from tests.federated.populations import PER_ROUND, Run, members, population
from tests.federated.twins import BATCH, EPOCHS, batches

RATE = 0.05
LOCAL = LocalConfig(epochs=EPOCHS, batch_size=BATCH, learning_rate=RATE, precision="bf16")


class Normed(nn.Module):
    """Batch norm over two halves of a sample, and a table that bfloat16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(6, 3)
        self.register_buffer("table", torch.full((3,), 1 / 3))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        logits = self.last(self.norm(pixel_values.view(-1, 3)).view(-1, 6)) + self.table
        return nn.functional.cross_entropy(logits, labels)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed()


def own_loop(rounds: int) -> dict[str, Tensor]:
    """FedAvg with a bfloat16 copy of float32 weights in each step; whole numbers of buffers are rounded."""
    server, data = normed(), population()
    for round_ in range(rounds):
        chosen = members(round_, data.sizes).tolist()
        changes = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in server.state_dict().items()}
        total = sum(data.sizes[chosen])
        for client in chosen:
            half = normed()
            half.load_state_dict(server.state_dict())
            half.to(torch.bfloat16)
            begun = half.state_dict()["norm.running_mean"].clone(), half.state_dict()["norm.running_var"].clone()
            weights = {name: value.detach().clone() for name, value in server.named_parameters()}
            for batch in batches(data.clients[client], client, round_):
                for name, parameter in half.named_parameters():
                    parameter.data.copy_(weights[name])
                half.zero_grad()
                typed = {n: v.bfloat16() if v.is_floating_point() else v for n, v in batch.items()}
                half(**typed).backward()
                for name, parameter in half.named_parameters():
                    assert parameter.grad is not None
                    weights[name] -= RATE * parameter.grad.float()
            ends = half.state_dict() | weights
            starts = dict(server.state_dict())
            starts["norm.running_mean"], starts["norm.running_var"] = begun
            for name in changes:
                if name != "table":
                    changes[name] += (ends[name].double() - starts[name].double()) * (data.sizes[client] / total)
        for name, value in server.state_dict().items():
            moved = changes[name].round() if not value.is_floating_point() else changes[name]
            value.copy_((value.double() + moved).to(value.dtype))
    return server.state_dict()


@pytest.mark.parametrize("executors", [1, 2])
def test_a_run_is_a_plain_loop_whose_steps_compute_in_bfloat16(executors: int, tmp_path: Path) -> None:
    run = Run("fedavg", {}, tmp_path, executors=executors, rounds=2, model=normed, local=LOCAL)
    assert run.run().outcome == "done"
    expected, buffers = own_loop(2), buffers_of(run.server.values)
    for name, value in {**Resident(normed()).named(run.model), **buffers}.items():
        assert value.dtype == expected[name].dtype
        assert torch.allclose(value.double(), expected[name].double(), rtol=1e-6, atol=1e-7), name
    assert torch.equal(buffers["table"], normed().state_dict()["table"]), "what nobody changes keeps its bits"


def test_executors_in_any_number_give_the_same_bits(tmp_path: Path) -> None:
    runs = [Run("mime", {}, tmp_path / str(n), executors=n, rounds=2, model=normed, local=LOCAL) for n in (1, 3)]
    for run in runs:
        run.run()
    first, second = (run.server.values for run in runs)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_run_of_a_version_before_may_go_on() -> None:
    """The settings that it must share are those that it had."""
    deployed = FederatedConfig(deployment=Deployment(sites=("a", "b")))
    job = FederatedJob(name="before", model=ModelSpec(name="mlp"), federated=deployed)
    half = msgspec.structs.replace(job, training=FederatedTraining(precision="bf16"))
    assert "precision" not in site_identity(job, 1).local and '"bf16"' in site_identity(half, 1).local


def test_clients_together_compute_in_bfloat16_too(tmp_path: Path) -> None:
    def small() -> nn.Module:
        torch.manual_seed(0)
        return Plain()

    alone, together = (
        Run(
            "fedavg",
            {},
            tmp_path / str(count),
            rounds=1,
            model=small,
            local=LOCAL,
            clients_per_vmap=count,
            clients_per_size=PER_ROUND,
        )
        for count in (1, 4)
    )
    alone.run()
    together.run()
    begun = Resident(small()).vector()
    assert (alone.model - together.model).norm() < 0.02 * (alone.model - begun).norm()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        logits = self.last(pixel_values)
        assert logits.dtype == torch.bfloat16
        return nn.functional.cross_entropy(logits, labels)
