"""Sites as processes of their own: some are lost and come back, some send what is wrong, every round commits."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.api.make_plan import plan_for
from isthmus.data.dataset import ColumnSpec
from isthmus.federated.algorithms import ClientUpdate
from isthmus.federated.client_trainer import TrainingTask
from isthmus.federated.evaluation import RoundHistory, RoundLine
from isthmus.federated.job import build, load_federated_job
from isthmus.federated.resident import Resident
from isthmus.federated.server import Server
from isthmus.federated.site import OwnData, Site
from isthmus.federated.task_spec import load_site
from isthmus.protocol.federated_messages import ClientTask, PhaseId, PhaseSetup
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.federated.site_runner import SiteRunner
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.forked import Forked
from isthmus.runtime.service.agent import Agent, membership_in
from isthmus.runtime.transport.tcp import WAITS_S
from tests.federated.sites import attend, free_port, listens, model, samples, write_job, write_tickets
from tests.fleet_service.parties import Fleet, in_background, serving, soon
from tests.runtime.commands import Done, edited, isthmus, refused

NAMES = ("a", "b", "c", "d")

ALGORITHM = """
import time
from pathlib import Path
import torch
from isthmus.federated import ClientUpdate
from isthmus.federated.algorithms.fedavg import FedAvg

class Mine(FedAvg, frozen=True):
    "FedAvg, and a file for each time that it trained."
    def client(self, local, broadcast, state):
        Path(f"trained-{{time.monotonic_ns()}}").touch()
        time.sleep({sleep_s})
        update = super().client(local, broadcast, state)
        return {returns}
"""
RETURNS = {
    "a": "update",
    "b": 'ClientUpdate(values={"delta": update.values["delta"] * float("nan")})',
    "c": 'ClientUpdate(values={"delta": update.values["delta"][:3]})',
    "d": "held(update)",
}
HELD = """
def held(update):
    "The eighth round ends when the site that was lost is back."
    while len(list(Path().glob("trained-*"))) == 8 and not Path("../back").exists():
        time.sleep(0.05)
    return update
"""


def lines(run: Path) -> list[RoundLine]:
    return RoundHistory(run / "rounds.jsonl").lines()


def by_site(line: RoundLine) -> dict[str, list[int]]:
    return {name: [t.client for t in timed] for name, timed in line.record.trained.items()}


def recomputed(job_file: Path, history: Sequence[RoundLine], population: int) -> torch.Tensor:
    """The model that comes of the updates which the history names, and of no others."""
    job = load_federated_job(job_file)
    algorithm = job.algorithm(population)
    resident = Resident(build(job))
    server = Server(algorithm, resident.vector(), resident.buffers(), population)
    work = TrainingTask(algorithm=algorithm, local=job.local, seed=job.training.seed)
    broadcast = []
    for line in history:
        now = line.record.round
        late = dict(line.record.stale)
        asked = {c for clients in by_site(line).values() for c in clients}
        asked |= {r.client for r in line.record.refused} | set(line.record.missing)
        if job.federated.participation.staleness:
            asked = set(range(population))  # room is kept for those that are late
        total = sum(len(samples(c)["labels"]) for c in asked)
        total = len(asked) * (job.federated.aggregation.most_samples or 0) or total
        opening = PhaseSetup(phase=PhaseId(now), clients=len(asked), samples=total)
        broadcast.append(server.broadcast())
        server.open(opening)
        for client in (c for clients in by_site(line).values() for c in clients):
            site = Site(work, build(job), OwnData(Listed(client)), None)
            made_for = now - late.get(client, 0)
            site.open(PhaseSetup(phase=PhaseId(made_for), clients=1, samples=1), broadcast[made_for])
            site.train([ClientTask(client, len(samples(client)["labels"]))])
            assert site.update is not None
            share = 1 / math.sqrt(1 + late.get(client, 0))
            values = {name: value * share for name, value in site.update.values.items()}
            server.partial.fold(client, ClientUpdate(values=values), len(samples(client)["labels"]))
        server.absorb()
    return server.values["model"]


class Listed:
    """A client's samples as a data set."""

    fingerprint = "listed"

    def __init__(self, client: int) -> None:
        self._samples = {name: torch.from_numpy(column) for name, column in samples(client).items()}
        self.columns = {
            name: ColumnSpec(shape=tuple(column.shape[1:]), dtype=str(column.dtype).removeprefix("torch."))
            for name, column in self._samples.items()
        }

    def __len__(self) -> int:
        return len(self._samples["labels"])

    def batch(self, indices: np.ndarray, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._samples[name] for name in columns}


