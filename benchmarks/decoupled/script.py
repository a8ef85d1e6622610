"""A script with `isthmus.sync` in four processes of speeds 1:1:2:4, one of which is killed in the middle: what that
costs the others, and the loss beside that of mode `local`.

`script.py MODE FOLDER [KILLED]` is the script. Each of its processes leaves the times of its steps, and the held-out
loss of its model at the end.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import isthmus.sync
from isthmus.sync import Options

importlib.import_module("torch._dynamo")  # an optimizer's first step would import it in each process

STEP_S = (1.0, 1.0, 0.5, 0.25)
"""So long that this machine's other work matters little."""
BATCH, PERIOD = 16, 8
PART_S = 20.0
"""Before one is killed, and after."""
STEPS = round(2 * PART_S * sum(1 / step_s for step_s in STEP_S) / len(STEP_S))
"""Of each worker, if all were equally fast."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    before: dict[str, float]
    """Steps per second of each worker until one is killed, from when all had begun."""
    after: dict[str, float]
    """From then until the first has ended."""
    losses: dict[str, float]
    """Of the workers that came to the end."""

    def cost(self, killed: str) -> float:
        """Share of the others' steps."""
        others = [name for name in self.before if name != killed]
        return 1 - sum(self.after[n] for n in others) / sum(self.before[n] for n in others)


def script(mode: str, killed: int | None) -> Script:
    """From the start of the processes to their end."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, mode, folder, *([] if killed is None else [str(killed)])], check=True)
        times, losses = (_numbers(Path(folder), kind) for kind in ("times", "loss"))
    begun_s = max(of_worker[0] for of_worker in times.values())
    middle_s, end_s = begun_s + PART_S, min(times[name][-1] for name in losses)
    return Script(
        before={name: _rate(of_worker, begun_s, middle_s) for name, of_worker in times.items()},
        after={name: _rate(of_worker, middle_s, end_s) for name, of_worker in times.items()},
        losses={name: loss for name, (loss,) in losses.items()},
    )


def _numbers(folder: Path, kind: str) -> dict[str, list[float]]:
    """By worker, the lines of its file of this kind."""
    return {path.stem: [float(line) for line in path.read_text().split()] for path in sorted(folder.glob(f"*.{kind}"))}


def _rate(times: list[float], begin_s: float, end_s: float) -> float:
    return sum(begin_s <= s < end_s for s in times) / (end_s - begin_s)


class _Samples:
    """Labels that a fixed network of one layer gives."""

    def __init__(self, seed: int) -> None:
        self._drawn = torch.Generator().manual_seed(seed)
        self._teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))

    def batch(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(samples, 64, generator=self._drawn)
        return inputs, (inputs @ self._teacher).argmax(1)


def _work(mode: str, rank: int, folder: Path, killed: int | None) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=len(STEP_S))
    samples = _Samples(seed=1 + rank)
    torch.manual_seed(0)
    widths = (64, 128, 128, 128)
    hidden = [layer for width in widths for layer in (nn.Linear(width, 128), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    decoupled = mode == "decoupled"
    options = Options(weight=BATCH, steps=STEPS) if decoupled else Options()
    sync = isthmus.sync.attach(model, optimizer, mode=mode, period=PERIOD, options=options)
    began_s = time.monotonic()
    with (folder / f"{rank}.times").open("w", buffering=1) as times:
        while not sync.finished if decoupled else sync.steps < STEPS:
            step_s = time.monotonic()
            inputs, labels = samples.batch(BATCH)
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            if decoupled:
                time.sleep(max(0.0, step_s + STEP_S[rank] - time.monotonic()))
            sync.step()
            times.write(f"{time.monotonic()}\n")
            if rank == killed and time.monotonic() > began_s + PART_S:
                os.kill(os.getpid(), signal.SIGKILL)
    sync.close()
    with torch.no_grad():
        inputs, labels = _Samples(seed=0).batch(2000)
        (folder / f"{rank}.loss").write_text(f"{float(cross_entropy(model(inputs), labels))}\n")
    dist.destroy_process_group()


def main(mode: str, folder: Path, killed: int | None) -> None:
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    workers: list[int] = []
    for rank in range(len(STEP_S)):
        pid = os.fork()
        if not pid:
            _work(mode, rank, folder, killed)
            return
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
