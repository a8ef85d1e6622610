"""Modules, data sets, optimizers and algorithms as Python objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import isthmus
from isthmus.api.export import export_model
from isthmus.api.notebook import NotebookObserver
from isthmus.api.observer import StepDone
from isthmus.api.optimizers import read_optimizer
from isthmus.api.samples import read_arrays
from isthmus.data import load_dataset
from isthmus.errors import Interrupted, UserError
from isthmus.federated.algorithms.fedavg import FedAvg

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
    given = {"model": model, "loss": LOSS, "data": {"input": data()[:][0], "target": data()[:][1]}, "batch": 15}
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
    x, y = (column[_trained(run)] for column in (given["data"]["input"], given["data"]["target"]))
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


def _trained(run: isthmus.Run) -> Tensor:
    """Rows that are not held out: 15 of 16, which is a batch."""
    rows = load_dataset(run.job.data, "train")
    assert len(rows) == 15
    inputs = rows.batch(torch.arange(15).numpy(), ["input"])["input"]
    whole = data()[:][0]
    return torch.stack([(whole == row).all(1).nonzero()[0, 0] for row in inputs])


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
        overrides={"execution.executors": 1, "local.batch_size": 3},
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
    assert "<td>1 of 2</td>" in shown[1] and "<td>0.5000</td>" in shown[1] and "3 samples/s" in shown[1]
