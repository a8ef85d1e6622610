"""All that may travel: who receives says what it takes."""

from __future__ import annotations

from isthmus.runtime.messages.data import DataMessage
from isthmus.runtime.messages.federated import FederatedMessage
from isthmus.runtime.messages.fleet import FleetMessage
from isthmus.runtime.messages.following import FollowingMessage
from isthmus.runtime.messages.probe import ProbeMessage
from isthmus.runtime.messages.recovery import RecoveryMessage
from isthmus.runtime.messages.relay import RelayMessage
from isthmus.runtime.messages.run import RunMessage
from isthmus.runtime.messages.site import SiteMessage

AnyMessage = (
    RunMessage | FederatedMessage | FleetMessage | ProbeMessage | RecoveryMessage | FollowingMessage | SiteMessage
    | RelayMessage | DataMessage
)  # fmt: skip
