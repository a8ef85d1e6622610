"""Every client starts from the server's buffers, whatever their type and wherever it trains; the server's are moved by
the weighted mean of what training changed, and a buffer that it does not change keeps its bits and is not sent."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from isthmus.accelerators import HOST
from isthmus.errors import UserError
from isthmus.federated import AlgorithmSpec, ClientTrainer, LocalConfig, Server, TrainingTask, load_algorithm
from isthmus.federated.admission import AdmissionRules, Privacy, private
from isthmus.federated.algorithms import Algorithm, Values
from isthmus.federated.local import PlainLocal, StepsByRound, Workspace
from isthmus.federated.partial import PartialSum
from isthmus.federated.resident import Resident, buffers_of
from isthmus.federated.robust import Aggregation, Robust
from isthmus.federated.site import Site, UpdateRules
from isthmus.federated.stacked import best_clients_per_vmap
from isthmus.protocol.federated_messages import ClientTask, PhaseId, PhaseSetup
from tests.federated.populations import LOCAL, ListedData, Run, members, population
from tests.federated.twins import ETA, SEED, batches

CONSTANTS = ("mask", "tiny", "table", "hashes", "turns", "seen")


class Stateful(nn.Module):
    """Batch norm that counts its batches, an average that the forward assigns, and constants of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None)
        self.last = nn.Linear(6, 3)
        self.register_buffer("size", torch.zeros(()))
        self.register_buffer("mask", torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) == 1, -math.inf))
        self.register_buffer("tiny", torch.full((2,), 1e-13))
        self.register_buffer("table", torch.linspace(0, 1, 5, dtype=torch.float64) / 3)
        self.register_buffer("hashes", torch.tensor([2**62 + 1, -5]))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("seen", torch.tensor([True, False]).expand(2, 2))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.size = 0.9 * self.size + 0.1 * pixel_values.detach().abs().mean()
        halves = self.norm(pixel_values.view(-1, 3))  # two of a sample: it takes no batch of one
        logits = self.last(halves.view(-1, 6))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Constant(Stateful):
    """Without those that training changes."""

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(pixel_values) + self.tiny.sum() + self.mask.softmax(-1)[0]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def stateful() -> nn.Module:
    torch.manual_seed(0)
    module = Stateful()
    for part in (module.norm, module.last):
        part.double()
    return module


def constant() -> nn.Module:
    torch.manual_seed(0)
    module = Constant()
    module.norm = nn.Identity()
    module.last.double()
    return module


def own_loop(rounds: int) -> dict[str, Tensor]:
    """FedAvg over whole state dicts: each client has a module of its own, with the server's state."""
    server, data = stateful(), population()
    for round_ in range(rounds):
        states, sizes = [], []
        for client in members(round_, data.sizes).tolist():
            module = copy.deepcopy(server)
            step = torch.optim.SGD(module.parameters(), lr=ETA)
            for batch in batches(data.clients[client], client, round_):
                step.zero_grad()
                module(**batch)["loss"].backward()
                step.step()
            states.append(module.state_dict())
            sizes.append(len(data.clients[client]["labels"]))
        mean = {}
        for name, value in server.state_dict().items():
            if name in CONSTANTS:
                mean[name] = value
            else:
                found = sum(s[name].double() * n for s, n in zip(states, sizes, strict=True)) / sum(sizes)
                mean[name] = found.round().long() if name.endswith("num_batches_tracked") else found
        server.load_state_dict(mean)
    return server.state_dict()


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if name in CONSTANTS or not value.is_floating_point():
            assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
        else:
            assert torch.allclose(value.double(), expected[name].double(), rtol=1e-6, atol=1e-8), name


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return own_loop(3)


@pytest.mark.parametrize("executors", [1, 2, 3])
def test_a_run_has_the_buffers_of_an_own_loop(executors: int, expected: dict[str, Tensor], tmp_path: Path) -> None:
    run = Run("fedavg", {}, tmp_path, executors=executors, rounds=3, model=stateful)
    assert run.run().outcome == "done"
    buffers = buffers_of(run.server.values)
    assert int(buffers["norm.num_batches_tracked"]) > 3 and {*CONSTANTS, "size"} < buffers.keys()
    close(buffers, expected)
    resident = Resident(stateful())
    close(resident.named(run.server.values["model"]), expected)


