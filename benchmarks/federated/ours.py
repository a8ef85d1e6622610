"""Isthmus: the job as a user would write it, through the same run as the command line's."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path

import msgspec
from safetensors.torch import load_file
from task import DEVICE, Rounds, Task

import isthmus
from isthmus import FederatedJob
from isthmus.experiments import FederatedRun


def job_of(folder: Path, executors: int, clients_per_vmap: int, backend: str = "processes") -> FederatedJob:
    """The peers write nothing of a round to disk, so only the last one is saved."""
    settings = json.loads((folder / "settings.json").read_text())
    samples = str(folder / "samples.npz")
    document = {
        "name": "compared",
        "model": {"name": f"networks:{settings['network']}"},
        "data": {"kind": "npz", "options": {"path": samples, "heldout_path": samples}},
        "federated": {
            "rounds": settings["rounds"],
            "partition": {"scheme": "natural", "column": "client"},
            "participation": {"clients": settings["clients_a_round"]},
        },
        "training": {
            "epochs": settings["epochs"],
            "batch_size": settings["batch_size"],
            "seed": settings["seed"],
            "eval_every": 0,
            "save_every": settings["rounds"],
        },
        "learning_rate": settings["learning_rate"],
        "runtime": {
            "backend": backend,
            "executors": executors,
            "clients_per_vmap": clients_per_vmap,
            "device": os.environ.get(DEVICE, "cpu"),
        },
    }
    return msgspec.convert(document, FederatedJob)


class _Ends(isthmus.Callback):
    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def step(self, done: isthmus.StepDone) -> None:
        self._rounds.end()


def run(task: Task, folder: Path, options: dict[str, int]) -> None:
    rounds, on_ray = Rounds(), bool(options.get("ray"))
    job = job_of(task.folder, options["executors"], options["clients_per_vmap"], "ray" if on_ray else "processes")
    clients_per_vmap = options["clients_per_vmap"]
    with tempfile.TemporaryDirectory() as place:
        if on_ray:
            ray = importlib.import_module("ray")  # takes long, and the other sides need none
            ray.init("local", num_cpus=options["executors"], include_dashboard=False, log_to_driver=False)
            isthmus.federate(job, run=Path(place) / "run", callbacks=[_Ends(rounds)], quiet=True)
            weights = load_file(max(Path(place).glob("run/rounds/*.safetensors")))["model"]
        else:
            found = FederatedRun(job, Path(place), resume=False, watch=lambda _: rounds.end())
            found.run()
            weights, clients_per_vmap = found.server.values["model"], found.job.runtime.clients_per_vmap
        rounds.write(folder, weights)
        (folder / "together.json").write_text(json.dumps(clients_per_vmap))
