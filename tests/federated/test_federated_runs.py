"""Real processes: every scheme, kills, resumes, and the command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from isthmus.api.training import federated_job_of
from isthmus.federated.evaluation import RoundHistory
from isthmus.federated.job import ALL
from isthmus.federated.server import STATES
from isthmus.federated.states import PAGE_BYTES
from isthmus.overrides import read_overrides
from tests.runtime.commands import Done, edited, isthmus, refused, start, wait_until
from tests.tiers import represented_by

JOB = """
name = "small"
run_dir = "{folder}"

[model]
name = "mlp"
options = {{ features = 64, width = 8, layers = 1, classes = 10 }}

[data]
kind = "digits"
options = {{ flat = true, holdout = 0.5 }}

[federated.partition]
scheme = "dirichlet"
clients = 12
alpha = 0.3

[federated]
algorithm = "scaffold"
rounds = 4

[training]
epochs = 1
batch_size = 16
eval_every = 2
eval_clients = 3

[federated.participation]
clients = 6

[runtime]
executors = 2
"""


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    path = folder / "fed.toml"
    path.write_text(JOB.format(folder=folder / "runs"))
    return edited(path, *changes)


def slowed(eta: int) -> tuple[str, str]:
    """Rounds long enough to be caught in the middle."""
    return "executors = 2", f"executors = 2\nslow_down = [{eta}, {eta}]"


def model(run: Path) -> bytes:
    """The server's values after the last round."""
    values = load_file(sorted((run / "rounds").glob("round-*"))[-1])
    return b"".join(values[name].numpy().tobytes() for name in sorted(values) if name != STATES)


def done(result: Done) -> None:
    assert result.code == 0, result.err


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("reference")
    done(isthmus("train", write(folder), "--scheme", "sp", "--run", folder / "run"))
    return model(folder / "run")


