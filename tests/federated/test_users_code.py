"""An algorithm or model of the user's own that fails, or gives what it must not: a line that says which function."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.federated import (
    Algorithm,
    AlgorithmSpec,
    ClientTrainer,
    ClientUpdate,
    Combine,
    Server,
    StateStore,
    TrainingTask,
    load_algorithm,
)
from isthmus.federated.algorithms import Cohort, LocalTrainer, Values
from isthmus.federated.partial import PartialSum
from isthmus.federated.states import StateForm
from isthmus.protocol.federated_messages import ClientTask, PhaseId, PhaseSetup
from tests.federated.populations import LOCAL, module, population

MODEL = torch.ones(4)


class Mine(Algorithm, frozen=True):
    """Moves by ones."""

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": torch.ones_like(broadcast["model"])})

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return {"model": server["model"] + combined["delta"]}


class Table(Mine, frozen=True):
    """Returns more than vectors."""

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"table": "sum", "count": "mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"table": torch.ones(2, 3), "count": torch.tensor(1.0)})

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        assert (combined["table"].shape, combined["count"].shape) == ((2, 3), ())
        return server


def test_a_combined_value_has_the_shape_that_clients_gave_it() -> None:
    server = Server(Table(), MODEL, {}, 1)
    server.open(PhaseSetup(phase=PhaseId(0), clients=1, samples=1))
    server.partial.fold(0, ClientUpdate(values={"table": torch.ones(2, 3), "count": torch.tensor(1.0)}), 1)
    server.absorb()


class Misspelt(Mine, frozen=True):
    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return {"model": server["model"] + combined["dleta"]}


class Loses(Mine, frozen=True):
    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return {"weights": server["model"]}


class InPlace(Mine, frozen=True):
    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        server["model"].add_(combined["delta"])
        return server


class Shrinks(Mine, frozen=True):
    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return {"model": server["model"][:3]}


class Counts(Mine, frozen=True):
    def server(self, server: Values, combined: Values, cohort: Cohort) -> Any:
        return {"model": server["model"], "rounds": 1}


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (Misspelt(), r"server, round 1: KeyError: 'dleta' \(.*test_users_code.py, line \d+, in server\)"),
        (Loses(), "server gives no 'model'"),
        (InPlace(), "server changed 'model' of what it was given, expected a new tensor"),
        (Shrinks(), r"server gives 'model': got float32 \[3\], expected float32 \[4\]"),
        (Counts(), "server gives 'rounds': got int, expected a tensor"),
    ],
)
def test_a_server_that_fails(algorithm: Algorithm, words: str) -> None:
    server = Server(algorithm, MODEL, {}, 1)
    server.open(PhaseSetup(phase=PhaseId(0), clients=1, samples=1))
    server.partial.fold(0, ClientUpdate(values={"delta": MODEL}), 1)
    with pytest.raises(UserError, match=words):
        server.absorb()


class Breaks(Mine, frozen=True):
    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        raise ZeroDivisionError("of nothing")


class Leaves(Mine, frozen=True):
    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        sys.exit("enough")


class ReturnsValues(Mine, frozen=True):
    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> Any:
        return {"delta": broadcast["model"]}


class Weighs(Mine, frozen=True):
    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> Any:
        return ClientUpdate(values={"delta": broadcast["model"]}, weight="much")  # pyright: ignore[reportArgumentType]


class ReturnsNumber(Mine, frozen=True):
    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> Any:
        return ClientUpdate(values={"delta": 1.0})  # pyright: ignore[reportArgumentType]


class ReturnsSparse(Mine, frozen=True):
    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": broadcast["model"].to_sparse()})


class ReturnsComplex(Mine, frozen=True):
    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": torch.fft.fft(broadcast["model"])})


class Writes(Mine, frozen=True):
    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": broadcast["model"].add_(1.0)})


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (Writes(), "a client changed 'model' of what it received"),
        (Breaks(), r"client 2: ZeroDivisionError: of nothing \(.*test_users_code.py, line \d+, in client\)"),
        (Leaves(), r"client 2: SystemExit: enough \(.*test_users_code.py, line \d+, in client\)"),
        (ReturnsValues(), "a client returned dict, expected a ClientUpdate"),
        (Weighs(), "weight of an update: got str, expected a number"),
        (ReturnsSparse(), "a client gives 'delta': got torch.sparse_coo, expected plain numbers"),
        (ReturnsComplex(), "a client gives 'delta': got torch.complex128, expected plain numbers"),
        (ReturnsNumber(), "a client gives 'delta': got float, expected a tensor"),
    ],
)
def test_a_client_that_fails(algorithm: Algorithm, words: str) -> None:
    site = ClientTrainer(TrainingTask(algorithm=algorithm, local=LOCAL, seed=0), module(), population(), None)
    site.open(PhaseSetup(phase=PhaseId(0), clients=1, samples=17), {"model": site.resident.vector()})
    with pytest.raises(UserError, match=words):
        site.train([ClientTask(2, 17)])


class Forgets(Mine, frozen=True):
    def init_client(self, model: Tensor) -> Values | None:
        return {"steps": torch.zeros(1)}


def test_a_state_that_is_not_returned(tmp_path: Path) -> None:
    states = StateStore(tmp_path, StateForm({"steps": torch.zeros(1)}))
    site = ClientTrainer(TrainingTask(algorithm=Forgets(), local=LOCAL, seed=0), module(), population(), states)
    site.open(PhaseSetup(phase=PhaseId(0), clients=1, samples=17), {"model": site.resident.vector()})
    with pytest.raises(UserError, match="a client returned no state, but init_client gives one"):
        site.train([ClientTask(2, 17)])


def test_a_model_that_does_not_take_the_data() -> None:
    data = population()
    for columns in data.clients:
        del columns["labels"]
    site = ClientTrainer(TrainingTask(algorithm=Mine(), local=LOCAL, seed=0), module(), data, None)
    with pytest.raises(
        UserError, match=r"it takes pixel_values, labels\), given client 0's columns pixel_values: TypeError: .*labels"
    ):
        site.warm_up()


class Reshapes(Forgets, frozen=True):
    def init_client(self, model: Tensor) -> Values | None:
        return {"columns": model.view(2, 2).sum(0)}


class TellsNoModel(Forgets, frozen=True):
    def broadcast(self, server: Values) -> Values:
        return {"weights": server["model"]}


class ListsState(Mine, frozen=True):
    def init_client(self, model: Tensor) -> Any:
        return [model]


def test_a_first_state_is_made_of_the_model() -> None:
    assert Server(Reshapes(), MODEL, {}, 1).keeps
    with pytest.raises(UserError, match="init_client gives list, expected a dict of tensors"):
        Server(ListsState(), MODEL, {}, 1)
    with pytest.raises(UserError, match="broadcast gives no 'model'"):
        Server(TellsNoModel(), MODEL, {}, 1).broadcast()


class CountsOnce(Mine, frozen=True):
    """Returns a number for all who are trained together, where each should have its own."""

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "mean", "steps": "mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": local.start(broadcast["model"]), "steps": torch.ones(1)})


def test_clients_trained_together_that_give_one_value() -> None:
    data = population(per_size=2)
    site = ClientTrainer(TrainingTask(algorithm=CountsOnce(), local=LOCAL, seed=0), module(), data, None)
    site.open(PhaseSetup(phase=PhaseId(0), clients=2, samples=6), {"model": site.resident.vector()})
    with pytest.raises(UserError, match=r"2 clients trained together give 'steps': got a tensor \[1\], expected \[2"):
        site.train([ClientTask(0, 3), ClientTask(1, 3)])


class NormsAll(Mine, frozen=True):
    """Divides by a norm over all dims: of all who are trained together."""

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        y = local.start(broadcast["model"])
        return ClientUpdate(values={"delta": y / y.norm()})


def test_clients_trained_together_that_are_mixed() -> None:
    site = ClientTrainer(
        TrainingTask(algorithm=NormsAll(), local=LOCAL, seed=0), module(), population(per_size=2), None
    )
    site.open(PhaseSetup(phase=PhaseId(0), clients=2, samples=6), {"model": site.resident.vector()})
    with pytest.raises(UserError, match="'delta' of a client trained together with others is off by"):
        site.train([ClientTask(0, 3), ClientTask(1, 3)])


class Noisy(Mine, frozen=True):
    """Adds noise to what it returns."""

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": torch.randn_like(broadcast["model"])})


def test_an_algorithm_that_draws_gives_the_same_bits_in_any_order() -> None:
    sums: list[Tensor] = []
    for order in (
        [ClientTask(0, 3), ClientTask(1, 10), ClientTask(2, 17)],
        [ClientTask(2, 17), ClientTask(1, 10), ClientTask(0, 3)],
    ):
        site = ClientTrainer(TrainingTask(algorithm=Noisy(), local=LOCAL, seed=0), module(), population(), None)
        torch.manual_seed(len(sums))
        site.open(PhaseSetup(phase=PhaseId(0), clients=3, samples=30), {"model": site.resident.vector()})
        for task in order:
            site.train([task])
        sums.append(site.partial.tensors()["delta"].clone())
    assert torch.equal(*sums) and len(sums[0].unique()) > 1


class NoisyRows(Mine, frozen=True):
    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": torch.randn_like(local.start(broadcast["model"]))})


def test_an_algorithm_that_draws_trains_one_by_one() -> None:
    site = ClientTrainer(
        TrainingTask(algorithm=NoisyRows(), local=LOCAL, seed=0), module(), population(per_size=2), None
    )
    site.open(PhaseSetup(phase=PhaseId(0), clients=2, samples=6), {"model": site.resident.vector()})
    with pytest.raises(UserError, match=r"federated\.algorithm: got random numbers beside"):
        site.train([ClientTask(0, 3), ClientTask(1, 3)])


NOTHING = """
from isthmus.federated import Algorithm

class Nothing(Algorithm, frozen=True):
    "Declares nothing."

class Without(Algorithm, frozen=True):
    "Returns nothing."
    returns = {}
"""


@pytest.mark.parametrize(("name", "words"), [("Nothing", "NotImplementedError"), ("Without", "returns nothing")])
def test_an_algorithm_that_returns_nothing(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nothing_algorithms.py").write_text(NOTHING)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=f"nothing_algorithms:{name}.*{words}"):
        load_algorithm(AlgorithmSpec(name=f"nothing_algorithms:{name}"))


def test_what_is_collected_is_alike_of_all_clients() -> None:
    partial = PartialSum({"sizes": "collect"})
    for client in (1, 2):
        values: dict[str, Tensor] = {"sizes": torch.zeros(client)}
        partial.fold(client, ClientUpdate(values=values), 1)
    with pytest.raises(UserError, match=r"'sizes': got torch.float32 \[1\] and torch.float32 \[2\], expected one"):
        partial.combined(torch.float32)


def test_a_module_that_leaves_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_script.py").write_text("import sys\nsys.exit('no arguments')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="cannot import a_script: SystemExit: no arguments"):
        load_algorithm(AlgorithmSpec(name="a_script:Mine"))
