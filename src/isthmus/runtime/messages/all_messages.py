"""All messages. Each receiver states which it accepts."""

from __future__ import annotations

from isthmus.runtime.messages.data import DataMessage
from isthmus.runtime.messages.federated import FederatedMessage
from isthmus.runtime.messages.fleet import FleetMessage
from isthmus.runtime.messages.probe import ProbeMessage
from isthmus.runtime.messages.recovery import RecoveryMessage
from isthmus.runtime.messages.relay import RelayMessage
from isthmus.runtime.messages.run import Heartbeat, RunMessage, ToCoordinator
from isthmus.runtime.messages.site import SiteMessage
from isthmus.runtime.messages.state_transfer import (
    StateMessage,
    StatePart,
    StateTransferMessage,
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

FROM_DEVICES = ToCoordinator | Heartbeat | StateMessage | StatePart
"""What devices tell the coordinator of a run."""
