"""Modules, data sets, optimizers and algorithms as Python objects."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset, TensorDataset

import isthmus
from isthmus.api.export import export_model
from isthmus.api.given import Objects, read_arrays, read_optimizer
from isthmus.api.notebook import NotebookObserver
from isthmus.api.observer import StepDone
from isthmus.cost import PlanLayout, build_replicas
from isthmus.data import load_dataset
from isthmus.data.dataset import SPLITS
from isthmus.errors import Interrupted, UserError
from isthmus.federated.algorithms.fedavg import FedAvg
from isthmus.job import fleet_of, prepare
from isthmus.models.registry import own_names
from isthmus.plans import load_plan
from isthmus.training.checkpoint import checkpoint_weights, latest_checkpoint, load_checkpoint
from tests.lazy import Lazy
from tests.tiers import represented_by

accelerate, transformers = Lazy("accelerate"), Lazy("transformers")

LOSS = nn.functional.mse_loss


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(1)])


def data(count: int = 16) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return TensorDataset(x, x.sum(1, keepdim=True))


def test_a_run_is_the_plain_loop_goes_on_and_is_stopped_by_a_call(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    before = [parameter.clone() for parameter in model.parameters()]
    twin = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    twin.load_state_dict(model.state_dict())
    given = {"model": model, "loss": LOSS, "data": {"input": data()[:][0], "target": data()[:][1]}, "batch": 16}
    given |= {"optimizer": functools.partial(torch.optim.SGD, lr=0.1), "run": tmp_path / "run"}
    told: list[int] = []
    stop = isthmus.Stop()

    class Stopping(isthmus.Observer):
        def stepped(self, done: StepDone) -> None:
            told.append(done.step)
            if done.step == 2:
                stop.request()

    first = isthmus.train(**given, steps=50, observer=Stopping(), stop=stop)
    assert first.outcome == "interrupted" and 2 <= len(first.losses) < 50 and told[:2] == [1, 2]
    steps = len(first.losses) + 1
    run = isthmus.train(**given, steps=steps, resume=True)
    assert (run.outcome, [point.step for point in run.losses]) == ("done", list(range(1, steps + 1)))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "the caller's own is kept"
    x, y = given["data"]["input"], given["data"]["target"]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for point in run.losses:
        loss = LOSS(twin(x), y)
        assert point.loss == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.load(model) == steps
    export_model(run.path, tmp_path / "exported")
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert "data:image/png;base64" in run._repr_html_()
    with pytest.raises(Interrupted):
        isthmus.train(**{**given, "run": tmp_path / "never"}, steps=5, stop=stop)
    assert not (tmp_path / "never").exists()


class Rotary(nn.Module):
    """A table of complex numbers that is neither parameter nor buffer, and buffers that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.freqs_cis = torch.polar(torch.ones(2), torch.tensor([0.5, 0.1]))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("unused", torch.zeros(1), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        turned = torch.view_as_complex((self.layer(input) * self.scale).unflatten(-1, (2, 2))) * self.freqs_cis
        return self.head(torch.view_as_real(turned).flatten(-2))


@pytest.mark.long
def test_what_is_saved_is_the_models_state(tmp_path: Path) -> None:
    """No tensors that its state_dict has not, nor those of the loss. Checkpoints of earlier versions have them."""
    model, weight = Rotary(), torch.full((3,), 2.0)
    x = data(8)[:][0]
    run = isthmus.train(
        model=model,
        loss=nn.CrossEntropyLoss(weight=weight),
        data={"input": x, "target": torch.arange(8) % 3},
        batch=8,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        steps=1,
        run=tmp_path / "run",
    )
    twin = copy.deepcopy(model)
    nn.functional.cross_entropy(twin(x), torch.arange(8) % 3, weight=weight).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert run.load(model) == 1
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    export_model(run.path, tmp_path / "exported")
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint_weights(checkpoint).keys() == {*(f"model.{name}" for name in weights), "loss.weight"}
    earlier = weights | {"freqs_cis": model.freqs_cis, "scale": torch.full((4,), 2.0)}
    assert load_checkpoint(model, checkpoint, lambda _: earlier) == 1
    with pytest.raises(UserError, match="weight 'freqs' is not in Rotary"):
        load_checkpoint(model, checkpoint, lambda _: weights | {"freqs": model.freqs_cis})


@pytest.mark.long
def test_every_sample_trains_and_held_out_ones_are_asked_for(tmp_path: Path) -> None:
    """In float64, as the model is."""
    x, y = (column.double() for column in data(40)[:])
    model = nn.Linear(4, 1).double()
    twin = copy.deepcopy(model)
    given = {"model": model, "loss": LOSS, "data": {"input": x, "target": y}, "batch": 40}
    given |= {"optimizer": functools.partial(torch.optim.SGD, lr=0.1), "steps": 1}
    run = isthmus.train(**given, run=tmp_path / "run")
    (loss := LOSS(twin(x), y)).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert run.losses[0].loss == pytest.approx(loss.item(), rel=1e-14)
    run.load(model)
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-14, atol=1e-15)

    def splits(split: str) -> dict[str, Tensor]:
        return {"input": x[:40], "target": y[:40]} if split == "train" else {"input": x[30:], "target": y[30:]}

    overrides = {"training.eval_every": 1}
    with pytest.raises(UserError, match=r"training\.eval_every: got 1, but all of the data train: give held-out"):
        isthmus.train(**given, run=tmp_path / "refused", overrides=overrides)
    sizes = {
        name: [len(load_dataset(Objects(asked).job(tmp_path / name, changed).data, split)) for split in SPLITS]
        for name, asked, changed in (
            ("split", {**given, "data": splits}, overrides),
            ("share", given, {**overrides, "data.options.holdout": 0.25}),
        )
    }
    assert sizes == {"split": [40, 10], "share": [30, 10]}
    one = Objects({**given, "data": {"input": x[:1], "target": y[:1]}, "batch": 1}).job(tmp_path / "one", {})
    assert len(load_dataset(one.data, "train")) == 1


