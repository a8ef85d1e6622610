"""A small deployment: a coordinator's job, and sites with a file of data and an algorithm of their own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from isthmus.runtime.service.fleet_state import FleetState
from tests.runtime.commands import isthmus

JOB = """
name = "clinics"
run_dir = "{folder}"

[model]
name = "mlp"
options = {{ features = 6, width = 5, layers = 1, classes = 3 }}

[data]
kind = "npz"
options = {{ path = "{folder}/all.npz", holdout = 0 }}

[federated.partition]
scheme = "natural"
column = "client"

[federated]
algorithm = "{algorithm}"
rounds = {rounds}

[training]
epochs = 2
seed = 3
eval_every = 0
batch_size = 4

[runtime]
timeout = "20 s"

[federated.deployment]
sites = [{sites}]
wait = "0.5 s"
"""

SITE = """
job = "clinics"

[algorithm]
name = "{algorithm}"

[model]
name = "mlp"
options = {{ features = 6, width = 5, layers = 1, classes = 3 }}

[data]
kind = "npz"
options = {{ path = "{folder}/{name}.npz", holdout = 0 }}
"""


def samples(client: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(client)
    count = 5 + 3 * client
    values = draws.standard_normal((count, 6)).astype(np.float32)
    return {"pixel_values": values, "labels": (values[:, client % 6] > 0).astype(np.int64) + client % 2}


def write_job(folder: Path, names: tuple[str, ...], algorithm: str = "fedavg", rounds: int = 4) -> Path:
    """The job, each site's data and file, and all the data in one file for a simulation."""
    parts = {name: samples(client) for client, name in enumerate(names)}
    for name, columns in parts.items():
        np.savez(folder / f"{name}.npz", **columns)
        (folder / f"{name}.toml").write_text(SITE.format(algorithm=algorithm, folder=folder, name=name))
    owner = np.concatenate([np.full(len(c["labels"]), n) for n, c in enumerate(parts.values())])
    joined = {k: np.concatenate([c[k] for c in parts.values()]) for k in ("pixel_values", "labels")}
    np.savez(folder / "all.npz", **joined, client=owner)
    job = folder / "fed.toml"
    sites = ", ".join(f'"{name}"' for name in names)
    job.write_text(JOB.format(folder=folder, algorithm=algorithm, rounds=rounds, sites=sites))
    return job


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def write_tickets(folder: Path, names: tuple[str, ...], port: int) -> Path:
    """The fleet's state folder, and a ticket file for each site."""
    state = FleetState(folder / "fleet")
    state.listens_at((("127.0.0.1", port),))
    for name in names:
        path = folder / f"{name}.ticket"
        path.touch(0o600)
        path.write_text(state.ticket())
    state.close()
    return folder / "fleet"


def attend(folder: Path, name: str, *, joined: bool = False) -> Callable[[str], None]:
    """The life of a site's process, in a folder of its own from which its algorithm is imported."""
    ticket = [] if joined else ["--ticket-file", folder / f"{name}.ticket"]

    def act(_: str) -> None:
        home = folder / f"at-{name}"
        home.mkdir(exist_ok=True)
        os.chdir(home)
        result = isthmus(
            "join",
            "--site",
            folder / f"{name}.toml",
            "--name",
            name,
            "--state",
            folder / f"{name}-state",
            "--timeout",
            "20 s",
            *ticket,
        )
        (folder / f"{name}.err").write_text(result.err)

    return act


def model(run: Path) -> Tensor:
    """After the last committed round."""
    return load_file(sorted((run / "rounds").glob("round-*"))[-1])["server/model"]
