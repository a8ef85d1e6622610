#!/usr/bin/env bash
# torchft 0.2.0 (torch 2.13.0), torchft.local_sgd.DiLoCo: with one outer optimizer for several fragments each merge also
# moves the fragments that are not merged.
#
# Expected: outer_optimizer may be one optimizer or a list of one per fragment (the class's signature and check), and of
# several fragments one is merged at a time (Streaming DiLoCo, arXiv 2501.18512): the others only take inner steps. One
# worker whose outer optimizer is SGD with a learning rate of 1 then trains as plain SGD does.
# Seen: the outer optimizer steps over all its parameters. Those of the other fragments still have the gradient of the
# last inner step, so that they take one more step by it, with the outer learning rate, and its momentum remembers it.
# With a list of optimizers one worker has the weights of plain SGD after each of 8 steps; with one optimizer over all
# parameters they differ from the first merge on. Nothing is raised or logged.
# Why it matters: the run converges, so the larger, unasked-for steps look like a bad choice of the outer learning rate.
# Instead: pass a list with one optimizer per fragment.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torchft==0.2.0 numpy
cat > "$folder/run.py" <<'PY'
from datetime import timedelta
from importlib.metadata import version

import torch
from torch import nn, optim
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft._torchft import LighthouseServer
from torchft.local_sgd import DiLoCo

STEPS, EVERY = 8, 4  # of two fragments one is merged after each second step


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))


def train(net: nn.Sequential, inner: optim.Optimizer) -> list[torch.Tensor]:
    """All weights after each step."""
    found = []
    for _ in range(STEPS):
        inner.zero_grad()
        net(torch.ones(1, 2)).square().sum().backward()
        inner.step()
        found.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    return found


def plain() -> list[torch.Tensor]:
    net = model()
    return train(net, optim.SGD(net.parameters(), lr=0.1))


def diloco(*, one: bool) -> list[torch.Tensor]:
    net = model()
    inner = optim.SGD(net.parameters(), lr=0.1)
    outer = optim.SGD(net.parameters(), lr=1.0) if one else [optim.SGD(f.parameters(), lr=1.0) for f in net]
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        replica_id="only",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse.address(),
        timeout=timedelta(seconds=30),
    )
    try:
        with DiLoCo(manager, list(net), inner, outer, sync_every=EVERY, pin_memory=False):
            return train(net, inner)
    finally:
        manager.shutdown()
        lighthouse.shutdown()


assert version("torchft") == "0.2.0", version("torchft")
right = plain()
for one in (False, True):
    errors = [float((found - wanted).abs().max()) for found, wanted in zip(diloco(one=one), right)]
    print("one outer optimizer" if one else "one for each fragment", "largest difference from plain SGD after each step:")
    print("  " + " ".join(f"{error:.3f}" for error in errors))
    assert errors[0] == 0, "the behaviour changed"
    assert all(error > 0.1 for error in errors[1:]) if one else max(errors) < 1e-6, "the behaviour changed"
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/run.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