class Masked(nn.Module):
    """A mean of its own where `own`, over labels of which some are left out."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.embed, self.head, self.own = nn.Embedding(8, 4), nn.Linear(4, 3), own

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits, labels = self.head(torch.tanh(self.embed(x))).flatten(0, 1), labels.flatten()
        if not self.own:
            return nn.functional.cross_entropy(logits, labels)
        kept = (labels >= 0).float()
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        return (each * kept).sum() / kept.sum() + 0.1 * logits.square().mean()


@pytest.mark.parametrize("own", represented_by([False, True], False))
def test_a_step_is_the_plain_loops_whatever_the_loss(own: bool, tmp_path: Path) -> None:
    """A token mean over two replicas, of which one has no label; a mean of the model's own in one micro-batch."""
    x = torch.arange(20).reshape(4, 5) % 8
    labels = torch.full((4, 5), -100)
    labels[2, :4], labels[3] = x[2, :4] % 3, 1
    model = Masked(own=own)
    twin = copy.deepcopy(model)
    given = {"model": model, "data": {"x": x, "labels": labels}, "batch": 4, "steps": 2, "fleet": "laptop"}
    given |= {"optimizer": functools.partial(torch.optim.SGD, lr=0.5), "run": tmp_path / "run"}
    overrides: dict[str, object] = {"training.shuffle": False, "planner": "even"}
    if own:
        with pytest.warns(UserWarning, match="by default that is 1 here, not 4"):
            run = isthmus.train(**given, overrides=overrides)
    else:
        prepared = prepare(Objects(given).job(tmp_path / "given", overrides))
        layouts = [PlanLayout((name,), (), 2) for name in ("laptop-0", "laptop-1")]
        plan = build_replicas(prepared.problem(fleet_of(prepared.job)), layouts, planner="even")
        run = isthmus.train(**given, overrides=overrides, plan=plan)
    assert load_plan(run.path / "plan.json").micro_batches == (1 if own else 4)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for point in run.losses:
        loss = twin(x, labels)
        assert point.loss == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert run.load(model) == len(run.losses) == 2
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_every_sample_of_every_client_trains(tmp_path: Path) -> None:
    clients = [{"input": data(n)[:][0], "target": data(n)[:][1]} for n in (40, 1)]
    model = nn.Linear(4, 1)
    start = copy.deepcopy(model).state_dict()
    result = isthmus.federate(
        model=model,
        loss=LOSS,
        clients=clients,
        rounds=1,
        overrides={"runtime.executors": 1, "training.batch_size": 40, "learning_rate": 0.1},
        run=tmp_path / "run",
    )
    expected = torch.zeros(1, 4)
    for client in clients:
        model.load_state_dict(start)
        LOSS(model(client["input"]), client["target"]).backward()
        expected += len(client["input"]) / 41 * (model.weight - 0.1 * model.weight.grad).detach()
        model.zero_grad()
    assert isinstance(result.model, nn.Linear) and result.evaluation is None
    torch.testing.assert_close(result.model.weight.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.RMSprop, ["RMSprop", "SGD, Adam, AdamW or Muon"]),
        (functools.partial(torch.optim.AdamW, amsgrad=True), ["amsgrad", "True"]),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), ["dampening", "0.5"]),
        (functools.partial(torch.optim.Adam, weight_decay=0.1), ["weight_decay 0.1", "AdamW"]),
        (functools.partial(torch.optim.SGD, speed=1), ["speed"]),
    ],
)
def test_optimizers_that_cannot_be_read(make: Callable[..., torch.optim.Optimizer], words: list[str]) -> None:
    with pytest.raises(UserError) as found:
        read_optimizer(make, nn.Linear(2, 1))
    assert all(word in str(found.value) for word in words), found.value


