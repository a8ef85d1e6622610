"""All messages. Each receiver states which it accepts."""

from __future__ import annotations

from isthmus.runtime.messages.data import DataMessage
from isthmus.runtime.messages.federated import FederatedMessage
from isthmus.runtime.messages.fleet import FleetMessage
from isthmus.runtime.messages.probe import ProbeMessage
from isthmus.runtime.messages.recovery import FetchedMessage, InventoryMessage, RecoveryMessage, SnapshotCopiedMessage
from isthmus.runtime.messages.relay import RelayMessage
from isthmus.runtime.messages.run import Failed, Heartbeat, ReadyMessage, ReportMessage, RunMessage
from isthmus.runtime.messages.site import SiteMessage
from isthmus.runtime.messages.state_transfer import (
    StateMessage,
    StatePart,
    StateReceivedMessage,
    StateTransferMessage,
    TransferEndedMessage,
)

AnyMessage = (
    RunMessage
    | FederatedMessage
    | FleetMessage
    | ProbeMessage
    | RecoveryMessage
    | StateTransferMessage
    | SiteMessage
    | RelayMessage
    | DataMessage
)

FROM_DEVICES = (
    ReadyMessage
    | ReportMessage
    | Failed
    | Heartbeat
    | InventoryMessage
    | FetchedMessage
    | SnapshotCopiedMessage
    | StateMessage
    | StatePart
    | StateReceivedMessage
    | TransferEndedMessage
)
"""What devices tell the coordinator of a run."""