@pytest.mark.forks
@pytest.mark.long
def test_every_round_commits_and_the_history_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, run = 10, tmp_path / "run"
    monkeypatch.delitem(sys.modules, "mine_algorithm", raising=False)
    job_file = write_job(tmp_path, NAMES, "mine_algorithm:Mine", rounds)
    for name, returns in RETURNS.items():
        home = tmp_path / f"at-{name}"
        home.mkdir()
        slow = ALGORITHM.format(sleep_s=0.3 if name == "d" else 0.03, returns=returns)
        (home / "mine_algorithm.py").write_text(slow + HELD)
    port = free_port()
    write_tickets(tmp_path, NAMES, port)
    # All are forked before this process has threads; the second `a` waits until it is told.
    with (
        Forked({name: attend(tmp_path, name) for name in NAMES}, tmp_path / "logs") as sites,
        Forked({"a": attend(tmp_path, "a", joined=True)}, tmp_path / "again") as again,
    ):
        # Not beside the sites' files, where sites would look for it first.
        (home := tmp_path / "at-coordinator").mkdir()
        (home / "mine_algorithm.py").write_text(ALGORITHM.format(sleep_s=0, returns="update"))
        monkeypatch.chdir(home)
        monkeypatch.syspath_prepend(str(home))
        said: list[str] = []
        fleet = Fleet(tmp_path / "fleet", port=port)
        site_run = SiteRun(load_federated_job(job_file), run, resume=False)
        running = threading.Thread(target=lambda: site_run.run(fleet.service, said.append), daemon=True)
        running.start()
        sites.begin("")
        soon(lambda: len(list((tmp_path / "at-a").glob("trained-*"))) == 3, 60)
        os.kill(sites.pids()["a"], signal.SIGKILL)
        soon(lambda: len(lines(run)) == 4, 30)
        again.begin("")
        soon(lambda: sum(line.startswith("site a takes part") for line in said) == 2, 60)
        (tmp_path / "back").touch()
        running.join(60)
        assert not running.is_alive(), said
        for pid in [*sites.pids().values(), *again.pids().values()]:
            os.kill(pid, signal.SIGKILL)
    fleet.service.close()
    history = lines(run)
    assert [line.record.round for line in history] == list(range(rounds))
    assert all(line.rules == "all of 4, at least 1, deadline 600 s" for line in history)
    with_a = [line.record.round for line in history if "a" in by_site(line)]
    assert with_a[:2] == [0, 1] and with_a == [0, 1, *range(with_a[2], rounds)] and with_a[2] >= 4, with_a
    assert history[2].record.missing == (0,)
    for line in history:
        assert by_site(line) == ({"a": [0]} if line.record.round in with_a else {}) | {"d": [3]}
        assert [r.client for r in sorted(line.record.refused, key=lambda r: r.client)] == [1, 2]
        assert line.record.round == 2 or not line.record.missing
        assert line.trips == len(by_site(line)) + 2
        numbers = 6 * 5 + 5 + 5 * 3 + 3
        assert line.value_bytes == 4 * (numbers * (len(by_site(line)) + 1) + 3)
    assert sum("site b: its update of round 1 is refused: value 'delta': not all numbers" in s for s in said) == 1
    assert sum("site c: its update of round 1 is refused: value 'delta': got float32 [3]" in s for s in said) == 1
    assert torch.equal(model(run), recomputed(job_file, history, len(NAMES)))