def test_an_optimizer_has_the_models_trainable_parameters_and_no_others() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.raises(UserError, match=r"optimizer: does not have parameter '0\.weight' \(2 such\)"):
        read_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    with pytest.raises(UserError, match="group 0 has a parameter"):
        read_optimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), model)
    with pytest.raises(UserError, match="optimizer: got 'adamw', expected"):
        read_optimizer("adamw", model)  # pyright: ignore[reportArgumentType]
    model[0].requires_grad_(False)
    (found,) = read_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    assert (found.name, found.pattern) == ("sgd", "*")


def _warmed_up(optimizer: torch.optim.Optimizer) -> object:
    return transformers.get_scheduler("linear", optimizer, num_warmup_steps=10, num_training_steps=100)


def _in_sequence(optimizer: torch.optim.Optimizer) -> object:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _gone(optimizer: torch.optim.Optimizer) -> None:
    lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (_warmed_up, r"a scheduler \(LambdaLR\) moves its learning rate, which is 0, 0 now"),
        (_in_sequence, "CosineAnnealingLR, LinearLR, SequentialLR"),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), r"\(ReduceLROnPlateau\)"),
        (lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10), r"\(OneCycleLR\)"),
        (lambda o: lr_scheduler.LinearLR(o, start_factor=1.0), r"\(LinearLR\)"),
        (_gone, "a scheduler moves"),
    ],
)
def test_an_optimizer_that_a_scheduler_has_is_refused(
    schedule: Callable[[torch.optim.Optimizer], object], words: str
) -> None:
    """Its rate is that of the moment: of a warm-up from 0, no weight would ever move."""
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    assert [c.lr for c in read_optimizer(optimizer, model)] == [0.5, 0.1]
    held = schedule(optimizer)
    for given in (optimizer, lambda _: optimizer, accelerate.Accelerator().prepare_optimizer(optimizer)):
        with pytest.raises(UserError, match=words) as found:
            read_optimizer(given, model)
        assert "[learning_rate]: overrides={'learning_rate': " in str(found.value)
    if held is not None:
        with pytest.raises(UserError, match=r"expected an optimizer of torch\.optim.*\[learning_rate\]"):
            read_optimizer(held, model)  # pyright: ignore[reportArgumentType]


