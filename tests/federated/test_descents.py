"""SGD from a model as algorithms ask for it: the steps, one after another, whatever is spared on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.data import ColumnSpec
from isthmus.federated import AlgorithmSpec, ClientTrainer, TrainingTask, load_algorithm
from isthmus.federated.evaluation import Evaluator
from isthmus.federated.job import load_federated_job
from isthmus.federated.local import LocalConfig, PlainLocal, StepsByRound, Workspace
from isthmus.federated.resident import Resident, mean_loss, pieces_of
from isthmus.federated.stacked import Stacked, StackedLocal
from isthmus.protocol.federated_messages import ClientTask, PhaseId, PhaseSetup
from isthmus.runtime.federated.run import FederatedRun
from isthmus.runtime.federated.trainer import own_mean_of
from tests.federated.populations import ListedData
from tests.federated.test_run_folders import JOB


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
    steps = StepsByRound(config, 1).at(0)
    each = [{name: column[c * SAMPLES :][:SAMPLES] for name, column in rows.items()} for c in range(CLIENTS)]
    plain = [
        PlainLocal(resident, workspace, config, d, steps=steps, seed=1, round_=2, client=c) for c, d in enumerate(each)
    ]
    stacked = StackedLocal(Stacked(resident), config, rows, steps=steps, seed=1, round_=2, clients=range(CLIENTS))
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
    expected = resident.gradient(model, {name: column[:SAMPLES] for name, column in samples().items()}).clone()
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


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Classifier(nn.Module):
    weight: Tensor | None

    def __init__(self, weight: Sequence[float] | None) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("weight", None if weight is None else torch.tensor(weight))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels, self.weight)


@pytest.mark.parametrize("weight", [None, (0.5, 1.0, 4.0)])
def test_classifiers_trained_together_have_the_micro_batches_of_one_by_one(weight: Sequence[float] | None) -> None:
    torch.manual_seed(0)
    resident = Resident(Classifier(weight))
    resident.micro_batches = 4
    weights = resident.vector() + torch.randn(3, resident.size)
    batch = {"x": torch.randn(3, 16, 4), "labels": torch.randint(0, 3, (3, 16))}
    one_by_one = (resident.gradient(own, {n: c[i] for n, c in batch.items()}) for i, own in enumerate(weights))
    each = torch.stack([gradient.clone() for gradient in one_by_one])
    stacked = Stacked(resident)
    at_once = stacked.gradient(weights, batch)
    stacked.trace(weights, batch)
    for found in (at_once, stacked.gradient(weights, batch)):
        assert torch.allclose(found, each, rtol=1e-6, atol=1e-7)


class Branching(Classifier):
    """It branches on numbers, as models of transformers do for their masks."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(x, labels) if torch.arange(3).sum().item() == 3 else x.sum()


def test_a_model_that_cannot_be_written_down_is_trained_together_as_it_is() -> None:
    torch.manual_seed(0)
    resident = Resident(Branching(None))
    weights = resident.vector() + torch.randn(3, resident.size)
    batch = {"x": torch.randn(3, 5, 4), "labels": torch.randint(0, 3, (3, 5))}
    one_by_one = (resident.gradient(own, {n: c[i] for n, c in batch.items()}) for i, own in enumerate(weights))
    each = torch.stack([gradient.clone() for gradient in one_by_one])
    stacked = Stacked(resident)
    stacked.trace(weights, batch)
    assert torch.allclose(stacked.gradient(weights, batch), each, rtol=1e-6, atol=1e-7)


def test_micro_batches_of_clients_trained_together_in_bfloat16_are_added_up_in_float32() -> None:
    torch.manual_seed(0)
    resident = Resident(Classifier(None), computes=torch.bfloat16)
    resident.micro_batches = 3
    weights = resident.vector() + torch.randn(2, resident.size)
    x, labels = torch.randn(2, 4, 4).bfloat16(), torch.randint(0, 3, (2, 4))
    alike = {"x": x.repeat(1, 3, 1), "labels": labels.repeat(1, 3)}
    stacked = Stacked(resident)
    at_once = stacked.gradient(weights, alike)
    stacked.trace(weights, alike)
    for found in (at_once, stacked.gradient(weights, alike)):
        assert torch.equal(found, 3 * (found / 3).bfloat16().float()) and found.any()


def test_labels_that_are_left_out_do_not_count_and_none_at_all_change_nothing() -> None:
    resident = Resident(Tagger().double())
    resident.uneven = True
    weights = resident.vector()
    x = torch.arange(20).reshape(4, 5) % 8
    uneven = torch.full((4, 5), -100)
    uneven[1, 0], uneven[2, :4], uneven[3] = 1, 2, 0
    nothing = torch.full((4, 5), -100)
    both = {"x": x.repeat(2, 1, 1), "labels": torch.stack([uneven, nothing])}
    stacked = Stacked(resident).gradient(weights.repeat(2, 1), both)
    resident.bind(weights)
    loss = resident.module(x=x, labels=uneven)["loss"]
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(resident.module.parameters()))])
    for count in (1, 2, 4):
        resident.micro_batches = count
        found = resident.gradient(weights, {"x": x, "labels": uneven})
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-15)
        assert not resident.gradient(weights, {"x": x, "labels": nothing}).any()
    assert torch.allclose(stacked, torch.stack([expected, torch.zeros_like(expected)]), rtol=1e-9, atol=1e-15)
    evaluated = Evaluator(resident, {"x": x, "labels": uneven}).evaluate(weights)
    assert evaluated.loss == pytest.approx(loss.item(), rel=1e-9)


