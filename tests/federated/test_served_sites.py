"""A deployment that Python serves: with masks and without it has what a run of simulated clients has."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import isthmus
from isthmus.api.export import export_model
from isthmus.api.observer import Silent
from isthmus.models import build_model
from isthmus.runtime.processes.forked import Forked
from tests.federated.sites import attend, free_port, model, write_job, write_tickets
from tests.federated.test_pipeline_clients import FLEET
from tests.federated.test_secure_sites import SECURE
from tests.fleet_service.parties import in_background, outcomes
from tests.runtime.commands import edited

NAMES = ("a", "b", "c")


class Seen(isthmus.Callback):
    """Rounds, losses on held-out samples, what else was said, and how it ended."""

    def __init__(self) -> None:
        self.rounds, self.losses, self.faults = list[int](), list[float | None](), list[str]()

    def step(self, done: isthmus.StepDone) -> None:
        self.rounds.append(done.step)

    def evaluation(self, evaluated: isthmus.Evaluated) -> None:
        self.losses.append(evaluated.loss)

    def fault(self, fault: isthmus.RunFault) -> None:
        self.faults.append(str(fault))

    def end(self, ended: isthmus.RunEnded) -> None:
        self.ended = ended


@pytest.mark.forks
@pytest.mark.long
@pytest.mark.parametrize("kind", ["secure", "open", "a fleet"])
def test_served_sites_have_what_simulated_clients_have(kind: str, tmp_path: Path) -> None:
    """The changes of site b are never finite; of `a fleet` sites b and c are pipelines over three devices. They
    and site a compute on accelerators."""
    tables = SECURE if kind == "secure" else "[runtime]"
    job_file = edited(write_job(tmp_path, NAMES, rounds=9), ("[runtime]", tables))
    for name, row in (("b", 2), ("all", 7)):  # the third of b's samples
        columns = dict(np.load(tmp_path / f"{name}.npz"))
        columns["pixel_values"][row] = np.inf
        np.savez(tmp_path / f"{name}.npz", **columns)
    edited(tmp_path / "a.toml", ('job = "clinics"', 'job = "clinics"\ndevice = "checked:0"'))
    if kind == "a fleet":
        (tmp_path / "three.toml").write_text(FLEET)
        for name in ("b", "c"):
            with (tmp_path / f"{name}.toml").open("a") as file:
                file.write(f'\n[pipeline]\nfleet = "{tmp_path}/three.toml"\nplanner = "even"\ndevice = "checked:0"\n')
    port, seen = free_port(), Seen()
    write_tickets(tmp_path, NAMES, port)
    overrides = {
        "training.precision": "bf16",
        "training.micro_batches": 2,
        "training.eval_every": 1,
        "data.heldout": str(tmp_path / "a.npz"),
        "store.url": (tmp_path / "bucket").as_uri(),
    }
    with Forked({name: attend(tmp_path, name) for name in NAMES}, tmp_path / "logs") as sites:
        found = list[isthmus.Run | Exception | None]()

        def serve() -> None:
            found.extend(
                outcomes(
                    lambda: isthmus.serve(
                        job_file,
                        port=port,
                        state=tmp_path / "fleet",
                        run=tmp_path / "run",
                        overrides=overrides,
                        callbacks=[seen, isthmus.EarlyStopping("accuracy", after=2, least=9.0)],
                        track="csv",
                        metrics=["accuracy"],
                        observer=Silent(),
                    )
                )
            )

        with in_background(serve, lambda: None):
            sites.begin("")
        for pid in sites.pids().values():
            os.kill(pid, signal.SIGKILL)
    (run,) = found
    assert isinstance(run, isthmus.Run), run
    assert run.outcome == seen.ended.outcome == "stopped" and run.reason.startswith("EarlyStopping: accuracy was not")
    done = len(run.rounds)
    assert 3 <= done < 9 and seen.rounds == [*range(1, done + 1)]
    figures = (run.path / "figures.csv").read_text()
    assert figures.count(",clients,2.0\n") == done
    assert any(re.search("are finite|no update", text) for text in seen.faults), seen.faults
    assert {span.device for span in run.trace.spans} == {"a", "c", "coordinator"}
    saved = sorted((run.path / "rounds").glob("round-*"))[-1].name
    assert (tmp_path / "bucket/rounds" / saved).read_bytes() == (run.path / "rounds" / saved).read_bytes()
    other = {"federated.rounds": done, "runtime.scheme": "sp", "store.url": (tmp_path / "other").as_uri()}
    alone = isthmus.federate(job_file, run=tmp_path / "alone", overrides=overrides | other, quiet=True)
    assert torch.equal(model(tmp_path / "run"), model(tmp_path / "alone"))
    assert seen.losses == [point.loss for point in alone.heldout]
    trained = build_model(alone.job.model)
    assert export_model(run.path, tmp_path / "exported")[0].done == run.load(trained) == done
