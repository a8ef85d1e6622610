"""Sums and parts among the ranks of an island, where their tensors lie.

Torch's own backend for the accelerator carries them (NCCL, for CUDA); where it has none, they go through the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.accelerators import Accelerator
from isthmus.accelerators.copies import to_device, to_host
from isthmus.errors import RankLost

HOST_BACKEND = "gloo"
_Collective = Callable[[Tensor, Tensor], object]
_NEW_NAMES = hasattr(dist, "all_gather_single")  # torch 2.13 warns of those that torch 2.11 has
_ALL_GATHER = cast(_Collective, getattr(dist, "all_gather_single" if _NEW_NAMES else "all_gather_into_tensor"))
_REDUCE_SCATTER = cast(_Collective, getattr(dist, "reduce_scatter_single" if _NEW_NAMES else "reduce_scatter_tensor"))


def backends_for(kind: str) -> str:
    """For `init_process_group`: of tensors in host memory, and of those on accelerators of this kind."""
    own = dist.Backend.default_device_backend_map.get(kind)
    return HOST_BACKEND if own in (None, HOST_BACKEND) else f"cpu:{HOST_BACKEND},{kind}:{own}"


@contextmanager
def together() -> Generator[None]:
    """Something is done with other ranks here: what the group raises, RuntimeError, becomes RankLost."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        raise RankLost(f"a rank of this device is gone: {' '.join(str(e).split())[:200]}") from e


class Collectives:
    """Collectives of the process group that this process is in. All ranks call the same, in the same order.

    A part of a tensor is the rank's stretch of its elements in a row, with zeros behind the last, so that all parts
    have the same length.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._accelerator = accelerator
        kind = accelerator.device.type
        self._direct = kind == "cpu" or backends_for(kind) != HOST_BACKEND

    def part(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """Return a rank's part, by default this rank's: a copy, flat."""
        length = part_length(whole.numel(), self.count)
        first = min((self.rank if rank is None else rank) * length, whole.numel())
        found = whole.new_zeros(length)
        mine = whole.detach().reshape(-1)[first : first + length]
        found[: mine.numel()] = mine
        return found

    def whole(self, part: Tensor, shape: torch.Size) -> Tensor:
        """From the parts of all ranks."""
        sent = self._out(part.detach())
        flat = torch.empty(self.count * sent.numel(), dtype=sent.dtype, device=sent.device)
        with together():
            _ALL_GATHER(flat, sent)
        return self._back(flat)[: math.prod(shape)].view(shape)

    def summed_part(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum of all ranks' tensors."""
        length = part_length(whole.numel(), self.count)
        padded = whole.new_zeros(self.count * length)
        padded[: whole.numel()] = whole.reshape(-1)
        sent = self._out(padded)
        found = torch.empty(length, dtype=sent.dtype, device=sent.device)
        with together():
            _REDUCE_SCATTER(found, sent)
        return self._back(found)

    def sum(self, flat: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, on each of them."""
        sent = self._out(flat.clone())
        with together():
            dist.all_reduce(torch.view_as_real(sent) if sent.is_complex() else sent)
        return self._back(sent)

    def sum_to_first(self, flat: Tensor) -> Tensor:
        """On rank 0; elsewhere anything."""
        sent = self._out(flat)
        with together():
            dist.reduce(torch.view_as_real(sent) if sent.is_complex() else sent, 0)
        return self._back(sent)

    def _out(self, tensor: Tensor) -> Tensor:
        return tensor if self._direct else to_host(self._accelerator, {"": tensor})[""]

    def _back(self, tensor: Tensor) -> Tensor:
        return tensor if self._direct else to_device(self._accelerator, tensor)


def part_length(elements: int, count: int) -> int:
    return -(-elements // count)
