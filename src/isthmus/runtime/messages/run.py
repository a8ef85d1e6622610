"""Messages of a run, between its devices and with their coordinator; and those that set up a connection between two
devices, relayed by the coordinator, or of several streams."""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.protocol.recovery import StateHolding
from isthmus.protocol.run_messages import (
    Arrived,
    DeviceOrder,
    DeviceReport,
    PartsArrived,
    RunOrder,
    WeightsLacked,
    WeightsRead,
)
from isthmus.runtime.messages.assignment import Assignment, Peer
from isthmus.runtime.messages.message import Message
from isthmus.wire_types import Amount, Count, Host, Id, Many, Name, Place, Port, Seconds, Text

# Between two devices


class Hello(Message, frozen=True, kw_only=True):
    """First on a new link: which stage dials, in which epoch."""

    stage: Place
    epoch: Count = 0


class ToPeer(Message, frozen=True, kw_only=True):
    body: Arrived | PartsArrived


class Credit(Message, frozen=True, kw_only=True):
    """The receiver has taken this many bytes out of its buffers: the sender may send as many more."""

    size_bytes: Amount


# Device to coordinator


class ToCoordinator(Message, frozen=True, kw_only=True):
    """With `ItemReported` of a save comes the stage's part of the checkpoint, with `WeightsRead` weights."""

    body: DeviceReport | WeightsRead | WeightsLacked


class JoinRun(Message, frozen=True, kw_only=True):
    """First on a connection for a run: which device this is, and where it listens for others."""

    device: Name
    host: Host
    port: Port
    holdings: Many[StateHolding] = ()  # states that a device which was here before still has in memory


class Heartbeat(Message, frozen=True, kw_only=True):
    """Both ways: still here."""


# Coordinator to device


class ToDevice(Message, frozen=True, kw_only=True):
    """With `PlaceWeights` come values of the stage's variables and optimizer state, by the module's own names; with the
    exchange of `OpenItem`, amounts that are added to parameters."""

    body: DeviceOrder | RunOrder
    peers: Many[Peer] = ()  # the other devices that the body names as donors or receivers of state


class AssignMessage(Message, frozen=True, kw_only=True):
    assignment: Assignment


RunMessage = Hello | ToPeer | Credit | JoinRun | ToCoordinator | Heartbeat | AssignMessage | ToDevice


MOST_ADDRESSES = 4
OpenPort = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PublicAddresses = Annotated[tuple[tuple[Host, OpenPort], ...], msgspec.Meta(max_length=MOST_ADDRESSES)]
"""Host and port, at which a device may be reached from beyond its own network."""


class RelayWait(Message, frozen=True, kw_only=True):
    """Device to coordinator, the first message on the connection: another device may reach this one by it, for
    `run`."""

    addresses: PublicAddresses = ()  # that no NAT changes, as those of IPv6. The coordinator adds the one that it sees.
    direct: bool = True  # whether a direct connection may be tried; else the relay alone


class RelayConnect(Message, frozen=True, kw_only=True):
    """Device to coordinator, the first message on the connection: connect this device to the one with this id, for
    `run`."""

    id: Id
    addresses: PublicAddresses = ()
    direct: bool = True


class Rendezvous(Message, frozen=True, kw_only=True):
    """Coordinator to both devices: connect to the other one, both at the same time. If that fails, the device that
    asked sends `RelayReady`; else it closes this connection."""

    addresses: PublicAddresses
    after_s: Seconds  # to wait before the first attempt: whose message takes longer waits less


class RelayReady(Message, frozen=True, kw_only=True):
    """Coordinator to both devices, and back from the one that was waiting: from the next byte on, the connection leads
    to the other device. `failure` is the reason if it does not. From the device that asked: relay, there is no direct
    way."""

    failure: Text = ""


class StreamHello(Message, frozen=True, kw_only=True):
    """Device to device, first on each of several connections that are one link."""

    stream_group: Id  # which link: a random name
    number: Place
    of: Place


RelayMessage = RelayWait | RelayConnect | Rendezvous | RelayReady | StreamHello
