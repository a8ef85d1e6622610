"""Events between a running stage and its device's process."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from torch import Tensor

from isthmus.protocol.finite import NonFinite
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.trace import Span
from isthmus.training.snapshot import Snapshot


class ItemReport(msgspec.Struct, frozen=True):
    """A device's report of a finished item."""

    item: int
    loss: float | None
    count: float | None
    spans: tuple[Span, ...]
    late_s: float
    state: Snapshot | None
    """What a checkpoint holds of the stage; it may still be being copied."""
    non_finite: NonFinite | None


class CoordinatorMessage(NamedTuple):
    """What the coordinator said that is nothing for a stage at work."""

    message: AnyMessage
    tensors: list[Tensor]
