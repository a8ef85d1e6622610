"""Epsilon counts on the draw of clients, and on the noise, that rounds have."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.federated import Server
from isthmus.federated.accounting import Accounting, written_guarantee
from isthmus.federated.admission import Guarantee, Privacy, guarantee, private
from isthmus.federated.in_process import InProcess
from isthmus.federated.job import client_data, identity, load_federated_job, round_rules
from isthmus.federated.secure import site_noise
from isthmus.programs.open_phase import RoundRecord
from isthmus.protocol.federated_messages import ExecutorJoined, PhaseId, PhaseOpened, PhaseSetup
from isthmus.protocol.federated_participation import Participation, cohort
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.rng import stream
from isthmus.runtime.federated.host import RoundMeasure
from isthmus.runtime.federated.run import RoundStore
from tests.federated.drawn_privacy import EACH, KINDS, PAGE, Setting, epsilons, settings, table
from tests.federated.populations import Asking, Run, commits, orders, population
from tests.federated.sites import write_job
from tests.federated.twins import SEED
from tests.runtime.commands import edited, isthmus, refused

POISSON = Participation(clients=1, poisson=True)
NOISE_4 = Privacy(clip=0.5, noise_multiplier=4.0)
NOISE_1 = Privacy(clip=1.0, noise_multiplier=1.0)


def accounting(rules: Participation, population: int = 10, **fields: object) -> Accounting:
    found = Accounting(privacy=NOISE_1, participation=rules, population=population, deployed=False, passes=1)
    return msgspec.structs.replace(found, **fields)


# What is drawn


def test_every_client_is_drawn_by_itself_even_where_that_gives_nobody() -> None:
    sizes = np.full(10, 5)
    for round_ in range(200):
        expected = np.flatnonzero(stream(3, "cohort", round_).random(10) < 0.1)
        assert cohort(POISSON, sizes, 3, round_).tolist() == expected.tolist()
    empty = sum(not len(cohort(POISSON, sizes, 3, r)) for r in range(4000)) / 4000
    assert abs(empty - 0.9**10) < 4 * math.sqrt(0.9**10 * (1 - 0.9**10) / 4000)


def test_clients_that_drop_out_of_a_poisson_draw_leave_each_by_itself() -> None:
    rules, sizes = msgspec.structs.replace(POISSON, dropout=0.5), np.full(10, 5)
    for round_ in range(200):
        drawn = np.flatnonzero(stream(3, "cohort", round_).random(10) < 0.1)
        stays = stream(3, "dropout", round_).random(len(drawn)) >= 0.5
        assert cohort(rules, sizes, 3, round_).tolist() == drawn[stays].tolist()


@pytest.mark.parametrize("one", settings()[: len(KINDS)], ids=lambda one: one.kind)
def test_a_client_is_in_a_round_as_often_as_epsilon_counts_at_most(one: Setting) -> None:
    sizes, rounds = np.full(one.clients, 5), 400
    counts = np.zeros(one.clients)
    for round_ in range(rounds):
        counts[cohort(one.participation, sizes, 0, round_)] += 1
    share, spread = one.probability, math.sqrt(one.probability / (rounds * one.clients))
    assert abs(counts.mean() / rounds - share) < 4 * spread
    rate = accounting(one.participation, one.clients).probability
    assert (1.0 if rate is None else rate) >= share


# What is done in a round of nobody


def poisson_run(
    name: str, folder: Path, rounds: int, rules: Participation = POISSON, *, executors: int = 1, **also: object
) -> Run:
    sizes = population().sizes
    drawn = partial(cohort, rules, sizes, SEED)
    return Run(
        name, {}, folder, executors=executors, rounds=rounds, drawn=drawn, poisson=True, needed=len(sizes), **also
    )


def models_of(run: Run) -> list[torch.Tensor]:
    """Before the run, and after each round."""
    found = [run.model.clone()]

    def committed(record: RoundRecord) -> None:
        run.records.append(record)
        found.append(run.model.clone())

    driver = InProcess(run.machine, run.server, run.sites, committed=committed)
    assert driver.run().outcome == "done"
    return found


@pytest.mark.parametrize("name", ["fedavg", "mime"])
def test_a_round_of_nobody_has_its_noise(tmp_path: Path, name: str) -> None:
    around = partial(private, privacy=Privacy(clip=1.0, noise_multiplier=0.1), expected=1, minimum=1, simulated=True)
    run = poisson_run(name, tmp_path, 40, executors=2, around=around)
    models = models_of(run)
    drawn = [cohort(POISSON, population().sizes, SEED, r).tolist() for r in range(40)]
    assert [sorted(t.client for timed in r.trained.values() for t in timed) for r in run.records] == drawn
    moved = torch.stack([b - a for a, b, who in zip(models, models[1:], drawn, strict=False) if not who])
    assert len(moved) > 8
    assert abs(float(moved.std()) / 0.1 - 1) < 0.15
    assert abs(float(moved.mean())) < 0.02


def test_a_round_of_nobody_changes_nothing_without_noise(tmp_path: Path) -> None:
    run = poisson_run("fedavgm", tmp_path, 30)
    models = models_of(run)
    empty = [not record.trained for record in run.records]
    assert any(empty)
    assert not all(empty)
    assert [torch.equal(a, b) for a, b in pairwise(models)] == empty


def test_thousands_of_rounds_of_nobody_in_a_row(tmp_path: Path) -> None:
    rules = msgspec.structs.replace(POISSON, dropout=0.9999)
    run = poisson_run("fedavg", tmp_path, 3000, rules, executors=2)
    assert run.run().outcome == "done"
    assert len(run.records) == 3000


def test_sites_of_which_nobody_is_drawn_have_a_round_that_changes_nothing() -> None:
    machine = Asking(
        ("a", "b"),
        RoundRules(rounds=2, needed=2, poisson=True, gathering=ExecutorChurn(start=2)),
        np.array([5, 5]),
        lambda round_: np.arange(2 * round_),
        ThroughputModel(2, window_rounds=5),
        clients={"a": 0, "b": 1},
    )
    machine.after_report("a", ExecutorJoined(samples=5))
    update, *out = machine.after_report("b", ExecutorJoined(samples=5))
    opening = PhaseSetup(phase=PhaseId(0), clients=0, samples=0)
    assert update == ("update_server", PhaseId(0), opening)
    (record,) = commits(out[:1])
    assert (record.round, dict(record.trained)) == (0, {})
    opened = [(name, order.opening.phase) for name, order in orders(out[1:], PhaseOpened)]
    assert opened == [("a", PhaseId(1)), ("b", PhaseId(1))] and len(out) == 3


# What the accountant is told


def test_epsilon_of_a_poisson_draw() -> None:
    pytest.importorskip("dp_accounting")
    told = accounting(POISSON).guarantee(50, 1)
    assert told.sampling_probability == 0.1
    assert told.epsilon == pytest.approx(5.148, abs=2e-3)


@pytest.mark.parametrize(
    ("rules", "fields"),
    [
        ({"quorum": 0.5}, {}),
        ({"minimum": 2}, {}),
        ({"availability": "when.csv"}, {}),
        ({"poisson": False}, {}),
        ({}, {"deployed": True}),
        ({}, {"privacy": Privacy(clip=1.0, noise_multiplier=1.0, noise="sites")}),
    ],
)
def test_a_draw_that_is_not_all_that_decides_does_not_lower_epsilon(
    rules: dict[str, object], fields: dict[str, object]
) -> None:
    assert accounting(POISSON).probability == 0.1
    assert accounting(msgspec.structs.replace(POISSON, **rules), **fields).probability is None


def test_sums_of_sites_that_are_drawn_each_by_themselves_have_room_for_all() -> None:
    """The unit of the exact sums follows from the clients in it, and rounding to units counts."""
    pytest.importorskip("dp_accounting")
    privacy = Privacy(clip=2.0**-30, noise_multiplier=1.0, noise="sites")
    told = accounting(POISSON, 64, privacy=privacy).guarantee(3, 100).epsilon
    rho = site_noise.concentrated(privacy, 1, 64, 100)
    assert told == site_noise.distributed_guarantee(privacy, 3, 1, rho).epsilon
    assert told > site_noise.distributed_guarantee(privacy, 3, 1, site_noise.concentrated(privacy, 1, 1, 100)).epsilon


@pytest.mark.long
def test_epsilon_of_drawn_settings_is_never_below_the_true_one() -> None:
    pytest.importorskip("dp_accounting")
    assert len(epsilons()) == len(KINDS) * EACH == 20
    for one, least, told, most in epsilons():
        assert least <= told <= most, one
        if one.kind in ("Poisson", "empty rounds", "fixed"):  # else more is counted than is done
            assert told <= 1.05 * least, one
    assert table() in PAGE.read_text(encoding="utf-8"), "python -m tests.federated.drawn_privacy"


# What a resumed run promises


def private_job(folder: Path) -> Path:
    job = write_job(folder, ("a", "b", "c"))
    job.write_text(job.read_text().partition("[federated.deployment]")[0])
    tables = "[privacy]\nclip = 0.5\nnoise_multiplier = 4.0\n[federated.participation]\nfraction = 1.0\n"
    tables += '[runtime]\nscheme = "sp"'
    return edited(job, ("[runtime]", tables))


def test_a_resumed_run_never_promises_less_than_its_rounds_had(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    job, run = private_job(tmp_path), tmp_path / "run"

    def epsilon(*options: str) -> Guarantee:
        assert (done := isthmus("train", job, "--run", run, *options)).code == 0, done.err
        found = written_guarantee(run)
        assert found is not None
        assert f"privacy: {found}" in done.err or "nothing left to do" in done.err
        return found

    first = epsilon()
    edited(job, ("fraction = 1.0", "fraction = 0.5\npoisson = true"), ("rounds = 4", "rounds = 8"))
    refused(
        isthmus("train", job, "--run", run, "--resume"),
        2,
        "participation was 'every client in every round', is now 'each client with probability 0.6666666666666666'",
    )
    edited(job, ("fraction = 0.5\npoisson = true", "fraction = 0.5"), ("rounds = 8", "rounds = 2"))
    fewer = epsilon("--resume")
    assert (fewer.rounds, fewer.epsilon) == (4, first.epsilon)
    (run / "rounds" / "round-000003.safetensors").unlink()  # as if the run had ended before it was saved
    edited(job, ("rounds = 2", "rounds = 5"))
    more = epsilon("--resume")
    assert (more.rounds, more.unsampled) == (5, 1)
    assert more.epsilon == pytest.approx(guarantee(NOISE_4, 6, 1, None).epsilon, rel=1e-6)
    assert epsilon("--resume") == more


def test_a_round_that_did_not_wait_for_all_who_were_drawn_counts_with_every_client(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    edited(private_job(tmp_path), ("fraction = 1.0", "clients = 1\npoisson = true"))
    job = load_federated_job(tmp_path / "fed.toml")
    server, notes = Server(job.algorithm(3), torch.zeros(4), {}, 3), list[str]()
    data = client_data(job)
    store = RoundStore(job, tmp_path / "run", server, identity(job, data, 4), resume=False)
    store.begin(notes.append)
    measure = RoundMeasure(seconds=1.0, opened_at_s=0.0, sent_bytes=0, received_bytes=0, trips=0, value_bytes=0)
    for missing in ((), (2,)):
        record = RoundRecord(round=0, attempt=0, trained={}, missing=missing)
        store.write(store.closed(record, measure), round_rules(job, 3, 0))
    found = written_guarantee(tmp_path / "run")
    assert found == guarantee(NOISE_4, 4, 1, 1 / 3, 1)
    assert notes[-1] == f"round 1: 1 clients are missing. privacy: {found}"
    assert found.epsilon > guarantee(NOISE_4, 4, 1, 1 / 3).epsilon
