"""Optimizers, learning rates by round and clipping of clients: the steps of a plain loop of torch."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.errors import UserError
from isthmus.federated import Algorithm, AlgorithmSpec, ClientUpdate, LocalConfig, load_algorithm
from isthmus.federated.algorithms.registry import give_algorithm
from isthmus.federated.job import check_steps, load_federated_job
from isthmus.federated.local import PlainLocal, StepsByRound, Workspace
from isthmus.federated.resident import Resident
from isthmus.federated.task_spec import TaskSpec, described
from isthmus.models import ModelSpec
from isthmus.rng import orders
from isthmus.runtime.federated.run import ONE_BY_ONE, FederatedRun
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.processes.forked import Forked
from isthmus.training.optim import AnyOptimizerConfig
from tests.federated.populations import Run, population
from tests.federated.sites import attend, free_port, model, write_job, write_tickets
from tests.fleet_service.parties import Fleet
from tests.runtime.commands import isthmus, refused
from tests.tiers import represented_by

ROUNDS, SEED, CLIENT = 5, 3, 4


class Net(nn.Module):
    """With a parameter that the loss does not depend on, and two that are added up: autograd gives both one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))
        self.one, self.other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.wide, self.narrow = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        hidden = self.narrow(torch.tanh(self.wide(pixel_values))) + (self.one + self.other)
        return F.cross_entropy(hidden, labels)


Loop = Callable[[nn.Module, int], torch.optim.Optimizer]
"""The optimizer of a plain loop in one round."""


def local(**given: object) -> LocalConfig:
    return msgspec.convert({"epochs": 3, "batch_size": 4, **given}, LocalConfig)


def cosine(module: nn.Module, round_: int) -> torch.optim.Optimizer:
    """A rate that stays for a round."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    optimizer.step()  # else torch warns
    for _ in range(round_):
        schedule.step()
    return optimizer


STEPS: dict[str, tuple[dict[str, object], Loop]] = {
    "sgd": ({"learning_rate": 0.3}, lambda m, _: torch.optim.SGD(m.parameters(), lr=0.3)),
    "nothing said": ({}, lambda m, _: torch.optim.SGD(m.parameters(), lr=0.05)),
    "nesterov": (
        {"optimizer": [{"name": "sgd", "lr": 0.2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}]},
        lambda m, _: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adamw": (
        {"optimizer": [{"lr": 0.02, "betas": [0.8, 0.95], "weight_decay": 0.1}]},
        lambda m, _: torch.optim.AdamW(m.parameters(), lr=0.02, betas=(0.8, 0.95), weight_decay=0.1),
    ),
    "any of torch": (
        {"optimizer": [{"torch": "RMSprop", "lr": 0.01, "options": {"alpha": 0.9, "momentum": 0.5}}]},
        lambda m, _: torch.optim.RMSprop(m.parameters(), lr=0.01, alpha=0.9, momentum=0.5),
    ),
    "clipped": ({"learning_rate": 0.3, "clip_norm": 0.2}, lambda m, _: torch.optim.SGD(m.parameters(), lr=0.3)),
    "clipped adamw": (
        {"optimizer": [{"lr": 0.02}], "clip_norm": 0.2},
        lambda m, _: torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.0),
    ),
    "cosine over the rounds": (
        {
            "optimizer": [{"name": "sgd", "lr": 0.4}],
            "learning_rate": {"torch": "CosineAnnealingLR", "options": {"T_max": 10}},
        },
        cosine,
    ),
    "linear, ours": (
        {"learning_rate": {"schedule": "linear", "final": 0.5}},
        lambda m, r: torch.optim.SGD(m.parameters(), lr=0.05 * (1 - 0.5 * (r / ROUNDS))),
    ),
    "cycled": (
        {
            "optimizer": [{"torch": "Adam", "lr": 0.1}],
            "learning_rate": {"torch": "OneCycleLR", "options": {"max_lr": 0.1, "total_steps": ROUNDS}},
        },
        lambda m, r: cycled(m, r),
    ),
}


def cycled(module: nn.Module, round_: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    optimizer.step()  # else torch warns
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=ROUNDS)
    optimizer.step()
    for _ in range(round_):
        schedule.step()
    return optimizer


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def loop(module: nn.Module, config: LocalConfig, optimizer: torch.optim.Optimizer, batches: Iterable[object]) -> Tensor:
    """The change of the weights."""
    begun = flat(module).clone()
    for batch in batches:
        optimizer.zero_grad()
        module(**batch).backward()
        if config.clip_norm:
            nn.utils.clip_grad_norm_(module.parameters(), config.clip_norm)
        optimizer.step()
    return flat(module) - begun


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def columns() -> dict[str, Tensor]:
    data = population().clients[CLIENT]
    return {"pixel_values": data["pixel_values"], "labels": data["labels"]}


def batches(data: dict[str, Tensor], config: LocalConfig, round_: int) -> Iterable[dict[str, Tensor]]:
    for order in torch.from_numpy(orders(SEED, round_, [CLIENT], len(data["labels"]), config.epochs)[0]):
        for start in range(0, len(order), config.batch_size):
            yield {name: column[order[start : start + config.batch_size]] for name, column in data.items()}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("round_", [0, 3])
def test_a_client_makes_the_steps_of_a_plain_loop(steps: str, round_: int) -> None:
    """And a second client begins without what the first one's optimizer kept."""
    given, optimizer = STEPS[steps]
    config, data = local(**given), columns()
    resident = Resident(net())
    by_round, workspace, begun = StepsByRound(config, ROUNDS), Workspace(resident), resident.vector()
    for _ in range(2):
        client = PlainLocal(
            resident, workspace, config, data, steps=by_round.at(round_), seed=SEED, round_=round_, client=CLIENT
        )
        change = client.descend(begun).clone()
        plain = net()
        expected = loop(plain, config, optimizer(plain, round_), batches(data, config, round_))
        # Norms are float32, as in a pipeline's run.
        torch.testing.assert_close(change, expected, rtol=0, atol=1e-7 if config.clip_norm else 1e-12)
        assert change.norm() > 1e-3


