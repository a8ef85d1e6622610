"""One result, one record: a run of rounds has what a run of steps has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import isthmus
from isthmus.api.run_entries import run_entries, run_state
from isthmus.errors import UserError
from tests.federated.sites import write_job

LOSS = nn.functional.mse_loss
ALONE = {"runtime.executors": 1}


def trained(folder: Path, rounds: int = 2, **more: object) -> isthmus.Run:
    torch.manual_seed(0)
    clients = [{"input": torch.randn(8, 4), "target": torch.zeros(8, 1)} for _ in range(3)]
    given: dict[str, object] = {"model": nn.Linear(4, 1), "loss": LOSS, "clients": clients, "test": clients[0], **more}
    given.setdefault("overrides", ALONE)
    return isthmus.federate(rounds=rounds, run=folder, quiet=True, **given)  # type: ignore[arg-type]


def test_rounds_are_entries_losses_a_trace_and_a_model(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    kinds = [entry.kind for entry in run_entries(run.path)]
    assert kinds == ["began", "step", "heldout", "step", "heldout", "ended"]
    assert [point.step for point in run.heldout] == [1, 2] and not run.losses
    assert run.figure("clients") == [(1, 3.0), (2, 3.0)] and run.evaluation is not None
    assert run.evaluation.loss == run.heldout[-1].loss
    assert {span.step for span in run.trace.spans} == {1, 2} and set(run.pictures) >= {"metrics", "round"}
    module = nn.Linear(4, 1)
    assert run.load(module) == 2
    assert isinstance(run.model, nn.Linear) and torch.equal(run.model.weight, module.weight)
    with pytest.raises(UserError, match="unknown figure"):
        run.figure("client")


def test_objects_with_secure_sums_give_the_bits_of_sums_in_the_open(tmp_path: Path) -> None:
    """Of simulated clients that count alike."""
    secure = {"federated.aggregation.secure": True, "federated.aggregation.most_samples": 8}
    rules = {**ALONE, "federated.participation.minimum": 2}
    runs = [trained(tmp_path / name, overrides=rules | more) for name, more in (("open", {}), ("secure", secure))]
    plain, hidden = (run.model for run in runs)
    assert isinstance(plain, nn.Linear) and isinstance(hidden, nn.Linear)
    assert torch.equal(plain.weight, hidden.weight) and runs[1].figure("clients") == [(1, 3.0), (2, 3.0)]


def test_a_run_of_rounds_is_resumed(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    assert run.outcome == "done" and run_state(run_entries(run.path)).done == 2
    assert run.resume(steps=3).outcome == "done"
    assert len(run.rounds) == 3
    assert [entry.step for entry in run_entries(run.path) if entry.kind == "step"] == [1, 2, 3]


def test_a_federated_job_is_trained_by_train_and_takes_no_plan(tmp_path: Path) -> None:
    job = trained(tmp_path / "run").job
    again = isthmus.train(job, run=tmp_path / "again", quiet=True)
    assert [line.evaluation for line in again.rounds] == [
        line.evaluation for line in isthmus.Run(tmp_path / "run").rounds
    ]
    with pytest.raises(UserError, match=r"^plan: got .*plan.json in a federated job, expected none"):
        isthmus.train(job, run=tmp_path / "planned", plan=tmp_path / "plan.json", quiet=True)
    assert not (tmp_path / "planned" / "job.json").exists()


def test_a_job_with_sites_that_is_trained_here_says_that_its_clients_are_simulated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = isthmus.train(write_job(tmp_path, ("a", "b"), rounds=1), overrides=ALONE, run=tmp_path / "run")
    assert run.outcome == "done" and "sites take no part: their clients are simulated here" in capfd.readouterr().err
    assert {timed.client for timed in run.rounds[0].record.trained["executor-0"]} == {0, 1}


def test_the_record_of_a_run_that_fails_says_why(tmp_path: Path) -> None:
    class Failing(isthmus.Callback):
        def step(self, done: isthmus.StepDone) -> None:
            raise ValueError("no more")

    with pytest.raises(UserError, match="no more"):
        trained(tmp_path / "run", callbacks=[Failing()])
    note, ended = run_entries(tmp_path / "run")[-2:]
    assert (ended.kind, ended.text) == ("ended", "failed") and "no more" in note.text
