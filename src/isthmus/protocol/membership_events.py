"""A fleet's membership: what happens to it (events), and what its host is to do (instructions)."""

from __future__ import annotations

from typing import Literal

import msgspec

# What happens to one device


class DeviceConnected(msgspec.Struct, frozen=True, kw_only=True):
    """The device says that it is here, on a connection that stays."""

    device: str
    id: str
    connection: int
    """The host's number of it: from 1 on, each used once."""
    working: str = ""
    """The run that a process of the device works for already, as it says."""
    mismatch: str = ""
    """Why the software of both sides cannot work together."""


class DeviceDisconnected(msgspec.Struct, frozen=True, kw_only=True):
    """A connection closed, or was silent for too long."""

    device: str
    connection: int


class DeviceCalled(msgspec.Struct, frozen=True, kw_only=True):
    """A run wants the device."""

    device: str
    run: str


class WorkerConnected(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the device asks to join a run, on a connection of its own."""

    device: str
    worker: str
    """The name that it joins under: the device's, or that of one of its workers."""
    run: str


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The device says that its process for the run has ended otherwise than well."""

    device: str
    connection: int
    run: str
    how: str


class DrainRequested(msgspec.Struct, frozen=True, kw_only=True):
    """A person asks the device to leave its run without loss."""

    device: str


class DeviceRevoked(msgspec.Struct, frozen=True, kw_only=True):
    """The roster has the device no more."""

    device: str
    id: str


class RunClosed(msgspec.Struct, frozen=True, kw_only=True):
    run: str


MemberEvent = (
    DeviceConnected
    | DeviceDisconnected
    | DeviceCalled
    | WorkerConnected
    | WorkerFailed
    | DrainRequested
    | DeviceRevoked
    | RunClosed
)

# What happens to the fleet


class PeerIdentified(msgspec.Struct, frozen=True, kw_only=True):
    """A peer has shown a certificate of the fleet."""

    id: str
    name: str | None
    """As the roster has it; None for a peer that is no device, never joined, or was revoked."""


class RunOpened(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    devices: tuple[str, ...]
    """They are called now."""
    others: tuple[str, ...] = ()
    """They may be called later."""
    long_lived: bool = False
    """Whether its devices are called whenever they connect."""
    yields: bool = False
    """Whether a device that another run calls leaves this one."""


class RunExpected(msgspec.Struct, frozen=True, kw_only=True):
    """Devices may be at work for this run, which opens within `within_s`."""

    run: str
    within_s: float


class WaitBegan(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody needs all of the devices, or any of them. `revoked`: as in `FleetTick`."""

    wait: int
    devices: tuple[str, ...]
    every: bool
    revoked: frozenset[str] = frozenset()


class WaitStopped(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody waits any more."""

    wait: int


class DeviceAsked(msgspec.Struct, frozen=True, kw_only=True):
    question: str
    device: str
    within_s: float


class DeviceAnswered(msgspec.Struct, frozen=True, kw_only=True):
    question: str
    device: str


class FleetTick(msgspec.Struct, frozen=True, kw_only=True):
    """Time passes. `revoked`: names of awaited devices that the roster has as revoked."""

    revoked: frozenset[str] = frozenset()


FleetEvent = (
    MemberEvent
    | PeerIdentified
    | RunOpened
    | RunExpected
    | WaitBegan
    | WaitStopped
    | DeviceAsked
    | DeviceAnswered
    | FleetTick
)

# What the host is to do


class StartWorker(msgspec.Struct, frozen=True):
    """Tell the device to start a process for the run."""

    device: str
    connection: int
    run: str


class CloseConnection(msgspec.Struct, frozen=True):
    """Another connection of the device has taken its place."""

    connection: int


class CutDevice(msgspec.Struct, frozen=True):
    """Close every connection of the device, whatever it is for."""

    id: str


MemberInstruction = StartWorker | CloseConnection | CutDevice


class AdmitDevice(msgspec.Struct, frozen=True):
    device: str
    connection: int
    idle: str
    """Why a run that goes on has nothing for it, in words."""


class RefuseDevice(msgspec.Struct, frozen=True):
    """Trying again is of no use."""

    about: Literal["membership", "version"]
    reason: str


class AdmitWorker(msgspec.Struct, frozen=True):
    """Hand the connection to the run."""


class HoldWorker(msgspec.Struct, frozen=True):
    """The run opens soon: ask again then."""


class RefuseWorker(msgspec.Struct, frozen=True):
    """Close the connection."""


class StopWorker(msgspec.Struct, frozen=True):
    """Tell the device that the run is over."""

    connection: int
    run: str


class AskToLeave(msgspec.Struct, frozen=True):
    """The run is to go on without the device."""

    device: str


class EndWait(msgspec.Struct, frozen=True):
    """These devices are here."""

    wait: int
    devices: tuple[str, ...]


class PutQuestion(msgspec.Struct, frozen=True):
    question: str
    connection: int


class TakeAnswer(msgspec.Struct, frozen=True):
    question: str


class FailQuestion(msgspec.Struct, frozen=True):
    question: str
    reason: str


class FleetNote(msgspec.Struct, frozen=True):
    """A person may want to know this. `device`: it is about this one, and may come often."""

    text: str
    device: str = ""


FleetInstruction = (
    MemberInstruction
    | AdmitDevice
    | RefuseDevice
    | AdmitWorker
    | HoldWorker
    | RefuseWorker
    | StopWorker
    | AskToLeave
    | EndWait
    | PutQuestion
    | TakeAnswer
    | FailQuestion
    | FleetNote
)
