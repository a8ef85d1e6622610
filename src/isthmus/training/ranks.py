"""Messages between two ranks of an island.

What travels are raw tensors in host memory behind msgpack headers: torch's own object collectives pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import to_host
from isthmus.errors import RankLost, StepError
from isthmus.graph.partition import StageGraph
from isthmus.training.collectives import Collectives, together
from isthmus.training.engine import EngineConfig
from isthmus.training.faults import is_short_of_memory
from isthmus.training.sharded import Whole

Tensors = Sequence[Mapping[str, Tensor]]
_FAILURE = "failure"
BUCKET_BYTES = 16 << 20
"""Bytes up to which small tensors are sent together: each message costs a round through the group."""


class StageSetUp(msgspec.Struct, frozen=True, kw_only=True):
    """The settings from which a rank builds its engine."""

    train: StageGraph
    evaluation: StageGraph
    config: EngineConfig
    recompute: bool = False
    frozen: bool = False
    threads: int = 1  # torch threads of each rank
    sharded: bool = False  # whether each rank owns its part of the parameters


class _Piece(msgspec.Struct, frozen=True):
    """One tensor that follows a command."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Kind = Literal[
    "stage",
    "forward",
    "backward",
    "evaluate",
    "sum",
    "values",
    "answer",
    "end",
    "collect",
    "update",
    "skip",
    "state",
    "whole",
    "add",
    "put",
]


class Command(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    step: int = 0
    micro_batch: int = 0
    groups: tuple[tuple[_Piece, ...], ...] = ()
    """The gradients of a backward, a group for each consumer stage; else one group."""
    names: tuple[str, ...] = ()  # parameters (op names) of a sum, or those to be put together
    what: Whole = "parameters"  # to be put together
    count: float | None = None  # the count of the loss of a collect
    loss_scale: float = 1.0  # the scale of the loss of a backward, where it has one
    stage: StageSetUp | None = None
    loss_count: tuple[float, ...] | None = None  # loss and count of the share, in an answer
    failed: tuple[str, str] | None = None  # the exception's kind and reason, in an answer


class _Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank left, for rank 0."""

    rank: int
    what: str  # the action that failed, of a StepError; empty for other errors
    reason: str
    memory: bool


class Ranks:
    """The process group, for commands and tensors between rank 0 and another one. RankLost where one of them is gone;
    `cause` then knows why, if it could still say so."""

    def __init__(self, store: dist.Store, accelerator: Accelerator = HOST) -> None:
        """`accelerator` is this rank's. All ranks have the `store`."""
        self._store = store
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.accelerator = accelerator
        self.collectives = Collectives(accelerator)
        self.broken = False  # whether a rank may wait for a collective that never comes: another session is needed

    def leave(self, error: Exception) -> None:
        """Before this rank leaves the group for an error of its own: the first that does so is heard."""
        step = isinstance(error, StepError)
        failure = _Failure(
            rank=self.rank,
            what=error.what if step else "",
            memory=is_short_of_memory(error),
            reason=error.reason if step else f"{type(error).__name__}: {' '.join(str(error).split())[:500]}",
        )
        self._store.compare_set(_FAILURE, "", msgspec.json.encode(failure).decode())

    def cause(self, lost: RankLost) -> Exception:
        """The error of the rank that failed, as if it had been raised here; `lost` where it ended without a word."""
        self.broken = True
        if not self._store.check([_FAILURE]):
            return lost
        failure = msgspec.json.decode(self._store.get(_FAILURE), type=_Failure)
        if failure.what:
            return StepError(failure.what, failure.reason)
        loss_count = f"rank {failure.rank} of this device: {failure.reason}"
        return torch.OutOfMemoryError(loss_count) if failure.memory else RankLost(loss_count)

    def send(self, to: int, command: Command, tensors: Tensors = ()) -> None:
        pieces = tuple(
            tuple(_Piece(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in group.items())
            for group in tensors
        )
        header = msgspec.msgpack.encode(msgspec.structs.replace(command, groups=pieces))
        held = [tensor for group in tensors for tensor in to_host(self.accelerator, group).values()]
        with together():
            dist.send(torch.tensor([len(header)]), to)
            dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), to)
            for bucket in _buckets(held):
                dist.send(bucket[0].contiguous() if len(bucket) == 1 else _packed(bucket), to)

    def receive(self, source: int) -> tuple[Command, list[dict[str, Tensor]]]:
        """Its tensors are in host memory."""
        length = torch.zeros(1, dtype=torch.int64)
        _receive(length, source)
        header = torch.empty(int(length), dtype=torch.uint8)
        _receive(header, source)
        command = msgspec.msgpack.decode(header.numpy().tobytes(), type=Command)
        groups = [
            {piece.name: torch.empty(piece.shape, dtype=getattr(torch, piece.dtype)) for piece in pieces}
            for pieces in command.groups
        ]
        for bucket in _buckets([tensor for group in groups for tensor in group.values()]):
            if len(bucket) == 1:
                _receive(bucket[0], source)
                continue
            flat = torch.empty(sum(tensor.nbytes for tensor in bucket), dtype=torch.uint8)
            _receive(flat, source)
            for tensor, part in zip(bucket, flat.split([tensor.nbytes for tensor in bucket]), strict=True):
                _bytes_of(tensor).copy_(part)
        return command, groups

    def end(self) -> None:
        """From rank 0: the others are done."""
        for rank in range(1, self.count):
            self.send(rank, Command(kind="end"))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that travel as one message: in their order, without empty ones, as many as BUCKET_BYTES hold."""
    found: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        if tensor.nbytes > room or not found:
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(tensor)
        room -= tensor.nbytes
    return found


def _packed(bucket: Sequence[Tensor]) -> Tensor:
    return torch.cat([_bytes_of(tensor.contiguous()) for tensor in bucket])


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as uint8, in the same memory."""
    return tensor.view(-1).view(torch.uint8)


def _receive(tensor: Tensor, source: int) -> None:
    if tensor.numel():
        with together():
            dist.recv(tensor, source)
