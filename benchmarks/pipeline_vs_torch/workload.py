"""What both sides train, over what, and what a run of either tells: the only thing that they share."""

from __future__ import annotations

from typing import Literal

import msgspec

from isthmus.data import DataSpec
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.models import ModelSpec

FLOAT_BYTES = 4
LEARNING_RATE = 1e-3
LINKS = {
    # Unshaped: the figures only tell the plan how many micro-batches to keep in flight.
    "loopback": Link(1e-4, 1e9),
    "wan": Link(0.050, 100e6 / 8),
}


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A GPT, its data, and how it is cut: equal runs of blocks, one token embedding in front, one head at the end."""

    network: Literal["loopback", "wan"]
    stages: int
    micro_batches: int
    steps: int
    micro_batch_size: int = 32
    sequence_length: int = 64
    width: int = 64
    layers: int = 4
    heads: int = 2
    seed: int = 7

    @property
    def model(self) -> ModelSpec:
        return ModelSpec(
            name="gpt",
            options={
                "vocab_size": 256,
                "sequence_length": self.sequence_length,
                "width": self.width,
                "layers": self.layers,
                "heads": self.heads,
            },
        )

    @property
    def data(self) -> DataSpec:
        """Python's own standard library, byte by byte: there on every machine."""
        options: dict[str, object] = {
            "files": "stdlib",
            "sequence_length": self.sequence_length,
            "max_bytes": 4_000_000,
        }
        return DataSpec(kind="text", options=options)

    @property
    def batch_size(self) -> int:
        return self.micro_batches * self.micro_batch_size

    @property
    def hop_bytes(self) -> int:
        """Activations of one micro-batch, and as many bytes of gradients back."""
        return self.micro_batch_size * self.sequence_length * self.width * FLOAT_BYTES

    @property
    def step_bytes(self) -> int:
        """Tensor bytes that a step must move over all links, both ways."""
        return 2 * (self.stages - 1) * self.micro_batches * self.hop_bytes

    def first_block(self, stage: int) -> int:
        return stage * self.layers // self.stages

    @property
    def fleet(self) -> Fleet:
        devices = tuple(
            Device(name=f"stage-{k}", region="here", flops_per_s=5e10, memory_bytes=8 << 30) for k in range(self.stages)
        )
        return Fleet(name=self.network, devices=devices, links=Links(intra=LINKS[self.network]))


class PeerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the peer."""

    workload: Workload
    stage: int
    interface: str
    store: str
    """File through which the processes find each other: no port is opened, and nothing of it crosses the links."""


class OursPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Our run: the coordinator's address, and per device its address and the words that enter its network."""

    workload: Workload
    host: str = "127.0.0.1"
    addresses: dict[str, str] = {}
    prefixes: dict[str, list[str]] = {}


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one process, or all of them together, found."""

    marks_s: list[float]
    """When the first stage began each step, and when it ended the last one, on the machine's monotonic clock."""
    losses: list[float]
    step_payload_bytes: float
    """Tensor bytes sent in a step."""
    busy_s: list[list[float]] = []
    """Per step, how long each stage computed forward and backward passes."""
