"""All messages. Each receiver states which it accepts."""

from __future__ import annotations

import msgspec

from isthmus.runtime.messages.assignment import GenerationMessage, RecoveryMessage, StateTransferMessage
from isthmus.runtime.messages.decoupled import DecoupledMessage, FromReplica, ToReplica
from isthmus.runtime.messages.federated import FederatedMessage, FromExecutor, ToExecutor
from isthmus.runtime.messages.fleet import DataMessage, FleetMessage
from isthmus.runtime.messages.probe import ProbeMessage
from isthmus.runtime.messages.run import Heartbeat, RelayMessage, RunMessage, ToCoordinator, ToDevice, ToPeer

AnyMessage = (
    RunMessage
    | FederatedMessage
    | DecoupledMessage
    | FleetMessage
    | ProbeMessage
    | RecoveryMessage
    | StateTransferMessage
    | RelayMessage
    | DataMessage
    | GenerationMessage
)

FROM_DEVICES = ToCoordinator | Heartbeat  # messages that devices send the coordinator of a run


_Frame = ToDevice | ToCoordinator | ToPeer | ToExecutor | FromExecutor | ToReplica | FromReplica


def content(message: msgspec.Struct) -> msgspec.Struct:
    """The body of a frame that has one; else the message itself."""
    return message.body if isinstance(message, _Frame) else message
