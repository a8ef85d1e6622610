"""Clients that keep part of the model are evaluated with the models that they use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isthmus.federated.evaluation import RoundHistory
from tests.federated.test_run_folders import JOB
from tests.runtime.commands import isthmus

HEADS = """
import torch
from isthmus.federated import Algorithm, ClientUpdate

HEAD = 40 + 10  # of Linear(4, 10), the vector's end

def whole(model, state):
    return torch.cat([model[..., :-HEAD], state["head"]], -1)

class Heads(Algorithm, frozen=True):
    "Clients share all but the head; each keeps its own."
    def init_client(self, model):
        return {"head": model[-HEAD:].clone()}
    def own_model(self, model, state):
        return whole(model, state)
    @property
    def returns(self):
        return {"delta": "weighted_mean"}
    def client(self, local, broadcast, state):
        mine = whole(broadcast["model"], state)
        end = mine + local.descend(mine)
        delta = end - mine
        delta[..., -HEAD:] = 0
        return ClientUpdate(values={"delta": delta}, state={"head": end[..., -HEAD:].clone()})
    def server(self, server, combined, cohort):
        return {"model": server["model"] + combined["delta"]}

class Silent(Heads, frozen=True):
    "The same, but nobody is notified of the heads."
    def own_model(self, model, state):
        return None

class Forgetful(Heads, frozen=True):
    "A client may begin anew."
    @property
    def state_can_be_lost(self):
        return True

class Wrong(Heads, frozen=True):
    def own_model(self, model, state):
        return state["head"]
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "heads", raising=False)
    (tmp_path / "heads.py").write_text(HEADS)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = 'metrics = ["accuracy"]\n' + JOB.format(folder=tmp_path)
    text = text.replace('scheme = "iid"', 'scheme = "dirichlet"\nalpha = 0.05')
    text = text.replace("eval_every = 0", "eval_every = 2").replace("rounds = 3", "rounds = 6")
    (tmp_path / "job.toml").write_text(
        text.replace("clients = 3", "clients = 5").replace("[training]", "[training]\nepochs = 5")
    )
    return tmp_path / "job.toml"


def accuracies(job: Path, algorithm: str, *more: str) -> tuple[list[float], str]:
    own = job.with_name(f"{algorithm}{len(more)}.toml")
    own.write_text(
        job.read_text()
        .replace('"fedavg"', f'"heads:{algorithm}"')
        .replace("[training]", "[training]\neval_clients = 5")
    )
    run = job.parent / f"{own.stem}-run"
    done = isthmus("train", own, "--run", run, *more)
    assert done.code == 0, done.err
    found = [line.evaluation for line in RoundHistory.of(run).lines() if line.evaluation is not None]
    assert [e.loss is None for e in found] == [algorithm == "Heads"] * 3
    return [e.clients["accuracy"].mean for e in found], done.out


@pytest.mark.long
def test_each_is_evaluated_with_its_own_head(job: Path) -> None:
    own, said = accuracies(job, "Heads")
    servers, _ = accuracies(job, "Silent")
    assert own[-1] > servers[-1] + 0.2, "a head that nobody trained knows nothing"
    assert "held-out" not in said and "clients' own data: mean accuracy" in said
    assert accuracies(job, "Heads", "--scheme", "ours")[0] == own, "wherever they were trained"


def test_clients_are_evaluated_even_where_the_job_does_not_say_so(job: Path) -> None:
    job.write_text(job.read_text().replace('"fedavg"', '"heads:Heads"'))
    done = isthmus("train", job)
    assert done.code == 0 and "clients' own data: mean accuracy" in done.out


def test_what_is_no_model_is_refused(job: Path) -> None:
    job.write_text(job.read_text().replace('"fedavg"', '"heads:Wrong"'))
    done = isthmus("train", job)
    assert done.code == 2 and "own_model gives float32 [50], expected float32 [" in done.err


@pytest.mark.parametrize("algorithm", ["Forgetful", "Heads"])
def test_a_lost_state_of_a_client_that_does_not_train_is_no_end_where_the_algorithm_allows(
    job: Path, algorithm: str
) -> None:
    text = (
        job.read_text()
        .replace('"fedavg"', f'"heads:{algorithm}"')
        .replace("[training]", "[training]\neval_clients = 5")
    )
    job.write_text(text.replace("epochs = 5", "epochs = 1").replace("rounds = 6", "rounds = 4"))
    run = job.parent / "run"
    assert isthmus("train", job, "--run", run).code == 0
    (kept,) = (run / "states").rglob("*.states")
    kept.write_bytes(bytes(kept.stat().st_size))
    text = job.read_text().replace("rounds = 4", "rounds = 6")
    job.write_text(text.replace("[federated.participation]\nclients = 5", "[federated.participation]\nclients = 1"))
    done = isthmus("train", job, "--resume", "--run", run)
    if algorithm == "Heads":
        assert done.code == 2 and "the algorithm cannot go on without it" in done.err
        return
    assert done.code == 0, done.err
    trained = {
        t.client for line in RoundHistory.of(run).lines()[4:] for one in line.record.trained.values() for t in one
    }
    assert len(trained) <= 2
    for client in set(range(5)) - trained:
        assert f"client {client} is evaluated with a new one" in " ".join(done.err.split())
    assert (last := RoundHistory.of(run).lines()[-1].evaluation) is not None
    assert last.clients["accuracy"].clients == 5


def test_the_accuracies_of_clients_alone_are_drawn(job: Path) -> None:
    job.write_text(job.read_text().replace('"fedavg"', '"heads:Heads"').replace("rounds = 6", "rounds = 2"))
    run = job.parent / "run"
    assert isthmus("train", job, "--run", run, draws=True).code == 0
    assert (run / "metrics.png").read_bytes().startswith(b"\x89PNG")
