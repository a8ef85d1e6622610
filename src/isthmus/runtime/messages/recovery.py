"""Messages for recovery after the loss of a device: snapshots, inventories and state."""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.protocol.recovery import StateHolding
from isthmus.runtime.messages.message import Message
from isthmus.training.layout import TensorHeader

NotNegative = Annotated[int, msgspec.Meta(ge=0)]

# Between two devices


class SnapshotMessage(Message, frozen=True, kw_only=True):
    """A snapshot of the sender's stage begins; its bytes follow in stretches."""

    source: int
    step: NotNegative
    headers: tuple[TensorHeader, ...]
    """Of what the buffer holds."""


class SnapshotPart(Message, frozen=True, kw_only=True):
    """The next stretch of the buffer, as one tensor of bytes."""

    source: int
    step: NotNegative
    offset: NotNegative


# Coordinator to device


class PauseMessage(Message, frozen=True, kw_only=True):
    """Stop, forget the stage, and say what you hold. The epoch is the new one."""


class FetchMessage(Message, frozen=True, kw_only=True):
    """Give these parts of your state after `step` steps."""

    step: int
    parts: frozenset[str]


class RetireMessage(Message, frozen=True, kw_only=True):
    """There is a complete snapshot of this step: those before may be forgotten."""

    step: int


# Device to coordinator


class InventoryMessage(Message, frozen=True, kw_only=True):
    holdings: tuple[StateHolding, ...]


class FetchedMessage(Message, frozen=True, kw_only=True):
    """The tensors that were fetched."""

    step: int


class SnapshotCopiedMessage(Message, frozen=True, kw_only=True):
    """The device holds a copy of another one's part of a snapshot."""

    of: str
    step: int


RecoveryMessage = (
    SnapshotMessage
    | SnapshotPart
    | PauseMessage
    | FetchMessage
    | RetireMessage
    | InventoryMessage
    | FetchedMessage
    | SnapshotCopiedMessage
)
