"""All that may travel: who receives says what it takes."""

from __future__ import annotations

from isthmus.runtime.messages.data import DataMessage
from isthmus.runtime.messages.federated import FederatedMessage
from isthmus.runtime.messages.fleet import FleetMessage
from isthmus.runtime.messages.following import (
    FollowedMessage,
    FollowingEndedMessage,
    FollowingMessage,
    LentMessage,
    LentPart,
)
from isthmus.runtime.messages.probe import ProbeMessage
from isthmus.runtime.messages.recovery import GivenMessage, HeldMessage, MirroredMessage, RecoveryMessage
from isthmus.runtime.messages.relay import RelayMessage
from isthmus.runtime.messages.run import Failed, Heartbeat, ReadyMessage, ReportMessage, RunMessage
from isthmus.runtime.messages.site import SiteMessage

AnyMessage = (
    RunMessage | FederatedMessage | FleetMessage | ProbeMessage | RecoveryMessage | FollowingMessage | SiteMessage
    | RelayMessage | DataMessage
)  # fmt: skip

FROM_DEVICES = (
    ReadyMessage | ReportMessage | Failed | Heartbeat | HeldMessage | GivenMessage | MirroredMessage | LentMessage
    | LentPart | FollowedMessage | FollowingEndedMessage
)  # fmt: skip
"""What devices tell the coordinator of a run."""
