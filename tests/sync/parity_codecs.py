"""Cases of several workers that pack what they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
import torch.distributed as dist
from parity_workers import OPTIMIZERS, STEPS, apart, loss_of, model  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

import isthmus.sync
from isthmus.sync import Options
from isthmus.sync.averaging import Averager
from isthmus.training.compression import Bf16, Codec, ErrorFeedback, Int8, Sparse2Bit


class Short:
    """float64 as float16: a quarter of the bytes, and an error to make good."""

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        return tensor.to(torch.float16).view(torch.uint8)

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        return payload.view(torch.float16).to(dtype).view(tuple(shape))


class Exact(Short):
    """All the bits."""

    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        return tensor.clone().view(torch.uint8)

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        return payload.view(dtype).view(tuple(shape))


def packed(found: dict[str, float]) -> None:
    """Packed deltas: without loss nothing changes; with loss the error is made good, and bytes are saved."""
    for mode in ("outer", "streaming"):
        made: list[nn.Module] = []
        sent: list[int] = []
        for codec in (None, Exact(), Short()):
            one = model()
            optimizer = OPTIMIZERS["momentum"](one)
            sync = isthmus.sync.attach(one, optimizer, mode=mode, period=3, codec=codec)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(one, step, dist.get_rank()).backward()
                sync.step()
            sync.close()
            made.append(one)
            sent.append(sync.statistics().sent_bytes)
        found[f"packed without loss: {mode}"] = apart(made[1], made[0])
        found[f"packed with loss, little is lost: {mode}"] = 0.0 if 0 < apart(made[2], made[0]) < 1e-2 else 1.0
        found[f"packed with loss, a quarter of the bytes: {mode}"] = abs(4 * sent[2] / sent[1] - 1)


def codecs(found: dict[str, float]) -> None:
    """The codecs of a run, on deltas: workers end together, near to where they end without, with the bytes they say."""
    codecs = {"bf16": (Bf16(), 0.02), "int8": (Int8(), 0.02), "sparse2bit": (Sparse2Bit(2.0), 0.5)}
    for mode in ("outer", "streaming"):
        exact, _ = _with_codec(mode, None)
        for name, (codec, near) in codecs.items():
            made, sync = _with_codec(mode, codec)
            found[f"{name}, {mode}: near"] = 0.0 if 0 < apart(made, exact) < near else 1.0
            sizes = sync.statistics().layer_bytes.values()
            elements = sum(sizes) // 8
            if mode == "outer":
                found[f"{name}, {mode}: together"] = spread(made)
                said = 8 * codec.wire_bytes(elements, torch.float64)
                # Layers are aligned: gaps between them are sent as well.
                found[f"{name}, {mode}: bytes"] = 0.0 if 1 <= sync.statistics().sent_bytes / said < 1.02 else 1.0


def recipe(found: dict[str, float]) -> None:
    """Two bits, an error that fades, and Nesterov outside: as all replicas in one process compute it."""
    codec, decay = Sparse2Bit(4.0), 0.95
    made = model()
    options = Options(outer_rate=0.8, outer_momentum=0.5, error_decay=decay)
    optimizer = OPTIMIZERS["adamw"](made)
    sync = isthmus.sync.attach(made, optimizer, mode="outer", period=3, codec=codec, options=options)
    replicas = [model() for _ in range(dist.get_world_size())]
    optimizers = [OPTIMIZERS["adamw"](replica) for replica in replicas]
    feedbacks = [ErrorFeedback(codec, decay) for _ in replicas]
    common = nn.Parameter(_flat(made))
    outer = torch.optim.SGD([common], 0.8, 0.5, nesterov=True)
    for step in range(24):
        optimizer.zero_grad()
        loss_of(made, step, dist.get_rank()).backward()
        sync.step()
        for worker, (replica, own) in enumerate(zip(replicas, optimizers, strict=True)):
            own.zero_grad()
            loss_of(replica, step, worker).backward()
            own.step()
        if step % 3 == 2:
            deltas = [common.detach() - _flat(replica) for replica in replicas]
            payloads = [one.encode("delta", delta) for one, delta in zip(feedbacks, deltas, strict=True)]
            common.grad = torch.stack([codec.decode(p, common.shape, common.dtype) for p in payloads]).mean(0)
            outer.step()
            for replica in replicas:
                nn.utils.vector_to_parameters(common.detach().clone(), replica.parameters())
    sync.close()
    found["recipe of packed deltas: outer"] = apart(made, replicas[0])


def _flat(made: nn.Module) -> Tensor:
    """All parameters; only the last leaves a gap to the next 64 bytes, which is packed with them."""
    flat = nn.utils.parameters_to_vector(made.parameters()).detach()
    return nn.functional.pad(flat, (0, -len(flat) % 8))


def _with_codec(mode: str, codec: Codec | None) -> tuple[nn.Module, isthmus.sync.Sync]:
    made = model()
    optimizer = OPTIMIZERS["momentum"](made)
    options = Options(outer_rate=1.0, outer_momentum=0.0)
    sync = isthmus.sync.attach(made, optimizer, mode=mode, period=3, codec=codec, options=options)
    for step in range(24):
        optimizer.zero_grad()
        loss_of(made, step, dist.get_rank()).backward()
        sync.step()
    sync.close()
    return made, sync


def spread(made: nn.Module) -> float:
    """The largest difference between workers."""
    return _apart_between_workers(torch.cat([p.detach().flatten() for p in made.parameters()]))


def _apart_between_workers(flat: Tensor) -> float:
    everyone = [torch.zeros_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return max(float((flat - other).abs().max()) for other in everyone)


def sums(found: dict[str, float]) -> None:
    """Weighted averages of any size, several on the way at once, in pieces too: right, and the same bits everywhere."""
    assert dist.group.WORLD is not None
    workers, rank = dist.get_world_size(), dist.get_rank()
    shares = [2 * (worker + 1) / (workers * (workers + 1)) for worker in range(workers)]
    averager = Averager(dist.group.WORLD, weight=rank + 1.0)
    for piece_bytes in (1 << 24, 400):
        drawn = [
            [
                torch.randn(size, generator=torch.Generator().manual_seed(100 * size + worker), dtype=torch.float64)
                for size in (1, 2, 3, 5, 1000, 4099)
            ]
            for worker in range(workers)
        ]
        own = [tensor.clone() for tensor in drawn[rank]]
        with mock.patch("isthmus.sync.averaging.LARGEST_BYTES", piece_bytes):
            pendings = [averager.start([tensor]) for tensor in own]
        for pending in reversed(pendings):
            pending.wait()
        for tensor, *of in zip(own, *drawn, strict=True):
            right = sum((share * one for share, one in zip(shares, of, strict=True)), torch.zeros_like(tensor))
            found[f"sums of {len(tensor)} in pieces of {piece_bytes}: right"] = float((tensor - right).abs().max())
            found[f"sums of {len(tensor)} in pieces of {piece_bytes}: alike"] = _apart_between_workers(tensor)
    averager.close()