@pytest.mark.forks
def test_a_killed_coordinator_goes_on_and_gives_the_bits_of_a_simulation(tmp_path: Path) -> None:
    names, run = ("a", "b"), tmp_path / "run"
    job_file = edited(
        write_job(tmp_path, names, "scaffold", rounds=6),
        ("[training]\nepochs = 2", "[training]\nepochs = 60"),
        ('wait = "0.5 s"', 'wait = "30 s"'),  # else whoever comes back first would go on alone
        ("[runtime]", "[federated.admission]\nmax_norm = 0.5\nclip = true\n[runtime]"),
    )
    port = free_port()
    state = write_tickets(tmp_path, names, port)

    def serve(*more: str) -> None:
        where = ["--run", run, "--state", state, "--port", str(port), "--tickets", "0"]
        result = isthmus("serve", job_file, *where, *more)
        (tmp_path / "serve.err").write_text(result.err)

    with (
        Forked({"first": lambda _: serve()}, tmp_path / "logs-1") as first,
        Forked({"second": lambda _: serve("--resume")}, tmp_path / "logs-2") as second,
        Forked({name: attend(tmp_path, name) for name in names}, tmp_path / "logs-3") as sites,
    ):
        first.begin("")
        soon(lambda: listens(port), 60)
        sites.begin("")
        soon(lambda: len(lines(run)) >= 2, 60)
        os.kill(first.pids()["first"], signal.SIGKILL)
        soon(lambda: "first" in first.ended(), 60)  # until then it holds the state folder
        committed = newest_round(run)
        second.begin("")
        soon(lambda: (tmp_path / "serve.err").exists(), 60)
        for pid in sites.pids().values():
            os.kill(pid, signal.SIGKILL)
    broadcast = (tmp_path / "serve.err").read_text()
    assert f"after {committed + 1} rounds" in broadcast, broadcast
    assert [line.record.round for line in lines(run)] == list(range(6))
    alone = isthmus("train", job_file, "--scheme", "sp", "--run", tmp_path / "alone")
    assert alone.code == 0, alone.err
    assert torch.equal(model(run), model(tmp_path / "alone"))


def served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, participation: str, sleeps: Mapping[str, float], rounds: int
) -> tuple[Path, list[str]]:
    """A run to its end over sites that sleep so long in every round; its job, and what was said."""
    monkeypatch.delitem(sys.modules, "mine_algorithm", raising=False)
    job_file = edited(
        write_job(folder, tuple(sleeps), "mine_algorithm:Mine", rounds),
        ("[runtime]", f"[federated.participation]\nfraction = 1.0\n{participation}\n\n[runtime]"),
    )
    for name, sleep_s in sleeps.items():
        home = folder / f"at-{name}"
        home.mkdir()
        (home / "mine_algorithm.py").write_text(ALGORITHM.format(sleep_s=sleep_s, returns="update"))
    port = free_port()
    write_tickets(folder, tuple(sleeps), port)
    with Forked({name: attend(folder, name) for name in sleeps}, folder / "logs") as sites:
        (folder / "mine_algorithm.py").write_text(ALGORITHM.format(sleep_s=0, returns="update"))
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        said: list[str] = []
        fleet = Fleet(folder / "fleet", port=port)
        site_run = SiteRun(load_federated_job(job_file), folder / "run", resume=False)
        running = threading.Thread(target=lambda: site_run.run(fleet.service, said.append), daemon=True)
        running.start()
        sites.begin("")
        running.join(60)
        assert not running.is_alive(), said
        for pid in sites.pids().values():
            os.kill(pid, signal.SIGKILL)
    fleet.service.close()
    return job_file, said


@pytest.mark.forks
def test_late_updates_count_once_and_for_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, run = 8, tmp_path / "run"
    job_file, _ = served(tmp_path, monkeypatch, "quorum = 0.5\nstaleness = 4", {"a": 0.05, "b": 0.12}, rounds)
    history = lines(run)
    assert len(history) == rounds and history[0].rules.endswith("late ones count for 4 rounds")
    late = [by for line in history for _, by in line.record.stale]
    assert late and all(1 <= by <= 4 for by in late), late
    made_for = [
        (client, line.record.round - dict(line.record.stale).get(client, 0))
        for line in history
        for clients in by_site(line).values()
        for client in clients
    ]
    assert len(set(made_for)) == len(made_for), "no update counts twice"
    assert torch.equal(model(run), recomputed(job_file, history, 2))


@pytest.mark.forks
def test_a_site_that_is_too_late_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the history, as on a busy machine the site that sleeps longer need not be the one that is late."""
    _, said = served(tmp_path, monkeypatch, "quorum = 0.5", {"a": 0.01, "b": 0.5}, rounds=2)
    first = lines(tmp_path / "run")[0].record
    (in_time,) = first.trained
    (late,) = {"a", "b"} - {in_time}
    ended = "round 1 ended without its update, which is ignored if it comes"
    assert f"site {late}: {ended}; rounds do not wait for this site until it is in time again" in said


@pytest.mark.forks
@pytest.mark.long
def test_a_function_of_the_coordinators_chooses_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the samples that they said, all but the smallest in odd rounds."""
    select = 'select = "tests.federated.test_selection:largest"'
    served(tmp_path, monkeypatch, select, dict.fromkeys(("a", "b", "c"), 0.01), rounds=2)
    assert [set(by_site(line)) for line in lines(tmp_path / "run")] == [{"a", "b", "c"}, {"b", "c"}]


