"""Between coordinator and devices when links and speeds are measured."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

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


class Product(msgspec.Struct, frozen=True):
    """`count` products of `batch` matrices [m, k] and [k, n] each."""

    batch: int
    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Of all of them."""
        return 2 * self.batch * self.m * self.n * self.k * self.count


MOST_PRODUCTS = 64


class Compute(Message, frozen=True, kw_only=True):
    """Coordinator to device: how fast are you? With products, in these; else in a benchmark's."""

    products: Annotated[tuple[Product, ...], Meta(max_length=MOST_PRODUCTS)] = ()


class Computes(Message, frozen=True, kw_only=True):
    """Device to coordinator."""

    flops_per_s: float = 0.0
    """As training sustains it."""
    peak_flops_per_s: float = 0.0
    """Of nothing but a matrix product."""
    half_flops_per_s: float = 0.0
    """As training sustains it in bf16; 0 where the hardware has none."""
    host_bytes_per_s: float = 0.0
    """Between accelerator and host, the slower way; 0 on the CPU."""
    memory_bytes: int = 0
    """Of an accelerator, what one process can have now."""
    hardware: str = ""
    failure: str = ""


class Load(Message, frozen=True, kw_only=True):
    """Between two devices: a tensor for nothing, and on the way back none."""


ProbeMessage = Expect | Expecting | Measure | Measured | Compute | Computes | Load
