"""Values between processes of one machine: tensors are in shared memory, and messages only refer to them.

The memory is anonymous: it exists from before executors are forked until the last of them ends, and leaves no file
behind. It is overwritten in every round, so its pages are allocated once.

Coordinator to executors: one `SharedBroadcast` for the broadcast, written when a phase opens. An executor that still
trains for a closed phase then reads a mixture, but results for a closed phase are ignored.

Executor to coordinator: a `SharedAccumulator` each, which holds the executor's partial sums. It is overwritten only
after the coordinator has released the published sums: an executor may get more clients of a phase before the
coordinator has read its message.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.admission import Form
from isthmus.federated.fixed_point import BYTES_PER_NUMBER
from isthmus.federated.parallel_for import parallel_chunks
from isthmus.training.layout import TensorHeader, header_of, in_a_row, unpack

ALIGNMENT_BYTES = 64
LOOK_S = 0.0005


def _shared(size_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), dtype=torch.uint8)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _copy(place: Tensor, numbers: Tensor) -> None:
    def some(start: int, stop: int) -> None:
        place[start:stop].copy_(numbers[start:stop])

    parallel_chunks(some, len(place))


class SharedMemory(NamedTuple):
    """Memory that an executor shares with its coordinator."""

    broadcast_memory: SharedBroadcast
    accumulator: SharedAccumulator


class SharedBroadcast:
    """Room for one broadcast, which the coordinator writes and executors read."""

    def __init__(self, like: Mapping[str, Tensor], times: int = 1) -> None:
        """Large enough for so many times tensors such as these."""
        self._bytes = _shared(times * sum(_aligned(t.numel() * t.element_size()) for t in like.values()))

    def put(self, tensors: Mapping[str, Tensor]) -> tuple[TensorHeader, ...] | None:
        """Write them; returns what `get` needs. None, and nothing written, where they do not fit."""
        headers = tuple(header_of(name, t) for name, t in tensors.items())
        if sum(_aligned(h.nbytes) for h in headers) > len(self._bytes):
            return None
        for place, tensor in zip(self._places(headers), tensors.values(), strict=True):
            _copy(place, in_a_row(tensor))
        return headers

    def get(self, headers: Sequence[TensorHeader]) -> dict[str, Tensor]:
        """The tensors where they lie, until the next ones are put."""
        places = self._places(headers)
        return {header.name: unpack(place, header) for header, place in zip(headers, places, strict=True)}

    def _places(self, headers: Sequence[TensorHeader]) -> list[Tensor]:
        found: list[Tensor] = []
        at = 0
        for header in headers:
            dtype: torch.dtype = getattr(torch, header.dtype)
            found.append(self._bytes[at : at + header.nbytes].view(dtype))
            at += _aligned(header.nbytes)
        return found


class SharedAccumulator:
    """Where one executor adds up, and the coordinator reads."""

    def __init__(self, passes: Sequence[Mapping[str, Form]]) -> None:
        """`passes` are the forms of the values that each pass sums. They use the same memory, one after another."""
        sizes = [{name: math.prod(form.shape) for name, form in forms.items()} for forms in passes]
        needed = max((sum(_aligned(BYTES_PER_NUMBER * n) for n in one.values()) for one in sizes), default=0)
        memory = _shared(ALIGNMENT_BYTES + needed)
        self._counts = memory[:ALIGNMENT_BYTES].view(torch.int64)
        self._counts.zero_()
        self.totals: list[dict[str, Tensor]] = []  # each summed value's memory, int64 [numbers], for each pass
        for one in sizes:
            at, totals = ALIGNMENT_BYTES, dict[str, Tensor]()
            for name, numbers in one.items():
                totals[name] = memory[at : at + BYTES_PER_NUMBER * numbers].view(torch.int64)
                at += _aligned(BYTES_PER_NUMBER * numbers)
            self.totals.append(totals)

    def publish(self) -> None:
        """The executor: what lies here is for the coordinator now."""
        self._counts[0] += 1

    def release(self) -> None:
        """The coordinator: the first sums that were published has been read, or never will be."""
        self._counts[1] += 1

    def wait(self, timeout_s: float) -> None:
        """The executor: until all sums are released. PeerError after `timeout_s`."""
        by_s = time.monotonic() + timeout_s
        while int(self._counts[0]) != int(self._counts[1]):
            if time.monotonic() > by_s:
                raise PeerError(f"coordinator: has not read the last sums for {timeout_s:g} s")
            time.sleep(LOOK_S)
