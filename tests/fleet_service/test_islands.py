"""`torchrun -m isthmus join`: several processes are one device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from isthmus.errors import UserError
from isthmus.job import prepare
from isthmus.runtime.device.island_ranks import island_here
from tests.runtime.jobs import DIGITS, final_weights, job_of, plain_run
from tests.sync.torchrun import start_torchrun

from .parties import Fleet
from .test_fleet_runs import Devices, _train  # pyright: ignore[reportPrivateUsage]


def test_an_environment_that_is_torchruns_only_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert island_here(tmp_path) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE is set without 'RANK'"):
        island_here(tmp_path)


@pytest.mark.skipif(not os.environ.get("ISTHMUS_FAULTS"), reason="takes long: make test-faults runs it")
def test_an_island_trains_with_another_device_as_the_plain_loop_does(fleet: Fleet, tmp_path: Path) -> None:
    devices = Devices(fleet, tmp_path, ("d0",))
    ticket = tmp_path / "ticket"
    ticket.touch(0o600)
    ticket.write_text(fleet.state.ticket())
    script = tmp_path / "join.py"
    script.write_text("from isthmus.cli import main\nmain()\n")
    options = ("--name", "d1", "--ticket-file", str(ticket), "--state", str(tmp_path / "island"))
    with start_torchrun(2, script, "join", *options):
        outcome, losses = _train(fleet, tmp_path / "run")
    devices.stop()
    assert outcome.outcome == "done", outcome.reason
    job = job_of("mlp", {}, DIGITS)
    module, expected = plain_run(job, prepare(job))
    assert losses == pytest.approx(expected, rel=1e-6)
    saved = final_weights(tmp_path / "run")
    for name, value in module.named_parameters():
        assert torch.allclose(saved[name], value, rtol=1e-4, atol=1e-6), name
