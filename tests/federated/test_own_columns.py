"""The same data, simulated and at sites: a column that says whose a sample is, and sites that hold several clients."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.federated.job import load_federated_job
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.processes.forked import Forked
from tests.federated.sites import attend, free_port, model, samples, write_job, write_tickets
from tests.fleet_service.parties import Fleet
from tests.runtime.commands import edited, isthmus, refused

NAMES = ("a", "b")
WARDS = {"a": (0, 1), "b": (2, 3)}


def write_wards(folder: Path) -> Path:
    """Each site holds two of the column's values, and has the column too."""
    parts = {ward: {**samples(ward), "client": np.full(len(samples(ward)["labels"]), ward)} for ward in range(4)}

    def save(name: str, wards: tuple[int, ...]) -> None:
        np.savez(folder / f"{name}.npz", **{k: np.concatenate([parts[w][k] for w in wards]) for k in parts[0]})

    job = write_job(folder, NAMES)
    for name, wards in {**WARDS, "all": (0, 1, 2, 3)}.items():
        save(name, wards)
    return edited(job, ('column = "client"', 'column = "client"\nclients = 2'))


@pytest.mark.forks
def test_sites_that_hold_several_clients_are_those_of_the_simulation(tmp_path: Path) -> None:
    """And they leave the clients' column out, as the simulation does."""
    job_file, port = write_wards(tmp_path), free_port()
    write_tickets(tmp_path, NAMES, port)
    with Forked({name: attend(tmp_path, name) for name in NAMES}, tmp_path / "logs") as sites:
        said: list[str] = []
        fleet = Fleet(tmp_path / "fleet", port=port)
        run = SiteRun(load_federated_job(job_file), tmp_path / "run", resume=False)
        running = threading.Thread(target=lambda: run.run(fleet.service, said.append), daemon=True)
        running.start()
        sites.begin("")
        running.join(120)
        logs = [(tmp_path / f"{name}.err") for name in NAMES]
        assert not running.is_alive(), (said, [log.read_text() for log in logs if log.exists()])
        for pid in sites.pids().values():
            os.kill(pid, signal.SIGKILL)
    fleet.service.close()
    alone = isthmus("train", job_file, "--scheme", "sp", "--run", tmp_path / "alone")
    assert alone.code == 0, alone.err
    assert torch.equal(model(tmp_path / "run"), model(tmp_path / "alone"))
    simulated = isthmus("simulate", job_file, "--json")
    assert simulated.code == 0 and json.loads(simulated.out)["rounds"] == 4, simulated.err


def test_more_clients_than_sites_are_refused_with_what_helps(tmp_path: Path) -> None:
    job = edited(write_wards(tmp_path), ("\nclients = 2", ""))
    said = "got 2 sites for data of 4 clients, expected as many"
    refused(isthmus("simulate", job), 2, said, "federated.partition.clients = 2 gives each site several of them")
