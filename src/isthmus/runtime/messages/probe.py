"""Between coordinator and devices when links and speeds are measured."""

from __future__ import annotations

from isthmus.runtime.messages.message import Message


class Expect(Message, frozen=True, kw_only=True):
    """Coordinator to device: the device with this id will dial, for the probe that `run` names."""

    id: str


class Expecting(Message, frozen=True, kw_only=True):
    """Device to coordinator: here, or why not."""

    host: str = ""
    port: int = 0
    failure: str = ""


class Measure(Message, frozen=True, kw_only=True):
    """Coordinator to device: dial the device with this id there, and time messages to it."""

    host: str
    port: int
    id: str


class Measured(Message, frozen=True, kw_only=True):
    """Device to coordinator: sizes in bytes and seconds of round trips, or what went wrong."""

    times: tuple[tuple[int, float], ...] = ()
    relayed: bool = False
    """Whether the way was by the coordinator."""
    failure: str = ""


class Compute(Message, frozen=True, kw_only=True):
    """Coordinator to device: how fast are you?"""


class Computes(Message, frozen=True, kw_only=True):
    """Device to coordinator."""

    flops_per_s: float = 0.0
    """As training sustains it."""
    peak_flops_per_s: float = 0.0
    """Of nothing but a matrix product."""
    memory_bytes: int = 0
    failure: str = ""


class Load(Message, frozen=True, kw_only=True):
    """Between two devices: a tensor for nothing, and on the way back none."""


ProbeMessage = Expect | Expecting | Measure | Measured | Compute | Computes | Load
