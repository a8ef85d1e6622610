"""`isthmus.sync` on the device, over its own backend (NCCL) with one rank: the steps of a plain loop on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import isthmus.sync
from isthmus.accelerators import Accelerator

STEPS = 12
MODES = ("every-step", "local", "outer", "partial", "streaming", "dream", "dreamddp")


@pytest.fixture(scope="module")
def group(gpu: Accelerator) -> Iterator[None]:
    kind = gpu.device.type
    backend = dist.get_default_backend_for_device(kind) if kind in dist.Backend.default_device_backend_map else ""
    if not backend or not dist.is_backend_available(backend):
        pytest.skip(f"torch has no collectives for {kind!r} here")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=gpu.device)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=drawn, dtype=torch.float64), torch.randint(3, (8,), generator=drawn)


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_is_a_plain_loop(mode: str, gpu: Accelerator, group: None) -> None:
    plain = model()
    synced = copy.deepcopy(plain).to(gpu.device)
    plainly = torch.optim.SGD(plain.parameters(), lr=0.05)
    optimizer = torch.optim.SGD(synced.parameters(), lr=0.05)
    sync = isthmus.sync.attach(synced, optimizer, mode=mode, period=3)
    for step in range(STEPS):
        inputs, labels = batch(step)
        plainly.zero_grad()
        nn.functional.cross_entropy(plain(inputs), labels).backward()
        plainly.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(synced(inputs.to(gpu.device)), labels.to(gpu.device)).backward()
        sync.step()
    sync.close()
    if mode in ("outer", "streaming"):  # their outer step has a momentum of its own
        assert all(torch.isfinite(p).all() for p in synced.parameters())
        return
    for one, other in zip(plain.parameters(), synced.parameters(), strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=0, atol=1e-9)
