"""Jobs in the spelling of the version before: files, overrides, stored runs and queued jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus import old_spelling
from isthmus.api.status import progressed
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob, load_federated_job
from isthmus.old_spelling import MOVED, new_key, respelled
from isthmus.report.settings_reference import described
from isthmus.run_files import parse_job, read_job
from isthmus.runtime.service.job_queue import JobQueue
from tests.federated.test_federated_runs import model, write
from tests.runtime.commands import isthmus, refused

OLD = """
name = "small"
run_dir = "{folder}"

[model]
name = "mlp"
options = {{ features = 64, width = 8, layers = 1, classes = 10 }}

[data]
kind = "digits"
options = {{ flat = true, holdout = 0.5 }}

[partition]
scheme = "dirichlet"
clients = 12
alpha = 0.3

[federated]
algorithm = "scaffold"
rounds = 4
evaluate_every = 2
evaluate_clients = 3

[local]
epochs = 1
batch_size = 16
learning_rate = 0.05

[participation]
clients = 6

[execution]
executors = 2
engine = "processes"
"""
"""As `tests/federated/test_federated_runs.py` has it in the new spelling."""


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(old_spelling, "_said", set[str]())
    path = tmp_path / "old.toml"
    path.write_text(OLD.format(folder=tmp_path / "runs"))
    return path


def spelled_as_before(job: FederatedJob) -> dict[str, Any]:
    """The document that the version before kept of this job."""
    document: dict[str, Any] = msgspec.to_builtins(job)
    for before, now in sorted(MOVED.items(), key=lambda keys: "." not in keys[1]):
        found, name = _table(document, now), now.rpartition(".")[2]
        if name in found:
            value, table, key = found.pop(name), _table(document, before), before.rpartition(".")[2]
            table[key] = {**value, **table.get(key, {})} if isinstance(value, dict) else value
    return document


def _table(document: dict[str, Any], key: str) -> dict[str, Any]:
    for table in key.split(".")[:-1]:
        document = document.setdefault(table, {})
    return document


def test_a_file_and_overrides_give_the_same_job(old: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    now = load_federated_job(write(tmp_path), {"runtime.threads": 2, "learning_rate": 0.05})
    assert load_federated_job(old, {"execution.threads": 2}) == now
    (line,) = capfd.readouterr().err.splitlines()
    for key in ("execution.engine", "execution.threads", "local.epochs", "federated.evaluate_every"):
        assert f"{key} is now {new_key(key)}" in line
    assert load_federated_job(old, {"execution.threads": 2}) == now
    assert capfd.readouterr().err == ""  # once


def test_a_key_in_both_spellings_is_refused(old: Path) -> None:
    old.write_text(old.read_text() + "[runtime]\nexecutors = 2\n")
    words = "runtime.executors: got it in its old spelling execution.executors too"
    with pytest.raises(UserError, match=f"^{re.escape(f'{old}: {words}')}"):
        load_federated_job(old)
    refused(isthmus("train", old), 2, f"{old}: {words}")


def test_an_old_table_is_described_by_its_new_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert described("execution.ray") == described("runtime.ray")
    assert "execution.ray is now runtime.ray" in capfd.readouterr().err


def test_what_the_version_before_wrote_is_read(tmp_path: Path) -> None:
    job = load_federated_job(write(tmp_path))
    before = spelled_as_before(job)
    assert {"execution", "local"} <= before.keys() and respelled(before, "job.json") == msgspec.to_builtins(job)
    text = json.dumps(before).encode()
    (tmp_path / "job.json").write_bytes(text)
    assert read_job(tmp_path, FederatedJob) == job == parse_job(text, FederatedJob, "job")
    queue = JobQueue(tmp_path)
    queue.submit("small", "federated", text, tmp_path)
    (queued,) = queue.jobs()
    assert (progressed(queued).unit, progressed(queued).of) == ("rounds", 4)


def test_a_run_of_the_version_before_is_resumed(old: Path, tmp_path: Path) -> None:
    """Its file and its folder are in the old spelling; nothing of the job is taken for changed."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert isthmus("train", write(tmp_path), "--run", whole, "--set", "learning_rate=0.05").code == 0
    assert isthmus("train", old, "--run", run, "--rounds", "2").code == 0
    kept = read_job(run, FederatedJob)
    (run / "job.json").write_text(json.dumps(spelled_as_before(kept)))
    resumed = isthmus("train", old, "--run", run, "--resume")
    assert resumed.code == 0, resumed.err
    changed = [line for line in resumed.err.splitlines() if "another job" in line]
    assert all("federated.rounds" in line for line in changed), changed
    assert model(run) == model(whole)