def test_a_term_of_the_loss_is_clipped_with_it_and_stepped_by_the_optimizer() -> None:
    """FedProx."""
    config, data, mu = local(optimizer=[{"name": "sgd", "lr": 0.3, "momentum": 0.5}], clip_norm=0.3), columns(), 0.7
    resident = Resident(net())
    begun = resident.vector()
    client = PlainLocal(
        resident,
        Workspace(resident),
        config,
        data,
        steps=StepsByRound(config, 1).at(0),
        seed=SEED,
        round_=0,
        client=CLIENT,
    )
    prox = load_algorithm(AlgorithmSpec(name="fedprox", options={"mu": mu}))
    change = prox.client(client, {"model": begun}, None).values["delta"].clone()
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.5)
    for batch in batches(data, config, 0):
        optimizer.zero_grad()
        near = sum(((p - q) ** 2).sum() for p, q in zip(plain.parameters(), net().parameters(), strict=True))
        (plain(**batch) + mu / 2 * near).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()
    torch.testing.assert_close(change, flat(plain) - begun, rtol=0, atol=1e-7)


@pytest.mark.parametrize("algorithm", represented_by(["fedavg", "fedprox", "fedadam"], "fedadam"))
@pytest.mark.parametrize("steps", ["nesterov", "clipped adamw", "cosine over the rounds"])
def test_the_bits_are_the_same_on_any_number_of_executors(algorithm: str, steps: str, tmp_path: Path) -> None:
    found: list[Tensor] = []
    for executors in (1, 2, 3):
        pick = random.Random(executors)
        run = Run(
            algorithm,
            {},
            tmp_path / str(executors),
            executors=executors,
            rounds=ROUNDS,
            pick=lambda ready, pick=pick: pick.randrange(len(ready)),
            local=local(**STEPS[steps][0]),
        )
        begun = run.model.clone()
        assert run.run().outcome == "done"
        found.append(run.model)
        assert (run.model - begun).norm() > 1e-3
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_rate_by_round_goes_with_corrections(tmp_path: Path) -> None:
    """SCAFFOLD divides by the rate of its round."""
    falls = local(learning_rate={"schedule": "linear", "final": 0.5})
    found = [Run("scaffold", {}, tmp_path / str(n), rounds=ROUNDS, local=x) for n, x in enumerate((falls, local()))]
    assert [run.run().outcome for run in found] == ["done", "done"]
    assert 0 < (found[0].model - found[1].model).norm() < 0.1


