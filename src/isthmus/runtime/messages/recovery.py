"""Messages for recovery after the loss of a device: snapshots, inventories and state."""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.runtime.messages.message import Message
from isthmus.training.layout import TensorHeader

NotNegative = Annotated[int, msgspec.Meta(ge=0)]

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