@pytest.mark.parametrize("scheme", represented_by(["ours", "parrot", "fa", "sd", "rw"], "ours", "fa"))
def test_every_scheme_gives_the_same_bits(scheme: str, reference: bytes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = isthmus("train", write(tmp_path), "--scheme", scheme, "--run", run, draws=scheme == "ours")
    done(result)
    assert model(run) == reference
    lines = RoundHistory(run / "rounds.jsonl").lines()
    assert [line.record.round for line in lines] == [0, 1, 2, 3]
    assert all(line.clients == 6 for line in lines)
    assert lines[-1].evaluation is not None
    assert (run / "metrics.png").is_file()
    assert (run / "round.png").is_file()
    expected = {"ours": 2, "parrot": 2, "fa": 2, "sd": 6, "rw": 12}[scheme]
    assert len(list((run / "logs").iterdir())) == expected


def test_killed_in_mid_round_and_resumed_gives_the_same_bits(reference: bytes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("train", write(tmp_path, slowed(40)), "--run", run)
    wait_until(lambda: len(RoundHistory(run / "rounds.jsonl").lines()) >= 1 and written(run) > 6, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done(isthmus("train", write(tmp_path), "--run", run, "--resume"))
    assert model(run) == reference
    assert [line.record.round for line in RoundHistory(run / "rounds.jsonl").lines()] == [0, 1, 2, 3]


def written(run: Path) -> int:
    """States so far, as long as none is written over."""
    return sum(path.stat().st_size // PAGE_BYTES for path in (run / "states").rglob("*.states"))


def test_a_killed_executor_costs_nothing_but_time(reference: bytes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        "train", write(tmp_path, ("executors = 2", "executors = 2\nslow_down = [80.0, 80.0]")), "--run", run
    )
    wait_until(lambda: written(run), process)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "was lost: its process was killed by SIGKILL" in err
    assert model(run) == reference


def test_every_executor_killed_ends_the_run_with_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        "train", write(tmp_path, ("executors = 2", "executors = 2\nslow_down = [99.0, 99.0]")), "--run", run
    )
    wait_until(lambda: written(run), process)
    for pid in children(process.pid):
        os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    refused(Done(process.returncode, out, err), 4, "was lost", "SIGKILL", "; to go on: isthmus train ")
    assert err.count("was lost") == 2, "once for each"


def test_the_run_goes_on_when_nobody_reads_what_it_says(reference: bytes, tmp_path: Path) -> None:
    process = start("train", write(tmp_path), "--run", tmp_path / "run")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.wait(60)
    assert model(tmp_path / "run") == reference


@pytest.mark.long
def test_interrupted_and_resumed(reference: bytes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        "train", write(tmp_path, ("executors = 2", "executors = 2\nslow_down = [40.0, 40.0]")), "--run", run
    )
    wait_until(lambda: RoundHistory(run / "rounds.jsonl").lines(), process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "to go on: isthmus train" in err
    done(isthmus("train", write(tmp_path), "--run", run, "--resume"))
    assert model(run) == reference


def children(pid: int) -> list[int]:
    """The first that was started comes first: numbers of processes begin again."""
    found: list[tuple[int, int]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := entry / "stat").exists():
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append((int(fields[19]), int(entry.name)))
    return [child for _, child in sorted(found)]


BAD = """
from collections.abc import Mapping
import torch
from isthmus.federated import Algorithm, Combine, ClientUpdate, Values

class Undeclared(Algorithm, frozen=True):
    "Returns what it does not declare."
    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "mean"}
    def client(self, local, broadcast, state):
        return ClientUpdate(values={"delta": broadcast["model"] * 0, "extra": broadcast["model"]})
    def server(self, server, combined, cohort):
        return dict(server)

class BadState(Undeclared, frozen=True):
    def init_client(self, model):
        return {"steps": model[:1]}
    def client(self, local, broadcast, state):
        return ClientUpdate(values={"delta": broadcast["model"] * 0}, state={"steps": 3})

class Unknown(Undeclared, frozen=True):
    @property
    def returns(self):
        return {"delta": "median"}

class Explodes(Undeclared, frozen=True):
    def client(self, local, broadcast, state):
        bad = local.samples % 2 == 0
        return ClientUpdate(values={"delta": torch.full_like(broadcast["model"], float("nan") if bad else 0.0)})
"""


COLLECTING = """
from isthmus.federated import Algorithm, ClientUpdate

class Collecting(Algorithm, frozen=True):
    "FedAvg's sums, and ten numbers of every client."
    @property
    def returns(self):
        return {"delta": "weighted_mean", "norms": "collect"}
    def client(self, local, broadcast, state):
        y = local.start(broadcast["model"])
        return ClientUpdate(values={"delta": y.sub_(broadcast["model"]), "norms": broadcast["model"][:10]})
    def server(self, server, combined, cohort):
        assert combined["norms"].shape == (6, 10)
        return dict(server)
"""
NUMBERS = 64 * 8 + 8 + 8 * 10 + 10
"""In the model."""


@pytest.mark.parametrize(
    ("scheme", "trips", "executors"),
    represented_by(
        [("fa", 6, 2), ("sd", 6, 2), ("parrot", 2, 2), ("ours", 2, 2), ("ours", 1, 1), ("fa", 6, 1), ("sp", 0, 1)],
        ("fa", 6, 2),
        ("ours", 2, 2),
    ),
)
def test_bytes_and_trips_are_those_of_the_complexity_table(
    scheme: str, trips: int, executors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "collecting_algorithm.py").write_text(COLLECTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, collected in (("fedavg", 0), ("collecting_algorithm:Collecting", 40)):
        run = tmp_path / f"run-{collected}"
        job = write(tmp_path, ('"scaffold"', f'"{name}"'), ("executors = 2", f"executors = {executors}"))
        done(isthmus("train", job, "--scheme", scheme, "--run", run))
        for line in RoundHistory(run / "rounds.jsonl").lines():
            used = sum(1 for timed in line.record.trained.values() if timed) if trips else 0
            assert used <= trips
            assert line.trips == (used if scheme in ("ours", "parrot") else trips)
            assert line.value_bytes == (8 * NUMBERS * line.trips + collected * 6 if trips else 0)
            assert line.received_bytes >= line.value_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([('"scaffold"', '"scafold"')], ["unknown algorithm 'scafold'", "did you mean 'scaffold'"]),
        (
            [("clients = 6", "clients = 13")],
            ["federated.participation.clients: got 13, expected at most the 12 clients"],
        ),
        ([("clients = 12", "clients = 5000")], ["federated.partition.clients: got 5000"]),
        ([('"scaffold"', '"bad_algorithms:Undeclared"')], ["returned value 'extra' has no declared operation"]),
        ([('"scaffold"', '"bad_algorithms:BadState"')], ["state 'steps'", "got int, expected a tensor"]),
        ([('"scaffold"', '"bad_algorithms:Unknown"')], ["combines 'delta' by 'median'"]),
        ([("rounds = 4", "rounds = 4\noptions = { server_lr = 1 }")], ["server_lr", "did you mean"]),
        ([("executors = 2", 'scheme = "our"')], ["unknown scheme 'our'", "did you mean 'ours'"]),
        ([("executors = 2", "executors = 2\nslow_down = [1.0]")], ["runtime.slow_down: got 1, expected 2"]),
        (
            [("clients = 6", "clients = 6\nfraction = 0.5")],
            ["got both of clients and fraction, expected one of them: leave one out, or set one to null"],
        ),
        ([("features = 64", "features = 63")], ["'features'"]),
    ],
)
def test_bad_input_is_refused_in_one_line(
    changes: list[tuple[str, str]], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_algorithms.py").write_text(BAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    refused(isthmus("train", write(tmp_path, *changes), "--run", tmp_path / "run"), 2, *words)


def test_clients_or_their_share_take_the_place_of_the_other(tmp_path: Path) -> None:
    unset = read_overrides(["federated.participation.clients=null", "federated.participation.fraction=0.5"])
    job = federated_job_of(write(tmp_path), unset)
    assert (job.federated.participation.clients, job.federated.participation.fraction) == (None, 0.5)
    bare = job.altered(participation=ALL)
    counted = federated_job_of(bare, {"federated.participation.clients": 4}).federated.participation
    assert (counted.clients, counted.fraction) == (4, None), "nobody gave the default's share"
    shared = federated_job_of(bare, {"federated.participation.minimum": 2}).federated.participation
    assert (shared.clients, shared.fraction, shared.minimum) == (None, 1.0, 2)


def test_updates_that_are_not_finite_are_refused_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_algorithms.py").write_text(BAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    job = write(tmp_path, ('"scaffold"', '"bad_algorithms:Explodes"'))
    done(isthmus("train", job, "--run", tmp_path / "run"))
    lines = RoundHistory(tmp_path / "run" / "rounds.jsonl").lines()
    assert len(lines) == 4
    assert sum(len(line.record.refused) for line in lines) > 0
    assert all(len(line.record.refused) + line.clients == 6 for line in lines)
    assert "got nan" in next(r.reason for line in lines for r in line.record.refused)


def test_the_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done(isthmus("train", write(tmp_path), "--run", run, "--scheme", "sp", "--rounds", "1"))
    other = write(tmp_path, ("alpha = 0.3", "alpha = 0.4"))
    refused(isthmus("train", other, "--run", run, "--resume"), 2, "is of another job", "data was")


def test_the_folder_of_another_kind_of_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text('{"name": "a-pipeline"}')
    refused(isthmus("train", write(tmp_path), "--run", tmp_path / "run", "--resume"), 2, "expected a federated job")


def test_options_of_the_other_kind_of_job_are_refused(tmp_path: Path) -> None:
    refused(isthmus("train", write(tmp_path), "--fleet", "laptop"), 2, "--fleet", "federated job")
