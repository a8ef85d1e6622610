"""Small facts between workers, as msgpack in byte tensors: never pickled, decoded into the type that is expected."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.reading import parse_msgpack

T = TypeVar("T")


def gather(value: T, kind: type[T], group: dist.ProcessGroup) -> list[T]:
    """Every worker's value, in the order of their ranks in the group. Raises PeerError for what cannot be decoded."""
    workers, device = dist.get_world_size(group), message_device(group)
    own = to_bytes(value).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(workers)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    found = [torch.zeros_like(padded) for _ in range(workers)]
    dist.all_gather(found, padded, group=group)
    return [_of_worker(data[:n], kind, rank) for rank, (data, n) in enumerate(zip(found, lengths, strict=True))]


def broadcast(value: T | None, kind: type[T], group: dist.ProcessGroup) -> T:
    """The value of the group's first worker; the others give None."""
    device, source = message_device(group), dist.get_global_rank(group, 0)
    own = to_bytes(value).to(device)
    size = torch.tensor([len(own)], device=device)
    dist.broadcast(size, source, group=group)
    data = own if value is not None else torch.zeros(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return _of_worker(data, kind, 0)


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of the group's own messages must lie."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def to_bytes(value: object) -> Tensor:
    """A struct or built-in value, uint8 [bytes]."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)


def from_bytes(data: Tensor, kind: type[T]) -> T:
    """Return the value that `to_bytes` was given. Raises UserError for anything else."""
    return parse_msgpack(data.cpu().numpy().tobytes(), kind, f"expected {kind}")


def _of_worker(data: Tensor, kind: type[T], rank: int) -> T:
    try:
        return from_bytes(data, kind)
    except UserError as error:
        raise PeerError(f"worker {rank}: sent what is no {kind}: {error}. Do all run the same version?") from None
