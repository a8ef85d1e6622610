"""Federated clients that train on an accelerator: the CPU's model after some rounds, by every kind of algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isthmus.accelerators import Accelerator, accelerator_names, open_accelerator
from isthmus.federated.evaluation import Evaluation, RoundLine
from isthmus.federated.job import load_federated_job
from isthmus.runtime.federated.run import FederatedRun
from isthmus_testing.emulated_accelerator import open_checked
from tests.federated.populations import Run

HARDWARE = accelerator_names()[:1]
KINDS = ("auto",) if HARDWARE else ("checked:0", "auto")
"""The emulated one has the CPU's bits; hardware sums in its own order. Torch knows one kind in a process."""
PROCESSES = [json.dumps(names) for names in HARDWARE or ("checked:6", ["checked:6", "checked:7"])]
FLOAT32 = 2e-8
"""Of parameters below 0.5: updates are summed as float32, and another order of sums may round one to its neighbour."""
ALGORITHMS = {
    "fedavg": {},
    "scaffold": {},
    "mime": {},
    "feddyn": {},
    "fednova": {},
}


def opened(kind: str) -> Accelerator:
    found = open_accelerator(kind)
    if not found.asynchronous:
        pytest.skip("no accelerator here: `make test-gpu` runs it on one")
    if found.device.type == "mps":
        pytest.skip("double precision: Apple's GPUs have none")
    return found


JOB = """
name = "on-device"
run_dir = "{folder}"

[model]
name = "mlp"
options = {{ features = 64, width = 8, layers = 1, classes = 10 }}

[data]
kind = "digits"
options = {{ flat = true, holdout = 0.2 }}

[federated.partition]
scheme = "iid"
clients = 6

[federated]
rounds = 2

[training]
eval_clients = 2

[federated.participation]
clients = 4

[runtime]
executors = 2
device = {device}
"""


def trained(folder: Path, device: str) -> tuple[FederatedRun, Evaluation | None]:
    folder.mkdir()
    (folder / "job.toml").write_text(JOB.format(folder=folder, device=device), encoding="utf-8")
    lines: list[RoundLine] = []
    run = FederatedRun(load_federated_job(folder / "job.toml"), folder / "run", resume=False, watch=lines.append)
    run.run()
    return run, lines[-1].evaluation


# Before the tests that compute on hardware: a process that has done so cannot be forked.
@pytest.mark.parametrize("device", PROCESSES)
def test_processes_train_on_the_devices_of_the_job(device: str, tmp_path: Path) -> None:
    here, host_evaluation = trained(tmp_path / "host", '"cpu"')
    there, evaluation = trained(tmp_path / "device", device)
    apart = (here.server.values["model"] - there.server.values["model"]).abs().max()
    assert apart <= (1e-5 if HARDWARE else 0.0)
    assert evaluation is not None and host_evaluation is not None
    assert HARDWARE or evaluation == host_evaluation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_model_is_the_cpus(name: str, kind: str, tmp_path: Path) -> None:
    accelerator = opened(kind)
    runs = [
        Run(name, ALGORITHMS[name], tmp_path / str(k), executors=2, rounds=3, accelerator=where)
        for k, where in enumerate((open_accelerator("cpu"), accelerator))
    ]
    for run in runs:
        run.run()
    host, device = (run.model for run in runs)
    assert device.device.type == "cpu", "the server's values are the host's"
    assert (device - host).abs().max() <= (0.0 if kind == "checked:0" else FLOAT32)


@pytest.mark.skipif(bool(HARDWARE), reason="torch knows one kind of accelerators in a process")
@pytest.mark.parametrize(("name", "values"), [("fedavg", 1), ("scaffold", 2)])
def test_the_host_waits_once_for_each_value_of_a_client(name: str, values: int, tmp_path: Path) -> None:
    accelerator = open_checked(8)
    run = Run(name, {}, tmp_path, executors=2, rounds=3, accelerator=accelerator)
    accelerator.reset_counts()
    run.run()
    counts, clients = accelerator.counts(), sum(len(t) for r in run.records for t in r.trained.values())
    sums = 3 * 2 * values
    states = clients if name == "scaffold" else 0
    assert counts.implicit_copies == counts.host_synchronizations == 0, counts.places
    assert counts.event_waits <= clients * values + sums + states, counts.places


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_executors_and_clients_at_once(kind: str, tmp_path: Path) -> None:
    accelerator = opened(kind)
    one, three, vmapped = (
        Run("scaffold", {}, tmp_path / str(k), rounds=3, clients_per_size=3, accelerator=accelerator, **settings)
        for k, settings in enumerate(({"executors": 1}, {"executors": 3}, {"executors": 2, "clients_per_vmap": 4}))
    )
    for run in (one, three, vmapped):
        run.run()
    torch.testing.assert_close(three.model, one.model, rtol=0, atol=0 if kind == "checked:0" else FLOAT32)
    torch.testing.assert_close(vmapped.model, one.model, rtol=1e-5, atol=1e-7)