def newest_round(run: Path) -> int:
    return int(sorted((run / "rounds").glob("round-*"))[-1].stem.removeprefix("round-"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [("[federated.deployment]", "[federated.deploymnt]")],
            ["unknown key 'federated.deploymnt': did you mean"],
        ),
        ([('"a", "b"', '"a", "a"')], ["federated.deployment.sites: got a name twice"]),
        ([('wait = "0.5 s"', "start = 3")], ["federated.deployment.start: got 3, expected at most the 2 sites"]),
        (
            [("[runtime]", "[federated.participation]\nclients = 3\n[runtime]")],
            ["federated.participation.clients: got 3"],
        ),
        (
            [("[runtime]", "[federated.participation]\nfraction = 1.0\nminimum = 3\n[runtime]")],
            ["federated.participation.minimum: got 3, expected at most the 2 sites"],
        ),
        ([("[runtime]", "[federated.admission]\nclip = true\n[runtime]")], ["federated.admission.max_norm: missing"]),
    ],
)
def test_a_deployment_that_cannot_begin_is_refused(
    changes: list[tuple[str, str]], words: list[str], tmp_path: Path
) -> None:
    job_file = edited(write_job(tmp_path, ("a", "b")), *changes)
    refused(isthmus("serve", job_file, "--state", tmp_path / "fleet", "--port", "0"), 2, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([('name = "fedavg"', 'name = "fedavgg"')], ["a.toml", "unknown algorithm 'fedavgg'"]),
        ([("[algorithm]", "[algorithms]")], ["a.toml", "unknown key 'algorithms'"]),
        ([("/a.npz", "/none.npz")], ["no file", "none.npz"]),
    ],
)
def test_a_site_that_cannot_begin_is_refused(
    changes: list[tuple[str, str]], words: list[str], tmp_path: Path, fleet: Fleet
) -> None:
    write_job(tmp_path, ("a",))
    config = edited(tmp_path / "a.toml", *changes)
    refused(joined(tmp_path, config, fleet), 2, *words)


@contextlib.contextmanager
def attending(folder: Path) -> Iterator[None]:
    """The site in a thread of this process; it has joined before."""
    home = folder / "a-state"
    membership = membership_in(home)
    assert membership is not None
    said: list[object] = []
    run_starter = SiteRunner(load_site(folder / "a.toml"), "a", home, log=said.append, fail=said.append, plan=plan_for)
    agent = Agent(
        home, membership, ProcessPlace(), timeout_s=5.0, log=said.append, run_starter=run_starter, waits_s=WAITS_S
    )
    with in_background(agent.run, agent.stop):
        yield


def joined(folder: Path, config: Path, fleet: Fleet) -> Done:
    ticket = folder / "ticket"
    ticket.touch(0o600)
    ticket.write_text(fleet.state.ticket())
    return isthmus(
        "join",
        "--site",
        config,
        "--name",
        "a",
        "--state",
        folder / "a-state",
        "--ticket-file",
        ticket,
        "--timeout",
        "5 s",
    )


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with serving(tmp_path / "fleet") as made:
        yield made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('name = "fedavg"', 'name = "fedprox"'), "algorithm: this site allows fedprox, the coordinator asks"),
        (('job = "clinics"', 'job = "other"'), "job: this site allows other, the coordinator asks for clinics"),
        (("width = 5", "width = 6"), "model: this site allows mlp"),
    ],
)
def test_a_site_does_not_run_what_its_owner_does_not_name(
    change: tuple[str, str], words: str, tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.session.session.FIRST_S", 0.1)
    job = load_federated_job(write_job(tmp_path, ("a",), rounds=1))
    run = SiteRun(job, tmp_path / "run", resume=False)
    said: list[str] = []
    finished: list[object] = []
    running = threading.Thread(target=lambda: finished.append(run.run(fleet.service, said.append)), daemon=True)
    running.start()
    refused(joined(tmp_path, edited(tmp_path / "a.toml", change), fleet), 2, words)
    soon(lambda: any("site a was lost" in line and words in line for line in said))
    wait = "(0 of 1 sites are here; the round begins with 1; a left: "
    soon(lambda: any(s.startswith("waiting for sites that left: a for") and wait in s and words in s for s in said))
    edited(tmp_path / "a.toml", (change[1], change[0]))
    with attending(tmp_path):
        running.join(60)
    assert len(finished) == 1 and len(lines(tmp_path / "run")) == 1, said
    assert "site a is back" in said
