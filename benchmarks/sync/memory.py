"""Peak memory of training under `dream` against plain training: `python benchmarks/sync/memory.py [--json PATH]`.

Two workers on loopback, AdamW, a model of 33 million parameters; peak resident memory of the fuller worker, each run in
processes of its own. Plain training is what each worker would do alone.
"""

from __future__ import annotations

import datetime
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import isthmus.sync

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

LATEST = Path(__file__).parent / "results" / "memory.json"
WORKERS, STEPS, WIDTH, LAYERS = 2, 12, 1024, 32
KINDS = ("plain", "torch DDP", *isthmus.sync.mode_names())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def worker(kind: str, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORKERS),
        rank=rank,
        world_size=WORKERS,
        timeout=datetime.timedelta(seconds=120),
    )
    dist.barrier()  # its connections are there in every kind
    model: nn.Module = net()
    if kind == "torch DDP":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sync = None if kind in ("plain", "torch DDP") else isthmus.sync.attach(model, optimizer, mode=kind)
    step = optimizer.step if sync is None else sync.step
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(8, WIDTH)).square().mean().backward()
        step()
    if sync is not None:
        sync.close()  # `streaming` has something on its way between steps
    dist.barrier()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    dist.destroy_process_group()


def peak_bytes(kind: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", kind, str(rank), f"{folder}/store"], stdout=subprocess.PIPE
            )
            for rank in range(WORKERS)
        ]
        return max(int(process.communicate(timeout=200)[0]) for process in running)


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return 0
    parser = options_of(__doc__, LATEST)
    options = parser.parse_args()
    found = {kind: peak_bytes(kind) for kind in KINDS}
    write_figures(options.json, found)
    drawn = Table("training", "peak MB", "over plain")
    for kind, size in found.items():
        drawn.add_row(kind, f"{size / 1e6:.0f}", f"{size / found['plain'] - 1:+.1%}")
    Console().print(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
