"""A call in plain Python prints what the command prints, on standard error, unless it is asked to be quiet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import isthmus
from isthmus.api.notebook import default_observer
from isthmus.api.observer import Silent
from isthmus.errors import UserError

DATA = {"input": torch.zeros(16, 4), "target": torch.zeros(16, 1)}


def train(folder: Path, **given: object) -> isthmus.Run:
    loss = nn.functional.mse_loss
    return isthmus.train(model=nn.Linear(4, 1), loss=loss, data=DATA, steps=2, run=folder / "run", **given)  # type: ignore[arg-type]


def federate(folder: Path, **given: object) -> isthmus.Run:
    alone: dict[str, object] = {"runtime.executors": 1}
    given |= {"model": nn.Linear(4, 1), "loss": nn.functional.mse_loss, "clients": [DATA, DATA], "rounds": 2}
    return isthmus.federate(run=folder / "run", overrides=alone, **given)  # type: ignore[arg-type]


def test_a_run_prints_its_plan_its_steps_and_its_folder_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(text in printed.err for text in ("Plan for", "step 2/2, loss", f"run folder: {tmp_path / 'run'}"))


def test_a_federated_run_prints_its_rounds_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federate(tmp_path)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(text in printed.err for text in ("round 2/2", f"run folder: {tmp_path / 'run'}"))


def test_a_quiet_run_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    assert train(tmp_path / "one", quiet=True).outcome == "done"
    assert federate(tmp_path / "two", quiet=True).outcome == "done"
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_quiet_is_true_or_false() -> None:
    assert isinstance(default_observer(quiet=True), Silent)
    with pytest.raises(UserError, match="quiet: got 'no', expected true or false"):
        default_observer(quiet="no")


def test_a_batch_that_is_larger_than_the_data_is_refused_and_the_default_is_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^batch: got 17, expected at most 16: `data` have no more training samples$"):
        train(tmp_path, batch=17)
    larger = {"training.batch_size": 32}
    with pytest.raises(UserError, match=r"^training.batch_size: got 32, expected at most 16: the data have no more"):
        train(tmp_path, overrides=larger, quiet=True)
    job = train(tmp_path / "whole", quiet=True).job
    assert isinstance(job, isthmus.Job) and job.training.batch_size == 16
