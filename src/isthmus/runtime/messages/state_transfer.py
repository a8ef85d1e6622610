"""Messages with states of stages: a joining device gets the state of the run before it takes part; snapshots go to
another device, for recovery after a loss."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from isthmus.runtime.messages.message import Message
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader

NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class OfTransfer(Message, frozen=True, kw_only=True):
    """Of one following among the run's: what another one still has under way is dropped."""

    epoch: int = 0
    number: NotNegative


# Coordinator to device


class ReceiveStateMessage(OfTransfer, frozen=True, kw_only=True):
    """Parts of these devices' states will come, and gradients to repeat their steps with."""

    donated: dict[str, dict[str, tuple[int, ...]]]
    """By device, the shapes of what it gives."""
    trained: frozenset[str]
    """Of these names, those that optimizers update."""
    config: EngineConfig


# Device to coordinator, and on to the joining devices


class StateMessage(OfTransfer, frozen=True, kw_only=True):
    """The state after `step` steps begins, or the gradients that led to it; bytes follow in stretches."""

    of: str
    kind: Literal["state", "gradients"]
    step: NotNegative
    headers: tuple[TensorHeader, ...]


class StatePart(OfTransfer, frozen=True, kw_only=True):
    """The next stretch, as one tensor of bytes."""

    of: str
    offset: NotNegative


StateTransferMessage = ReceiveStateMessage | StateMessage | StatePart


# Between two devices


class SnapshotMessage(Message, frozen=True, kw_only=True):
    """A snapshot of the sender's stage begins; its bytes follow in stretches."""

    source: int
    epoch: int = 0
    step: NotNegative
    headers: tuple[TensorHeader, ...]
    """Of what the buffer holds."""


class SnapshotPart(Message, frozen=True, kw_only=True):
    """The next stretch of the buffer, as one tensor of bytes."""

    source: int
    epoch: int = 0
    step: NotNegative
    offset: NotNegative


RecoveryMessage = SnapshotMessage | SnapshotPart
