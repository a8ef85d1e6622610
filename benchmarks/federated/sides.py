"""The sides, their environments, and how long a side's processes take and how much memory they hold."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from shares import TOKEN, watch

HERE = Path(__file__).parent
PEERS = Path(tempfile.gettempdir()) / "isthmus-federated-peers"
"""Their environments are made here once, about 3 GB, and kept."""
PACKAGES = {
    "flower": ("torch==2.13.0", "flwr[simulation]==1.41.0"),
    "pfl": ("torch==2.13.0", "pfl[pytorch]==0.6.0"),
}
WINDOW = 5
"""Rounds."""
LIMIT_S = 600.0
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # or Ray leaves a token at home, which later clusters then want
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}


class Side(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    module: str
    options: dict[str, int] = {}
    peer: str = ""
    """Whose environment; empty is this one."""
    processes: int = 1
    """Started by torchrun when there are several."""

    def command(self, task: Path, output: Path) -> list[str]:
        python = sys.executable if not self.peer else str(environment(self.peer) / "bin" / "python")
        run = [str(HERE / "side.py"), self.module, str(task), str(output), json.dumps(self.options)]
        if self.processes == 1:
            return [python, *run]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        return [python, *launch, *run]


SIDES = (
    Side(name="bare loop", module="bare"),
    Side(name="ours, 1 executor", module="ours", options={"executors": 1, "clients_per_vmap": 1}),
    Side(name="ours, 1, vectorised", module="ours", options={"executors": 1, "clients_per_vmap": 0}),
    Side(name="pool of 2", module="pool"),
    Side(name="ours, 2 executors", module="ours", options={"executors": 2, "clients_per_vmap": 1}),
    Side(name="ours, 2, vectorised", module="ours", options={"executors": 2, "clients_per_vmap": 0}),
    Side(name="ours on Ray, 2", module="ours", options={"executors": 2, "clients_per_vmap": 1, "ray": 1}),
    Side(name="pfl", module="pfl_side", options={"processes": 1}, peer="pfl"),
    Side(name="pfl, 2 processes", module="pfl_side", options={"processes": 2}, peer="pfl", processes=2),
    Side(name="Flower", module="flower_side", peer="flower"),
)


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a side."""

    rounds_s: list[float]
    """From the end of one round to the end of the next; the first has none."""
    wall_s: float
    """Of the whole run, from the start of its process to its end."""
    weights: NDArray[np.float32]
    memory_bytes: int = 0
    clients_per_vmap: int = 1


def environment(peer: str) -> Path:
    """A virtual environment with the peer, made when it is not there."""
    place = PEERS / peer
    if not (place / "done").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(place / "bin" / "pip"), "install", "-q", *PACKAGES[peer]], check=True)
        (place / "done").touch()
    return place


def run(side: Side, task: Path, *, memory: bool = False) -> Ran:
    """RuntimeError when the side fails. With `memory` it is looked at every 20 ms, and slower."""
    token = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        paths = [str(HERE)] if side.peer else [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        places = {"PYTHONPATH": os.pathsep.join(paths), "RAY_TMPDIR": folder}  # no cluster but its own
        variables = {**os.environ, **QUIET, **places, TOKEN: token}
        log = output / "log"
        started_s = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                side.command(task, output), env=variables, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )
        most = watch(process, token, LIMIT_S) if memory else 0
        with suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        wall_s = time.monotonic() - started_s
        if process.returncode or not (output / "rounds.json").is_file():
            process.kill()
            raise RuntimeError(f"{side.name}: ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        ended_s = np.array(json.loads((output / "rounds.json").read_text()))
        window = WINDOW if len(ended_s) > 2 * WINDOW else 1
        kept = output / "together.json"
        return Ran(
            rounds_s=((ended_s[window:] - ended_s[:-window]) / window).tolist(),
            wall_s=wall_s,
            weights=np.load(output / "weights.npy"),
            memory_bytes=most,
            clients_per_vmap=json.loads(kept.read_text()) if kept.is_file() else 1,
        )
