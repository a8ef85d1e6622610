"""One measured run in processes of its own: `python work.py '<Case as JSON>' FOLDER`. Prints what it found as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from isthmus import FederatedJob
from isthmus.experiments import FederatedRun, RoundLine
from isthmus.federated.algorithms import ClientUpdate, LocalTrainer, Values
from isthmus.federated.algorithms.scaffold import Scaffold
from isthmus.federated.job import build, client_data

sys.path.insert(0, str(Path(__file__).parents[1] / "federated"))  # its networks


class Forgetful(Scaffold, frozen=True):
    """SCAFFOLD whose clients begin anew each time: the same computation, and nothing is stored."""

    def init_client(self, model: Tensor) -> Values | None:
        return None

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        update = super().client(local, broadcast, super().init_client(broadcast["model"]))
        return ClientUpdate(values=update.values, weight=update.weight)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    network: str
    data: dict[str, object]
    partition: dict[str, object] | None
    clients: int
    """A round."""
    rounds: int
    algorithm: str = "fedavg"
    epochs: int = 1
    batch_size: int = 20
    scheme: str = "ours"
    executors: int = 2
    alone: bool = False
    """Nothing but one client's training, in a bare loop."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    rounds_s: list[float]
    ended_s: list[float]
    """On the system's clock."""
    model_bytes: int
    training_s: float = 0.0
    """Of all executors together, in the rounds after the first."""
    cpu_s: float = 0.0
    """That all processes used in those, the file system's work for them included."""


def job_of(case: Case) -> FederatedJob:
    algorithm = "work:Forgetful" if case.algorithm == "forgetful" else case.algorithm
    federated: dict[str, object] = {
        "algorithm": algorithm,
        "rounds": case.rounds,
        "participation": {"clients": case.clients},
    }
    if case.partition is not None:
        federated["partition"] = case.partition
    document: dict[str, object] = {
        "name": "memory",
        "model": {"name": f"networks:{case.network}"},
        "data": case.data,
        "federated": federated,
        "training": {"epochs": case.epochs, "batch_size": case.batch_size, "eval_every": 0, "save_every": 2},
        "learning_rate": 0.02,
        "runtime": {"scheme": case.scheme, "executors": case.executors},
    }
    return msgspec.convert(document, FederatedJob)


def through_isthmus(case: Case, folder: Path) -> Found:
    ended_s: list[float] = []
    used_s: list[float] = []
    training_s = 0.0

    def watch(_: RoundLine) -> None:
        ended_s.append(time.monotonic())
        used_s.append(cpu_s())

    run = FederatedRun(job_of(case), folder, resume=False, watch=watch)
    run.run()
    for line in run.store.history.lines()[1:]:
        training_s += sum(line.busy_s().values())
    return Found(
        rounds_s=np.diff(ended_s).tolist(),
        ended_s=ended_s,
        model_bytes=run.server.values["model"].nbytes,
        training_s=training_s,
        cpu_s=used_s[-1] - used_s[0],
    )


def cpu_s() -> float:
    """Of this process and those that it forked, so far. A busy machine changes it little."""
    children = (Path("/proc/self/task") / str(os.getpid()) / "children").read_text().split()
    ticks = 0
    for pid in ("self", *children):
        with contextlib.suppress(OSError):  # it has just ended, and is counted with this process
            fields = (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def alone(case: Case) -> Found:
    """One client's training as anybody would write it."""
    job = job_of(case)
    columns = client_data(job).load(0)
    module = build(job)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    for start in range(0, len(columns["labels"]), case.batch_size):
        optimizer.zero_grad()
        module(**{name: c[start : start + case.batch_size] for name, c in columns.items()})["loss"].backward()
        optimizer.step()
    return Found(rounds_s=[], ended_s=[], model_bytes=sum(p.nbytes for p in module.parameters()))


def main() -> None:
    torch.set_num_threads(1)
    case = msgspec.json.decode(sys.argv[1], type=Case)
    with tempfile.TemporaryDirectory(dir=sys.argv[2]) as folder:
        found = alone(case) if case.alone else through_isthmus(case, Path(folder))
    print(json.dumps(msgspec.to_builtins(found)))


if __name__ == "__main__":
    main()
