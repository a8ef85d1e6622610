"""A script with `isthmus.sync` in four processes of speeds 1:1:2:4, one of which is killed in the middle: what that
costs the others, and the loss beside that of mode `local`.

The processes are this file: `script.py MODE STEPS FOLDER [KILLED]`, with torch's RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Each leaves the times of its steps, and the held-out loss.
"""

from __future__ import annotations

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
from isthmus.data import DataSpec, load_dataset
from isthmus.sync import Options

STEP_S = (0.2, 0.2, 0.1, 0.05)
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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(len(STEP_S)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, mode, str(STEPS), folder, *([] if killed is None else [str(killed)])]
        workers = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(len(STEP_S))]
        for worker in workers:
            worker.wait()
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


def _work(mode: str, steps: int, folder: Path, killed: int | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train, heldout = (load_dataset(DataSpec(kind="digits"), split) for split in ("train", "heldout"))
    torch.manual_seed(0)
    layers = [layer for width in (64, 256, 256) for layer in (nn.Linear(width, 256), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    decoupled = mode == "decoupled"
    options = Options(weight=BATCH, steps=steps) if decoupled else Options()
    sync = isthmus.sync.attach(model, optimizer, mode=mode, period=PERIOD, options=options)
    drawn = torch.Generator().manual_seed(rank)
    began_s = time.monotonic()
    with (folder / f"{rank}.times").open("w", buffering=1) as times:
        while not sync.finished if decoupled else sync.steps < steps:
            step_s = time.monotonic()
            batch = train.batch(torch.randint(len(train), (BATCH,), generator=drawn).tolist(), list(train.columns))
            optimizer.zero_grad()
            cross_entropy(model(batch["pixel_values"]), batch["labels"]).backward()
            if decoupled:
                time.sleep(max(0.0, step_s + STEP_S[rank] - time.monotonic()))
            sync.step()
            times.write(f"{time.monotonic()}\n")
            if rank == killed and time.monotonic() > began_s + PART_S:
                os.kill(os.getpid(), signal.SIGKILL)
    sync.close()
    with torch.no_grad():
        batch = heldout.batch(range(len(heldout)), list(heldout.columns))
        loss = float(cross_entropy(model(batch["pixel_values"]), batch["labels"]))
    (folder / f"{rank}.loss").write_text(f"{loss}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
