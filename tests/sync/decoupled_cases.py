"""Workers of a script in mode 'decoupled': `decoupled_cases.py FOLDER [kill|spoil RANK]` leaves each one's model in the
folder.

They are forked from a process that has imported everything. `kill`: the worker of this rank kills itself in the middle,
and another one is stopped for a second. `spoil`: its weights grow by 3 in each step, and it ends after the others.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # an optimizer's first step imports it
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

import isthmus.sync
from isthmus.sync import Decoupled, Options
from isthmus.training.decoupled import ReplicaFragments, delta_codec, fragments_of

RULES = Decoupled(fragments=2, quorum=2, grace=0.2)
PERIOD = 4
SAMPLES = (8, 8, 16)
"""Of a step of each worker."""
STEP_S = (0.004, 0.002, 0.002)
STEPS = 25
SPOILT = 12
"""Steps that one that spoils the model makes at least, as many as others."""


class Fault:
    """Of one worker; by default of none."""

    def __init__(self, kind: str = "", rank: str = "-1") -> None:
        self.kind, self.rank = kind, int(rank)
        self.steps = multiprocessing.Value("i", 0)
        """Of a worker that spoils the model, in memory that all share."""


class Training:
    """One worker's; a replica of a replay."""

    def __init__(self, rank: int, seed: int, *, spoils: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.steps, self._spoils = 0, spoils
        self._rank, self._drawn = rank, torch.Generator().manual_seed(rank)
        self._teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(99))
        self.fragments = ReplicaFragments(fragments_of(self.model, RULES.fragments), delta_codec(RULES))

    def backward(self) -> float:
        for parameter in self.model.parameters() if self._spoils else ():
            parameter.data += 3.0
        inputs = torch.randn(SAMPLES[self._rank], 16, generator=self._drawn)
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(inputs), (inputs @ self._teacher).argmax(1))
        loss.backward()
        return float(loss.detach())

    def step(self, samples: int) -> float:
        loss = self.backward()
        self.optimizer.step()
        self.fragments.account.trained(SAMPLES[self._rank])
        self.steps += 1
        return loss


def worker(rank: int, folder: Path, fault: Fault, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(SAMPLES))
    spoils = fault.kind == "spoil" and rank == fault.rank
    own = Training(rank, seed=rank, spoils=spoils)
    record = str(folder)
    options = Options(weight=SAMPLES[rank], decoupled=RULES, steps=STEPS, timeout_s=20.0, record=record)
    sync = isthmus.sync.attach(own.model, own.optimizer, mode="decoupled", period=PERIOD, options=options)
    while not sync.finished:
        own.backward()
        time.sleep(STEP_S[rank])
        sync.step()
        if fault.kind == "kill" and sync.steps == 10:
            disturb(rank, fault.rank)
        if spoils:
            fault.steps.value = sync.steps
        while fault.kind == "spoil" and fault.steps.value < min(sync.steps, SPOILT):
            time.sleep(0.001)
    while spoils:
        signal.pause()
    sync.close()
    save_file({name: tensor.clone() for name, tensor in own.model.state_dict().items()}, folder / f"{rank}.safetensors")
    dist.destroy_process_group()


def disturb(rank: int, killed: int) -> None:
    if rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == (killed + 1) % len(SAMPLES):
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def main(folder: Path, fault: Fault) -> None:
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gc.freeze()  # collecting in a worker would copy every page of what was imported
    workers: list[int] = []
    for rank in range(len(SAMPLES)):
        pid = os.fork()
        if not pid:
            worker(rank, folder, fault, port)
            return
        workers.append(pid)
    codes: dict[int, int] = {}
    for rank, pid in sorted(enumerate(workers), key=lambda one: one[0] == fault.rank):
        if rank == fault.rank and fault.kind == "spoil":
            os.kill(pid, signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    expected = {rank: -signal.SIGKILL if rank == fault.rank else 0 for rank in range(len(SAMPLES))}
    sys.exit(None if codes == expected else f"ended with {codes}, expected {expected}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Fault(*sys.argv[2:]))
