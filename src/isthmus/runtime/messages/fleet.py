"""Messages between the fleet's coordinator and a joined device, with or without a run; and about data that stay on the
devices."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.data import DataSpec
from isthmus.data.description import DataDescription
from isthmus.runtime.messages.message import Message
from isthmus.runtime.messages.versions import Versions
from isthmus.training.engine_operators import EngineOperators
from isthmus.wire_types import Id, Name, Seconds, Text, Threads, WorkerRole

MOST_HARDWARE = 100  # characters of what a device's hardware is called
MOST_REQUEST_BYTES = 4096  # the most bytes of a signing request; one of Isthmus has about 250
MOST_CERTIFICATE_BYTES = 4096  # one by us has about 400
Certificate = Annotated[bytes, Meta(max_length=MOST_CERTIFICATE_BYTES)]
MOST_SECRET_BYTES = 64  # a ticket's has 16
MOST_STAGES = 1024  # the most stages of a plan at one device: each has a thread and a connection
MOST_NEW_DEVICES = 16  # devices of a machine that join with one ticket


class DevicePresent(Message, frozen=True, kw_only=True):
    """Device to coordinator, first on the connection: here, and this is what runs here."""

    versions: Versions
    computes: EngineOperators | None = None
    """The kind and operators of its engine. None for a site, which computes its own model."""
    hardware: Text = ""  # where it computes, as people call it; only shown
    working: Id = ""  # the run that a process of the device works for already


class Welcome(Message, frozen=True, kw_only=True):
    """The device is in the fleet, under this name."""

    device: Name
    timeout_s: Seconds  # the coordinator's timeout: a device that says nothing for so long is lost
    idle: Text = ""  # why a run that waits for others has nothing for it, in words


class Rejected(Message, frozen=True, kw_only=True):
    """The device cannot be in the fleet; trying again is of no use."""

    about: Literal["membership", "version"]
    reason: Text


class StartRun(Message, frozen=True, kw_only=True):
    """Take part in the run that the message names: a process of the device joins it on a connection of its own."""

    timeout_s: Seconds
    threads: Threads
    stages: Annotated[int, Meta(ge=1, le=MOST_STAGES)] = 1
    """How many of a plan's stages it may get at once: the process joins once for each, under a name of its own."""
    role: WorkerRole = "stage"


class StopRun(Message, frozen=True, kw_only=True):
    """The run is over: whatever still works for it is ended."""


class ProcessEnded(Message, frozen=True, kw_only=True):
    """Device to coordinator: its process for the run has ended otherwise than well."""

    how: Text


class Renew(Message, frozen=True, kw_only=True):
    """Device to coordinator: a signing request (DER) by the key that the device has."""

    request: Annotated[bytes, Meta(max_length=MOST_REQUEST_BYTES)]


class Renewed(Message, frozen=True, kw_only=True):
    certificate: Certificate  # DER


FleetMessage = DevicePresent | Welcome | Rejected | StartRun | StopRun | ProcessEnded | Renew | Renewed


class NewDevice(msgspec.Struct, frozen=True):
    name: Name
    request: Annotated[bytes, Meta(max_length=MOST_REQUEST_BYTES)]  # to sign (DER)


class JoinRequest(msgspec.Struct, frozen=True):
    """The join frame: all that a machine without a certificate can say."""

    secret: Annotated[bytes, Meta(max_length=MOST_SECRET_BYTES)]
    """The secret of a ticket; empty for a device that returns."""
    devices: Annotated[tuple[NewDevice, ...], Meta(min_length=1, max_length=MOST_NEW_DEVICES)]
    versions: Versions
    returning: Id = ""  # the id of a device of the fleet whose certificate ended while it was away


class JoinAnswer(msgspec.Struct, frozen=True):
    """A certificate (DER) for each joining device in turn, or why there are none."""

    certificates: Annotated[tuple[Certificate, ...], Meta(max_length=MOST_NEW_DEVICES)] = ()
    refused: Text = ""


class DescribeData(Message, frozen=True, kw_only=True):
    """Coordinator to device: what are the data like that a job names? `run` tells questions apart."""

    data: DataSpec
    heldout: bool  # whether held-out samples are needed


class DataDescribed(Message, frozen=True, kw_only=True):
    """Device to coordinator: a description, or why there is none."""

    description: DataDescription | None = None
    failure: Text = ""


class CompareData(Message, frozen=True, kw_only=True):
    """Coordinator to device: another device has described data of the same job. Show it a proof that yours are equal;
    who is shown one says whether it holds, and shows its own."""

    device: Name  # the coordinator's name of the device that is asked
    other: Name
    own: Name  # the digest of its data that the device gave
    others: Name  # the digest that the other device gave
    shown: Name = ""  # the other's proof; empty for the device that shows first


class DataCompared(Message, frozen=True, kw_only=True):
    """Device to coordinator: its proof; or that the data are not equal; or why it cannot tell."""

    proof: Name = ""
    equal: bool = True  # False only where a proof was shown that does not hold
    failure: Text = ""


DataMessage = DescribeData | DataDescribed | CompareData | DataCompared
