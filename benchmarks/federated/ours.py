"""Isthmus: the job as a user would write it, through the same run as the command line's."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path

import msgspec
from task import DEVICE, Rounds, Task

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


def run(task: Task, folder: Path, options: dict[str, int]) -> None:
    rounds = Rounds()
    if on_ray := bool(options.get("ray")):
        ray = importlib.import_module("ray")  # takes long, and the other sides need none
        ray.init("local", num_cpus=options["executors"], include_dashboard=False, log_to_driver=False)
    backend = "ray" if on_ray else "processes"
    job = job_of(task.folder, options["executors"], options["clients_per_vmap"], backend)
    with tempfile.TemporaryDirectory() as place:
        run = FederatedRun(job, Path(place), resume=False, watch=lambda _: rounds.end())
        run.run()
        rounds.write(folder, run.server.values["model"])
        (folder / "together.json").write_text(json.dumps(run.job.runtime.clients_per_vmap))