class Weighted(Tagger):
    """Whose classes weigh little: a batch's labels together less than 1."""

    def __init__(self, **more: float) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(torch.tensor([0.01, 0.02, 0.03]), **more)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.head(self.embed(x)).flatten(0, 1), labels.flatten())}


class Padded(Weighted):
    """Leaves out labels that are 0."""

    def __init__(self) -> None:
        super().__init__(ignore_index=0)
        self.loss.weight = None


def test_a_mean_over_weights_below_one_is_torchs() -> None:
    resident = Resident(Weighted())
    batch = {"x": torch.arange(20).reshape(4, 5) % 8, "labels": torch.arange(20).reshape(4, 5) % 3}
    expected, found = (mean_loss(resident.module, batch, uneven=uneven) for uneven in (False, True))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


class Tagged(ListedData):
    """Clients with all labels, with some, and with none."""

    def __init__(self, left_out: int) -> None:
        x, labels = torch.arange(20).reshape(4, 5) % 8, torch.arange(20).reshape(4, 5) % 3
        some, none = labels.clone(), torch.full((4, 5), left_out)
        some[0], some[1, 1:] = left_out, left_out
        super().__init__([{"x": x, "labels": found} for found in (labels, some, none, labels.clamp(max=0))])

    @property
    def columns(self) -> dict[str, ColumnSpec]:
        return {name: ColumnSpec(dtype="int64", shape=(5,)) for name in ("x", "labels")}


@pytest.mark.parametrize(("build", "counted"), [(Tagger, [1, 2]), (Weighted, [0, 1, 2, 3]), (Padded, [0, 1, 2, 3])])
def test_labels_are_counted_where_some_are_left_out_and_change_no_bits_elsewhere(
    build: Callable[[], nn.Module], counted: list[int]
) -> None:
    """One by one and together. A trainer that has not warmed up does not know the loss, and counts all."""
    algorithm = load_algorithm(AlgorithmSpec(name="fedavg"))
    task = TrainingTask(algorithm=algorithm, local=LocalConfig(batch_size=2), seed=1)
    torch.manual_seed(0)
    module = build()
    warm, cold = (
        ClientTrainer(task, each, Tagged(0 if build is Padded else -100), None) for each in (module, deepcopy(module))
    )
    warm.warm_up()
    model = warm.resident.vector()
    for clients in ([0], [1], [2], [3], [0, 1], [1, 3], [2, 3]):
        opening = PhaseSetup(phase=PhaseId(0), clients=4, samples=16)
        for trainer in (warm, cold):
            trainer.open(opening, {"model": model})
            _, refused = trainer.train([ClientTask(client, 4) for client in clients])
            assert not refused
        assert warm.resident.uneven == bool({*counted} & {*clients}) and cold.resident.uneven
        ((found,), (expected,)) = (trainer.partial.tensors().values() for trainer in (warm, cold))
        assert torch.equal(found, expected) if len(clients) == 1 else torch.allclose(found, expected, rtol=1e-5)


class OwnMean(Tagger):
    """A sum over the sum of a mask."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits, kept = self.head(self.embed(x)).flatten(0, 1), (labels.flatten() >= 0).float()
        each = F.cross_entropy(logits, labels.flatten(), reduction="none")
        return {"loss": (each * kept).sum() / kept.sum()}


class Looks(Tagger):
    """Has no graph."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(x, labels) if bool(x.sum() > 0) else {}


@pytest.mark.long
def test_what_micro_batches_make_of_a_loss_is_said_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {name: ColumnSpec(dtype="int64", shape=(5,)) for name in ("x", "labels")}

    def said(build: Callable[[], nn.Module], micro_batches: int = 2) -> str:
        return own_mean_of(build, columns, LocalConfig(batch_size=4, micro_batches=micro_batches))

    assert said(Tagger) == said(OwnMean, 1) == ""
    words = "a mean of its own: with 2 micro-batches a step's loss is the mean of theirs"
    assert words in said(OwnMean) and said(OwnMean).endswith("or set training.micro_batches = 1")
    assert said(Looks).startswith(
        "training.micro_batches: got 2, and whether the model's loss is the same with each number"
    )

    file = tmp_path / "job.toml"
    file.write_text(JOB.format(folder=tmp_path).replace("[training]", "[training]\nmicro_batches = 4"))
    asked: list[tuple[set[str], int]] = []
    monkeypatch.setattr(
        "isthmus.runtime.federated.run.own_mean_of",
        lambda build, columns, local, forks: asked.append((set(columns), local.micro_batches)) or "it is another",
    )
    with pytest.warns(UserWarning, match="it is another"):
        FederatedRun(load_federated_job(file), tmp_path / "run", resume=False)
    assert asked == [({"pixel_values", "labels"}, 4)]
