"""A run's machine handles these events besides the coordinator's, and answers with these instructions besides its
own."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from isthmus.protocol.coordinator_events import CoordinatorEvent, CoordinatorInstruction
from isthmus.protocol.failures import CLOSED
from isthmus.session.program import Event
from isthmus.trace import Span

# To the machine


class Observation(Event, frozen=True, kw_only=True):
    """Time has passed. What the host sees of the devices, by name."""

    ended: Mapping[str, str] = {}
    """Whose process has ended otherwise than well, and how."""
    starting: frozenset[str] = frozenset()
    """Whose process is known to be there, or on its way."""
    returning: frozenset[str] = frozenset()
    """Who is expected among the offers if it is lost."""
    queued: frozenset[str] = frozenset()
    """Who waits in the queue of an engine, and is expected among the offers whenever it has a node for it."""
    offers: frozenset[str] = frozenset()
    """Who could work and does not."""
    leaving: frozenset[str] = frozenset()
    """Who is to leave without loss, since the last tick."""


class Disconnected(Event, frozen=True, kw_only=True):
    """A device's connection closed, or it was silent for too long."""

    device: str
    reason: str = CLOSED


class StepMeasured(Event, frozen=True, kw_only=True):
    """All devices have done a step, and reported these spans since the one before."""

    step: int
    spans: tuple[Span, ...]


class LinkProbed(Event, frozen=True, kw_only=True):
    source: str
    target: str
    bandwidth_bytes_per_s: float | None
    """None where nobody could say."""


RunEvent = CoordinatorEvent | Observation | Disconnected | StepMeasured | LinkProbed


# From the machine


class Note(msgspec.Struct, frozen=True):
    """A person may want to know this."""

    text: str


class AcceptReport(msgspec.Struct, frozen=True):
    """The report at hand is the one that was due: use what came with it."""

    device: str
    item: int


class RejectDevice(msgspec.Struct, frozen=True):
    """A worker of a device that is lost: take no more from it. `permanent`: nor from a new process of it."""

    device: str
    permanent: bool


class ProbeLink(msgspec.Struct, frozen=True):
    """Measure a link that carries nothing, and say `LinkProbed`."""

    source: str
    target: str


RunInstruction = CoordinatorInstruction | Note | AcceptReport | RejectDevice | ProbeLink
