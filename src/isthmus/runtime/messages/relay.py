"""Messages that set up a connection between two devices: relayed by the coordinator, or of several streams."""

from __future__ import annotations

from isthmus.runtime.messages.message import Message


class RelayWait(Message, frozen=True, kw_only=True):
    """Device to coordinator, the first message on the connection: the relay may give this connection to another device
    that wants to reach this one, for `run`."""


class RelayConnect(Message, frozen=True, kw_only=True):
    """Device to coordinator, the first message on the connection: connect this device to the one with this id, for
    `run`."""

    id: str


class RelayReady(Message, frozen=True, kw_only=True):
    """Coordinator to both devices, and back from the one that was waiting: from the next byte on, the connection leads
    to the other device. `failure` is the reason if it does not."""

    failure: str = ""


class StreamHello(Message, frozen=True, kw_only=True):
    """Device to device, first on each of several connections that are one link."""

    stream_group: str
    """Which link: a random name."""
    number: int
    of: int


RelayMessage = RelayWait | RelayConnect | RelayReady | StreamHello
