#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: gradients that are accumulated over several calls of step() are too small,
# and micro-batches of different sizes are weighted as if they were equal.
#
# Expected: `scale_grads` (True unless given) is for a loss that averages: after step() the gradient is that of the mean
# over the batch (https://docs.pytorch.org/docs/stable/distributed.pipelining.html). Two calls without zero_grad between
# them should give the sum of two such gradients, as two calls of backward() do.
# Seen: each step() divides what stands in `.grad` by the number of micro-batches, so also what the calls before it left
# there. With 4 micro-batches the first of two equal batches counts a quarter: 1.25 gradients in place of 2; of three,
# 1.3125 in place of 3. And 9 rows in 4 micro-batches of 3, 2, 2, 2 give the mean of four means: each row of the first
# counts a third less than it should. Neither raises or warns.
# Why it matters: over slow links one accumulates gradients to send them seldom; here that drops nearly all but the last
# batch, silently, and the last batch of an epoch is rarely a multiple of the number of micro-batches.
# Instead: pass scale_grads=False and divide once before the optimizer steps, with a loss that sums over rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - "$folder" <<'PY'
import sys

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
torch.manual_seed(0)


def pipeline(kind: type, loss, **options) -> tuple[nn.Linear, object]:
    model = nn.Linear(3, 2)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    return model, kind(stage, n_microbatches=4, loss_fn=loss, **options)


def plain(model: nn.Linear, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(mse_loss(model(rows), targets), model.weight)[0]


for kind in (ScheduleGPipe, Schedule1F1B):
    rows, targets = torch.randn(8, 3), torch.randn(8, 2)
    model, schedule = pipeline(kind, mse_loss)
    for calls, counted in ((1, 1.0), (2, 1.25), (3, 1.3125)):
        schedule.step(rows, target=targets)
        ratio = (model.weight.grad / plain(model, rows, targets)).mean().item()
        print(f"{kind.__name__}: {calls} calls of step() hold {ratio:.4f} gradients of a batch, right {calls}")
        assert abs(ratio - counted) < 1e-3, "the behaviour changed"

    rows, targets = torch.randn(9, 3), torch.randn(9, 2)
    model, schedule = pipeline(kind, mse_loss)
    schedule.step(rows, target=targets)
    means = [plain(model, *pair) for pair in zip(rows.tensor_split(4), targets.tensor_split(4), strict=True)]
    mean, right = torch.stack(means).mean(0), plain(model, rows, targets)
    off = ((model.weight.grad - right).norm() / right.norm()).item()
    print(f"{kind.__name__}: 9 rows in 4 micro-batches: gradient off by {off:.1%}")
    assert torch.allclose(model.weight.grad, mean, atol=1e-5) and off > 0.01, "the behaviour changed"

    model, schedule = pipeline(kind, lambda a, b: mse_loss(a, b, reduction="sum"), scale_grads=False)
    schedule.step(rows, target=targets)
    schedule.step(rows, target=targets)
    assert torch.allclose(model.weight.grad / targets.numel(), 2 * plain(model, rows, targets), atol=1e-5)
distributed.destroy_process_group()
PY