class Steps(Algorithm, frozen=True):
    """FedAvg whose clients make steps of SGD themselves."""

    @property
    def returns(self) -> dict[str, object]:
        return {"delta": "mean"}

    def client(self, local, broadcast, state):
        y = local.start(broadcast["model"])
        for batch in local.batches():
            y.sub_(local.gradient(y, batch), alpha=local.learning_rate)
        return ClientUpdate(values={"delta": y.sub_(broadcast["model"])})

    def server(self, server, combined, cohort):
        return {"model": server["model"] + combined["delta"]}


@pytest.mark.parametrize(
    ("algorithm", "given", "words"),
    [
        (
            "scaffold",
            {"optimizer": [{}]},
            "optimizer: got adamw for scaffold with an algorithm of plain SGD",
        ),
        ("mime", {"optimizer": [{"name": "sgd", "momentum": 0.9}]}, "got sgd with momentum 0.9 for mime"),
        ("feddyn", {"clip_norm": 1.0}, "training.clip_norm: got 1 for feddyn"),
        ("fednova", {"optimizer": [{"torch": "Adagrad"}]}, "counts the steps of SGD, with the option momentum"),
        ("own", {"clip_norm": 1.0}, "its clients make the steps themselves"),
        ("fedavg", {"optimizer": [{"torch": "Adgrad"}]}, "unknown optimizer.torch 'Adgrad': did you mean 'Adagrad'"),
        ("fedavg", {"optimizer": [{"torch": "LBFGS"}]}, "it computes the loss several times a step"),
        ("fedavg", {"optimizer": [{"torch": "Adam", "options": {"lr": 1.0}}]}, "unknown optimizer option of Adam 'lr'"),
        ("fedavg", {"optimizer": [{"torch": "Adam", "options": {"eps": -1.0}}]}, "Adam: Invalid epsilon value"),
        ("fedavg", {"optimizer": [{"lr": 0.0}]}, "learning_rate: got a rate of 0 in round 1"),
        ("fedavg", {"learning_rate": {"torch": "StepLRR"}}, "did you mean 'StepLR'"),
        (
            "fedavg",
            {"learning_rate": {"torch": "OneCycleLR", "options": {"max_lr": 1.0, "total_steps": 3}}},
            "it cycles momentum|expected federated.rounds",
        ),
    ],
)
def test_steps_that_cannot_be_are_refused_with_the_reason(algorithm: str, given: dict[str, object], words: str) -> None:
    name = give_algorithm(Steps()) if algorithm == "own" else algorithm
    with pytest.raises(UserError, match=words) as refusal:
        check_steps(name, load_algorithm(AlgorithmSpec(name=name)), local(**given), ROUNDS)
    assert str(refusal.value).startswith(("optimizer", "learning_rate", "training", "unknown "))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("[[optimizer]]", "learning_rate: got 0.1 beside optimizer, expected its lr"),
        ('[[optimizer]]\nname = "sgd"\nnesterov = true', "got true without momentum"),
        ('[[optimizer]]\ntorch = "Adam"\nmomentum = 0.5', "momentum: got it beside torch"),
        ("[[optimizer]]\noptions = { alpha = 1 }", "options: got some without the key torch"),
        ('[[optimizer]]\npattern = "wide*"', "no pattern matches parameter"),
        ('[[optimizer]]\ntorch = "Muon"', "Muon only supports 2D parameters"),
    ],
)
def test_a_job_with_such_steps_is_refused_in_one_line(lines: str, words: str, tmp_path: Path) -> None:
    job = write_job(tmp_path, ("a", "b"), rounds=1)
    rate = "learning_rate = 0.1\n" if "beside" in words else ""
    job.write_text(rate + job.read_text().replace("batch_size = 4", f"batch_size = 4\n{lines}"))
    refused(isthmus("train", job, "--scheme", "sp", "--run", tmp_path / "run"), 2, words)


