#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint.state_dict: reading the state of an optimizer that has not stepped yet
# changes how it trains.
#
# Expected: get_state_dict and get_optimizer_state_dict return state, with parameter names in place of numbers
# (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html); the optimizer stays as it was.
# Seen: an optimizer without state is made to step once, with gradients and learning rate of zero. Moments stay zero but
# the step counters of Adam, AdamW, NAdam and RAdam become 1, so the first true step corrects its bias as if it were
# the second. Adam with the default betas moves 0.744 of the learning rate in place of 1, and the steps after it differ.
# Why it matters: a checkpoint at step 0, a rehearsal of a restart, or a replica that hands its state to a newcomer
# before the first step gives another run than one without it, and replicas of one run differ from each other.
# Instead: save the optimizer after its first step only, or call optimizer.state.clear() behind such a read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__


def moved(kind: type, steps: int, *, read: bool, clear: bool = False) -> float:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = kind(model.parameters(), lr=0.1)
    if read:
        get_state_dict(model, optimizer)
        assert {state["step"].item() for state in optimizer.state.values()} == {1.0}, "the behaviour changed"
    if clear:
        optimizer.state.clear()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return -model.weight.item()


for kind in (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam):
    for steps in (1, 10):
        plain, after = moved(kind, steps, read=False), moved(kind, steps, read=True)
        print(f"{kind.__name__}, learning rate 0.1: {steps} steps move {plain:.5f}, after a read {after:.5f}")
        assert abs(after - plain) > 1e-3 * plain, "the behaviour changed"
        assert moved(kind, steps, read=True, clear=True) == plain
assert abs(moved(torch.optim.Adam, 1, read=True) - 0.0744136) < 1e-6, "the behaviour changed"
PY
