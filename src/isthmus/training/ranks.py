"""What the ranks of an island say to each other, two by two.

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
from isthmus.graph.partition import StageGraph
from isthmus.training.collectives import Collectives
from isthmus.training.engine import EngineConfig
from isthmus.training.sharded import Whole

Tensors = Sequence[Mapping[str, Tensor]]


class StageSetUp(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to know to build its engine."""

    train: StageGraph
    evaluation: StageGraph
    config: EngineConfig
    """Of the device as a whole."""
    recompute: bool = False
    frozen: bool = False
    threads: int = 1
    """Torch threads of each rank."""
    sharded: bool = False
    """Whether each rank owns its part of the parameters."""


class _Piece(msgspec.Struct, frozen=True):
    """One tensor that follows a command."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Kind = Literal[
    "stage", "forward", "backward", "evaluate", "sum", "values", "answer", "end",
    "collect", "update", "skip", "state", "whole", "add", "put",
]


class Command(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    step: int = 0
    micro_batch: int = 0
    groups: tuple[tuple[_Piece, ...], ...] = ()
    """Of a backward, a group for each consumer stage; else one."""
    names: tuple[str, ...] = ()
    """Of a sum, or of what is to be put together: parameters (op names)."""
    what: Whole = "parameters"
    """To be put together."""
    count: float | None = None
    """Of a collect: the loss's."""
    loss_scale: float = 1.0
    """Of a backward, where the loss has one."""
    stage: StageSetUp | None = None
    told: tuple[float, float] | None = None
    """Of an answer: loss and count of the share."""
    failed: tuple[str, str] | None = None
    """Of an answer: what raised, and why."""


class Ranks:
    """The process group, for commands and tensors between rank 0 and another one. Errors of the group are raised as
    they come: a rank that is gone ends the device."""

    def __init__(self, accelerator: Accelerator = HOST) -> None:
        """`accelerator` is this rank's."""
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.accelerator = accelerator
        self.collectives = Collectives(accelerator)
        self.broken = False
        """Whether a rank may wait for a collective that never comes: another session is needed."""

    def say(self, to: int, command: Command, tensors: Tensors = ()) -> None:
        pieces = tuple(
            tuple(_Piece(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in group.items())
            for group in tensors
        )
        header = msgspec.msgpack.encode(msgspec.structs.replace(command, groups=pieces))
        dist.send(torch.tensor([len(header)]), to)
        dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), to)
        for group in tensors:
            for tensor in to_host(self.accelerator, group).values():
                if tensor.numel():
                    dist.send(tensor.contiguous(), to)

    def hear(self, source: int) -> tuple[Command, list[dict[str, Tensor]]]:
        """Its tensors are in host memory."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source)
        header = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(header, source)
        command = msgspec.msgpack.decode(header.numpy().tobytes(), type=Command)
        groups: list[dict[str, Tensor]] = []
        for pieces in command.groups:
            found: dict[str, Tensor] = {}
            for piece in pieces:
                found[piece.name] = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype))
                if found[piece.name].numel():
                    dist.recv(found[piece.name], source)
            groups.append(found)
        return command, groups

    def end(self) -> None:
        """From rank 0: the others are done."""
        for rank in range(1, self.count):
            self.say(rank, Command(kind="end"))
