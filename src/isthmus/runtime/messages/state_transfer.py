"""Messages with states of stages, between devices: a joining device gets the state of the run before it takes part; a
stage begins from what others give; snapshots go to another device, for recovery after a loss."""

from __future__ import annotations

from typing import Literal

from isthmus.runtime.messages.assignment import Peer
from isthmus.runtime.messages.message import Message
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader
from isthmus.wire_types import Amount, Count, Distinct, Many, Name, Place, Shape, Table, Text


class OfTransfer(Message, frozen=True, kw_only=True):
    """A message of one state transfer of the run: messages of another one that are still under way are dropped."""

    epoch: Count = 0
    number: Count


# Coordinator to device


class ReceiveStateMessage(OfTransfer, frozen=True, kw_only=True):
    """Get parts of these devices' states after `step` steps from them, and gradients to repeat their steps with."""

    step: Count
    peers: Many[Peer]  # the donors
    donated: Table[Name, Table[Text, Shape]]  # shapes of the parts that each device gives
    trained: Distinct[Text]  # those of the parameters' names that optimizers update
    config: EngineConfig


# Between two devices


class FollowHello(OfTransfer, frozen=True, kw_only=True):
    """First on a connection: the joining device gets the other one's state and gradients over it."""

    device: Name


class StateMessage(OfTransfer, frozen=True, kw_only=True):
    """The state after `step` steps begins, or the gradients that led to it; bytes follow in stretches."""

    of: Name
    kind: Literal["state", "gradients"]
    step: Count
    headers: Many[TensorHeader]


class StatePart(OfTransfer, frozen=True, kw_only=True):
    """The next stretch, as one tensor of bytes."""

    of: Name
    offset: Amount


StateTransferMessage = ReceiveStateMessage | FollowHello | StateMessage | StatePart


class SnapshotMessage(Message, frozen=True, kw_only=True):
    """A snapshot of the sender's stage begins; its bytes follow in stretches."""

    source: Place
    epoch: Count = 0
    step: Count
    headers: Many[TensorHeader]  # headers of the tensors in the buffer


class SnapshotPart(Message, frozen=True, kw_only=True):
    """The next stretch of the buffer, as one tensor of bytes."""

    source: Place
    epoch: Count = 0
    step: Count
    offset: Amount


class StateHello(Message, frozen=True, kw_only=True):
    """First on a connection for state: the device asks for these parts of the state that the epoch begins from."""

    device: Name
    epoch: Count = 0
    parts: Distinct[Text]


class GivenPart(Message, frozen=True, kw_only=True):
    """A part of the state after `step` steps: its tensors."""

    epoch: Count = 0
    step: Count
    part: Text


RecoveryMessage = SnapshotMessage | SnapshotPart | StateHello | GivenPart
