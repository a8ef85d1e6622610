"""One worker: runs settings one by one; worker 0 prints a curve per line. `worker.py RANK WORKERS STORE FILE`."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from training import Setting, gpt, train

sys.path.insert(0, str(Path(__file__).parents[1] / "sync"))

from workload import ResNet  # pyright: ignore[reportMissingImports]


def main() -> None:
    rank, workers, store, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, workers),
        rank=rank,
        world_size=workers,
        timeout=datetime.timedelta(seconds=300),
    )
    for setting in msgspec.json.decode(file.read_bytes(), type=list[Setting]):
        curve = train(setting, gpt if setting.kind == "gpt" else lambda: ResNet(32))
        if rank == 0:
            print(msgspec.json.encode(curve).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