def test_an_error_in_the_loss_names_no_line_of_ours(tmp_path: Path) -> None:
    data = {"input": torch.zeros(8, 2), "target": torch.zeros(8)}
    with pytest.raises(UserError, match=r"^model: in module 'loss': class and token ids must be int64") as found:
        isthmus.train(model=nn.Linear(2, 3), loss=nn.functional.cross_entropy, data=data, run=tmp_path / "run", batch=8)
    assert ".py" not in str(found.value)


def test_a_run_is_called_by_the_model_that_was_given_also_with_a_loss(tmp_path: Path) -> None:
    data = {"input": torch.zeros(8, 2), "target": torch.zeros(8, 3)}
    job = Objects({"model": nn.Linear(2, 3), "loss": LOSS, "data": data}).job(tmp_path, {})
    assert job.model.name.startswith("given:Linear+loss-")
    weights = {"model.weight": torch.zeros(1), "loss.scale": torch.zeros(1)}
    for name in (job.model.name, "given:WithLoss-236975d9"):  # the second is that of earlier versions
        assert own_names(name, weights).keys() == {"weight"}
    assert own_names("given:Linear-236975d9", weights).keys() == weights.keys()


def test_a_target_without_a_loss_says_to_give_one(tmp_path: Path) -> None:
    data = {"input": torch.zeros(8, 2), "target": torch.zeros(8, 3)}
    with pytest.raises(UserError, match=r"does not take \['target'\]: with a column 'target' give `loss=`"):
        isthmus.train(model=nn.Linear(2, 3), data=data, run=tmp_path / "run", batch=8)


def test_an_optimizer_is_new_and_has_no_hooks() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UserError, match="its step has a hook or was replaced"):
        read_optimizer(optimizer, model)
    handle.remove()
    assert read_optimizer(optimizer, model)[0].name == "adamw"
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(UserError, match=r"it has made steps, .* without its state"):
        read_optimizer(optimizer, model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.step()
    assert read_optimizer(plain, model)[0].lr == 0.1, "SGD without momentum has none to lose"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: isthmus.train(model=nn.Linear, data=data()), "model: Linear needs in_features, out_features"),
        (lambda: isthmus.train(model=nn.Linear(4, 1)), "^data: missing"),
        (lambda: isthmus.train(model=nn.Linear(4, 1), data=data(), loss="mse"), "loss: got 'mse', expected a callable"),
        (lambda: isthmus.plan(nn.Linear(4, 1), {"a": 1}, inputs=torch.zeros(1, 4)), "fleet: got {'a': 1}, expected a"),
        (lambda: isthmus.simulate(None, "three-sites"), "job: got None, expected a Job or a job file"),
    ],
)
def test_an_argument_of_another_kind_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()


def test_optimizers_are_read_group_by_group() -> None:
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "weight_decay": 0.0}]
    found = read_optimizer(torch.optim.AdamW(groups, lr=0.1), model)
    assert [(c.name, c.pattern, c.lr, c.weight_decay) for c in found] == [
        ("adamw", "weight", 0.5, 0.01),
        ("adamw", "bias", 0.1, 0.0),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Endless(), ["Endless has no __len__"]),
        ([], ["no samples"]),
        ([{"x": 1}, {"y": 1}], ["sample 1", "columns y", "x"]),
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], ["sample 1, column 'x'", "(3,)", "(2,)"]),
        ([{"x": "text"}], ["x"]),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, ["differ in length"]),
    ],
)
def test_data_that_cannot_be_read(given: object, words: list[str]) -> None:
    with pytest.raises(UserError) as found:
        read_arrays(given, lambda count: [f"part_{n}" for n in range(count)])  # pyright: ignore[reportArgumentType]
    assert all(word in str(found.value) for word in words), found.value