ADAMW = """batch_size = 4
clip_norm = 0.5
[learning_rate]
schedule = "linear"
final = 0.2
[[optimizer]]
lr = 0.02
"""


def written(folder: Path, names: tuple[str, ...]) -> Path:
    job = write_job(folder, names, rounds=4)
    job.write_text(job.read_text().replace("batch_size = 4", ADAMW))
    return job


def test_clients_with_optimizers_are_trained_one_by_one(tmp_path: Path) -> None:
    job = load_federated_job(written(tmp_path, ("a", "b")), {"runtime.scheme": "sp"})
    together = msgspec.structs.replace(job, runtime=msgspec.structs.replace(job.runtime, clients_per_vmap=8))
    alone = FederatedRun(job, tmp_path / "alone", resume=False)
    with pytest.warns(UserWarning, match="runtime.clients_per_vmap: clients are trained one by one") as told:
        run = FederatedRun(together, tmp_path / "together", resume=False)
    assert [str(w.message) for w in told] == [ONE_BY_ONE]
    assert run.job.runtime.clients_per_vmap == 1
    assert alone.run().outcome == run.run().outcome == "done"
    assert torch.equal(model(tmp_path / "alone"), model(tmp_path / "together"))


@pytest.mark.forks
def test_real_sites_make_the_steps_of_a_simulation(tmp_path: Path) -> None:
    names, port = ("a", "b"), free_port()
    job_file = written(tmp_path, names)
    write_tickets(tmp_path, names, port)
    with Forked({name: attend(tmp_path, name) for name in names}, tmp_path / "logs") as sites:
        said: list[str] = []
        fleet = Fleet(tmp_path / "fleet", port=port)
        run = SiteRun(load_federated_job(job_file), tmp_path / "run", resume=False)
        running = threading.Thread(target=lambda: run.run(fleet.service, said.append), daemon=True)
        running.start()
        sites.begin("")
        running.join(120)
        assert not running.is_alive(), said
        for pid in sites.pids().values():
            os.kill(pid, signal.SIGKILL)
    fleet.service.close()
    alone = isthmus("train", job_file, "--scheme", "sp", "--run", tmp_path / "alone")
    assert alone.code == 0, alone.err
    assert torch.equal(model(tmp_path / "run"), model(tmp_path / "alone"))


def test_a_sites_owner_reads_the_steps() -> None:
    config = local(optimizer=[{"lr": 0.02}], learning_rate={"schedule": "cosine"}, clip_norm=0.5)
    spec = TaskSpec(
        job="clinics",
        run="0" * 32,
        algorithm=AlgorithmSpec(),
        model=ModelSpec(name="mlp"),
        local=config,
        seed=0,
        client=0,
        rounds=3,
    )
    steps = "adamw with learning rate 0.02 times a factor by round, gradients clipped to a norm of 0.5"
    assert f"steps: 3 epochs of batches of 4, {steps}" in described(spec)
    plain = msgspec.structs.replace(spec, local=local(learning_rate=0.3))
    assert "batches of 4, learning rate 0.3\n" in described(plain)


@pytest.mark.parametrize(("name", "options"), [("ASGD", {"t0": "x"}), ("Adam", {"betas": [0.9, 0.99, 0.1]})])
def test_arguments_that_torch_refuses_in_a_step_are_refused_before_the_run(
    name: str, options: dict[str, object]
) -> None:
    config = LocalConfig(optimizer=(AnyOptimizerConfig(torch=name, options=options),))
    with pytest.raises(UserError, match=f"^optimizer: {name}: "):
        StepsByRound(config, 1).check()


def test_an_optimizer_that_gets_no_parameter_is_refused() -> None:
    config = LocalConfig(optimizer=(AnyOptimizerConfig(), AnyOptimizerConfig(pattern="one")))
    with pytest.raises(UserError, match="pattern 'one' of entry 2 updates no parameter"):
        StepsByRound(config, 1).check_parameters({"one": torch.zeros(3)})
