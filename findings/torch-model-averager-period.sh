#!/usr/bin/env bash
# torch 2.13.0, PeriodicModelAverager and PostLocalSGDOptimizer: the first average comes after one local step, whatever
# the period, and parameters without a gradient are left out.
#
# Expected: models are averaged every `period` steps after the warm-up
# (https://docs.pytorch.org/docs/stable/distributed.optim.html, PostLocalSGDOptimizer): with period 4 and no warm-up
# after local steps 4, 8 and 12.
# Seen: the count begins at 0 and is tested before it is raised: the averages come after steps 1, 5 and 9. A run of 12
# steps ends with three local steps that are never averaged, so each worker saves another model. Parameters whose grad
# is None are skipped: what was not used since zero_grad, or was frozen after it had been trained, stays different on
# every worker.
# Why it matters: a run of a multiple of the period looks complete and ends with models that differ; figures of loss by
# period are of another schedule than the one that was asked for.
# Instead: use warmup_steps = period - 1, and average all parameters by hand before saving.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/run.py" <<'PY'
import sys

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer


def averaged_after(rank: int, steps: int, **options: int) -> list[int]:
    """Steps after which both workers had the same model: worker 0 moves by 1 each step, worker 1 by 2."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([weight], lr=1.0), PeriodicModelAverager(period=4, **options))
    found = []
    for step in range(1, steps + 1):
        weight.grad = torch.tensor([-1.0 - rank])
        optimizer.step()
        both = [torch.zeros(1), torch.zeros(1)]
        distributed.all_gather(both, weight.detach())
        if both[0] == both[1]:
            found.append(step)
    return found


def work(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    first, late = averaged_after(rank, 12), averaged_after(rank, 12, warmup_steps=3)
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(rank), model.bias.fill_(rank)
    model.weight.grad = torch.zeros_like(model.weight)  # the bias was not used since zero_grad
    PeriodicModelAverager(period=1).average_parameters(model.parameters())
    if rank == 0:
        print(f"period 4, 12 steps: averaged after steps {first}, right [4, 8, 12]; with warmup_steps=3 after {late}")
    print(f"worker {rank}: mean of 0 and 1: weight {model.weight.item()}, bias without gradient {model.bias.item()}")
    assert first == [1, 5, 9] and late == [4, 8, 12], "the behaviour changed"
    assert (model.weight.item(), model.bias.item()) == (0.5, rank), "the behaviour changed"
    distributed.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
    multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)
PY
"$folder/venv/bin/python" -W ignore "$folder/run.py" "$folder"