def test_what_is_missing_or_given_twice_is_said() -> None:
    with pytest.raises(UserError, match="data: missing"):
        isthmus.train(model=nn.Linear(2, 1))
    with pytest.raises(UserError, match="got a job and steps"):
        isthmus.train("job.toml", steps=3)
    with pytest.raises(UserError, match="unknown train argument 'modle': did you mean 'model'"):
        isthmus.train(modle=nn.Linear(2, 1))  # pyright: ignore[reportCallIssue]
    with pytest.raises(UserError, match=r"model: got 'gpt', expected an nn\.Module"):
        isthmus.train(model="gpt", data=data())  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"job: training\.steps: expected 'integer' >= 1, got 0"):
        isthmus.train(model=nn.Linear(4, 1), loss=LOSS, data=data(), steps=0)
    with pytest.raises(UserError, match="clients: missing"):
        isthmus.federate(model=nn.Linear(2, 1))
    with pytest.raises(UserError, match="algorithm: got 3, expected a name or"):
        isthmus.federate(model=nn.Linear(4, 1), loss=LOSS, clients=[data()], algorithm=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="inputs: missing"):
        isthmus.plan(nn.Linear(2, 1), "laptop")


def test_a_sum_with_its_count_is_a_clients_loss_too(tmp_path: Path) -> None:
    """As its mean: of clients, and of held-out samples."""

    def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return ((output - target) ** 2).sum(), torch.tensor(target.numel())

    clients = [{"input": data(n)[:][0], "target": data(n)[:][1]} for n in (8, 6)]
    model, found = nn.Linear(4, 1), list[float]()
    for name, loss in (("mean", LOSS), ("sum", summed)):
        result = isthmus.federate(
            model=copy.deepcopy(model),
            loss=loss,  # pyright: ignore[reportArgumentType]
            clients=clients,
            test=clients[0],
            rounds=2,
            overrides={"runtime.executors": 1},
            run=tmp_path / name,
        )
        assert result.evaluation is not None and result.evaluation.loss is not None
        found.append(result.evaluation.loss)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_an_algorithm_of_the_callers_own(tmp_path: Path) -> None:
    rounds: list[int] = []

    class Counting(FedAvg):
        """FedAvg that counts."""

        def server(self, server, combined, cohort):  # type: ignore[no-untyped-def]
            rounds.append(cohort.round if hasattr(cohort, "round") else len(rounds))
            return super().server(server, combined, cohort)

    clients = {name: {"input": torch.randn(6, 4), "target": torch.zeros(6, 1)} for name in "abc"}
    result = isthmus.federate(
        model=nn.Linear(4, 1),
        loss=LOSS,
        clients=clients,
        test=data(),
        algorithm=Counting(),
        rounds=3,
        overrides={"runtime.executors": 1, "training.batch_size": 3},
        run=tmp_path / "run",
    )
    assert (result.outcome, len(result.rounds), len(rounds)) == ("done", 3, 3)
    assert all(line.clients == 3 for line in result.rounds) and isinstance(result.model, nn.Linear)


def test_a_notebook_shows_one_table_that_changes() -> None:
    shown: list[str] = []

    class Handle:
        def update(self, what: object, /) -> None:
            shown.append(what._repr_html_())  # pyright: ignore

    def display(what: object, **_: object) -> Handle:
        shown.append(what._repr_html_())  # pyright: ignore
        return Handle()

    observer = NotebookObserver(display)
    observer.note("<begins>")
    observer.stepped(StepDone(step=1, steps=2, loss=0.5, samples_per_s=3.0))
    assert len(shown) == 2 and "&lt;begins&gt;" in shown[1]
    assert "<td>1 of 2</td>" in shown[1] and "<td>loss 0.5000, 3 samples/s</td>" in shown[1]