def test_executors_in_any_number_give_the_same_bits(tmp_path: Path) -> None:
    runs = [Run("mime", {}, tmp_path / str(n), executors=n, rounds=3, model=stateful) for n in (1, 2, 4)]
    for run in runs:
        run.run()
    first = runs[0].server.values
    assert all(torch.equal(v, r.server.values[n]) for r in runs[1:] for n, v in first.items() if n != "buffers/turns")


class Listening(Server):
    """Notes what is sent to clients."""

    def broadcast(self) -> Values:
        found = super().broadcast()
        self.said = {**getattr(self, "said", {}), **found}
        return found


@pytest.mark.parametrize(("model", "changed"), [(stateful, 4), (constant, 0)])
def test_what_training_does_not_change_is_not_sent(
    model: object, changed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, merge = set[str](), PartialSum.merge

    def heard_merge(partial: PartialSum, tensors: dict[str, Tensor], *rest: object) -> None:
        heard.update(tensors)
        merge(partial, tensors, *rest)  # pyright: ignore

    monkeypatch.setattr(PartialSum, "merge", heard_merge)
    run = Run("fedavg", {}, tmp_path, rounds=3, model=model)  # pyright: ignore[reportArgumentType]
    run.server.__class__ = Listening
    begun = dict(run.server.values)
    run.run()
    sent = {name for name in heard if name.startswith("buffers/")}
    assert len(sent) == changed and sent == {n for n in run.server.said if n.startswith("buffers/")}  # pyright: ignore
    for name in CONSTANTS:
        assert torch.equal(run.server.values[f"buffers/{name}"], begun[f"buffers/{name}"])
    assert sent == {name for name in run.server.kept if name.startswith("buffers/")}
    again = Server(load_algorithm(AlgorithmSpec(name="fedavg")), begun["model"], buffers_of(begun), 9)
    again.restore(run.server.kept, 3)
    assert all(torch.equal(value, run.server.values[name]) for name, value in again.values.items())


FEDAVG = load_algorithm(AlgorithmSpec(name="fedavg"))
WRAPPED = [
    private(FEDAVG, Privacy(clip=1.0, noise_multiplier=1.0), 5, 1, simulated=True),
    Robust(inner=FEDAVG, rule=Aggregation(rule="median")),
]


@pytest.mark.parametrize("algorithm", WRAPPED, ids=["privacy", "median"])
def test_constants_go_with_privacy_and_robust_rules_and_running_means_do_not(algorithm: Algorithm) -> None:
    work, data = TrainingTask(algorithm=algorithm, local=LOCAL, seed=SEED), population()
    resident = Resident(constant())
    server = Server(algorithm, resident.vector(), resident.buffers(), 9)
    trainer = ClientTrainer(work, constant(), data, None)
    trainer.warm_up()
    opening = PhaseSetup(phase=PhaseId(0), clients=1, samples=3)
    server.open(opening)
    trainer.open(opening, server.broadcast())
    timed, refused = trainer.train([ClientTask(0, 3)])
    assert len(timed) == 1 and not refused
    server.partial.merge(trainer.partial.tensors(), trainer.partial.weights(), trainer.partial.bounds())
    server.absorb()
    assert torch.isfinite(server.values["model"]).all() and server.values["buffers/mask"].isinf().any()
    with pytest.raises(UserError, match="got a buffer 'size' that training changes beside"):
        ClientTrainer(work, _Sized(), data, None).warm_up()


class _Sized(Constant):
    """Changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.last.double()
        self.norm = nn.Identity()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.size = self.size + pixel_values.detach().mean()
        return super().forward(pixel_values, labels)


def test_clients_together_may_have_constants_and_no_running_means(tmp_path: Path) -> None:
    runs = [
        Run("fedavg", {}, tmp_path, rounds=2, clients_per_vmap=n, clients_per_size=3, model=constant) for n in (1, 4)
    ]
    assert all(run.run().outcome == "done" for run in runs)
    assert any(len(timed) > 1 for r in runs[1].records for timed in r.trained.values())
    assert torch.allclose(*(run.server.values["model"] for run in runs), rtol=1e-5, atol=1e-9)
    columns = {name: column[:3] for name, column in population().clients[0].items()}
    assert best_clients_per_vmap(Resident(_Sized()), columns) == 1
    with pytest.raises(UserError, match=r"model: got running statistics .* each client would have buffers of its own"):
        Run("fedavg", {}, tmp_path, rounds=1, clients_per_vmap=4, clients_per_size=3, model=_Sized).run()


@pytest.mark.parametrize("masked", [False, True])
def test_sites_give_what_a_simulation_gives(masked: bool, tmp_path: Path) -> None:
    """Masked updates are as long for every site, whatever training changed there."""
    simulated = Run("fedavg", {}, tmp_path, rounds=3, model=stateful)
    simulated.run()
    algorithm, data = load_algorithm(AlgorithmSpec(name="fedavg")), population()
    resident = Resident(stateful())
    server = Server(algorithm, resident.vector(), resident.buffers(), 9)
    work, rules = TrainingTask(algorithm=algorithm, local=LOCAL, seed=SEED), UpdateRules(masked=masked)
    sites = [Site(work, stateful(), ListedData([d] * 9), None, rules=rules) for d in data.clients]
    for round_ in range(3):
        asked = [ClientTask(i, int(data.sizes[i])) for i in members(round_, data.sizes).tolist()]
        opening = PhaseSetup(phase=PhaseId(round_), clients=len(asked), samples=sum(t.samples for t in asked))
        server.open(opening)
        for task in asked:
            sites[task.client].open(opening, server.broadcast())
            sites[task.client].train([task])
            if masked:
                partial = sites[task.client].partial
                tensors = partial.tensors(whole=True)
                assert tensors.keys() == server.sums[0].keys()
                server.partial.merge(
                    tensors, partial.weights(), server.partial.check(tensors, [task.client], partial.weights())
                )
                server.settle()
            else:
                update = sites[task.client].update
                assert update is not None and not {f"buffers/{name}" for name in CONSTANTS} & update.values.keys()
                server.partial.fold(task.client, server.admit(update, task.samples, AdmissionRules()), task.samples)
        server.absorb()
    assert all(torch.equal(value, simulated.server.values[name]) for name, value in server.values.items())


class Peak(Constant):
    """An infinite first value, of which no mean can be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.size.fill_(-math.inf)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.size = torch.maximum(self.size, pixel_values.detach().max().float())
        return super().forward(pixel_values.float(), labels)


class Grows(Constant):
    """A buffer whose shape is another after each step."""

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.tiny = torch.cat([self.tiny, self.tiny[:1]])
        return super().forward(pixel_values.float(), labels)


class Teacher(Constant):
    """A frozen parameter that the forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.slow.add_(1)
        return super().forward(pixel_values.float(), labels)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Peak, "buffer 'size' is -inf at first and .* after training: expected finite first values"),
        (Grows, r"buffer 'tiny' of Grows became float32 \[\d+\] in training, was float32 \[2\]"),
        (Teacher, "training writes to the frozen parameter 'slow', expected a buffer"),
    ],
)
def test_state_that_has_no_mean_is_refused_by_name(module: type[nn.Module], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        Run("fedavg", {}, tmp_path, rounds=1, model=module).run()


def test_a_cache_that_grows_is_no_state() -> None:
    module = Grows()
    module.register_buffer("tiny", module.tiny, persistent=False)
    resident = Resident(module, HOST)
    columns = population().clients[0]
    steps = StepsByRound(LocalConfig(), 1).at(0)
    local = PlainLocal(resident, Workspace(resident), LocalConfig(), columns, steps=steps, seed=0, round_=0, client=0)
    local.descend(resident.vector())
    assert resident.buffer_changes({}) == {} and len(module.tiny) > 2
    resident.set_buffers({})
    assert len(module.tiny) == 2
