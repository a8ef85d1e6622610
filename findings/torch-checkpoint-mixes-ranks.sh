#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint: values that differ between ranks under the same key become a mixture.
#
# Expected: save() is called by all ranks, each of which saves what is its own
# (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html): after load() each rank has its own values again,
# or an error says that two ranks gave the same key.
# Seen: only DTensor and ShardedTensor have parts by rank. Other values are taken for copies of each other: each is
# written by the rank that has the least to write so far, so that the first comes from rank 0 and the next from rank 1.
# Every rank then reads this mixture, which no rank ever had. Nothing is raised or logged.
# Why it matters: with local SGD, DiLoCo or error feedback each worker has optimizer moments, residuals, a random state
# and a place in its data of its own. A resumed run has one worker's residual beside another's moments, and two
# workers that read the same samples from then on.
# Instead: put the rank into the key (f"worker{rank}"), or let each worker save with no_dist=True in its own folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/run.py" <<'PY'
import sys

import torch
from torch import distributed, multiprocessing
from torch.distributed import checkpoint


def values(rank: int) -> dict[str, object]:
    residual, moments = torch.full((1000,), float(rank)), torch.full((1000,), float(rank))
    return {"residual": residual, "moments": moments, "samples_read": 100 + rank}


def show(state: dict[str, object]) -> list[int]:
    return [int(state["residual"][0]), int(state["moments"][0]), state["samples_read"] - 100]


def work(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    checkpoint.save(values(rank), checkpoint_id=f"{folder}/same")
    read = values(7)
    checkpoint.load(read, checkpoint_id=f"{folder}/same")
    print(f"rank {rank}: residual, moments and samples_read are those of ranks {show(read)}, right {[rank] * 3}")
    assert show(read) == [0, 1, 0], "the behaviour changed"

    checkpoint.save({f"worker{rank}": values(rank)}, checkpoint_id=f"{folder}/named")
    read = {f"worker{rank}": values(7)}
    checkpoint.load(read, checkpoint_id=f"{folder}/named")
    assert show(read[f"worker{rank}"]) == [rank] * 3
    distributed.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
    multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)
PY
"$folder/venv/bin/python" -W ignore "$folder/run.py" "$folder"
