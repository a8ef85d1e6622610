"""The scaled-down twin of Protocol NanoGPT: eight stages, and what is tried on it."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.data import DataSpec
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.job import Job, TrainingConfig
from isthmus.models import BoundaryOptions, ModelSpec
from isthmus.plans import CompressionConfig

STAGES = 8
WIDTH, HEADS, SEQUENCE = 128, 4, 32
MICRO_BATCHES, MICRO_BATCH_SIZE = 32, 1
TOKENS = MICRO_BATCHES * MICRO_BATCH_SIZE * SEQUENCE
"""Of a step."""
WIRE_S = 4.29
"""A step's activations over one link in one direction; a tenth of the original's 524,288 x 1,024 x 2 bytes at
200 Mbit/s."""
LATENCY_S = 0.005
"""A tenth of the original's 50 ms."""
WIRE_PER_COMPUTE = 30.0
"""Of a dense stage, as the original has with 6 x 204e6 x 524,288 / 8 FLOPs at 56 TFLOP/s."""
LINK = Link(LATENCY_S, TOKENS * WIDTH * 4 / WIRE_S)
FLOPS_PER_S = 3 * 2 * (12 * WIDTH**2 + 2 * SEQUENCE * WIDTH) * TOKENS * WIRE_PER_COMPUTE / WIRE_S
"""Of a device: one block of the dense model, forward and backward, takes a thirtieth of the wire's time."""
DATA = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": SEQUENCE, "max_bytes": 4_000_000})


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What changes the numbers of a training. Schedules do not, but for the delay."""

    name: str
    method: str = "none"
    rate: float = 1.0
    compression: str = ""
    """A method of `[compression]`."""
    ratio: float = 50.0
    """Of a method that has one."""
    backward: str | None = None
    """The codec of gradients; None: that of the activations."""
    delayed: bool = False
    optimizer: str = "adamw"

    @property
    def packing(self) -> CompressionConfig | None:
        if not self.compression:
            return None
        return CompressionConfig(method=self.compression, ratio=self.ratio, backward=self.backward)

    @property
    def boundary(self) -> BoundaryOptions | None:
        if self.method == "subspace":
            return BoundaryOptions(method="subspace", rate=self.rate)
        if self.method == "residual":
            after = tuple(f"blocks.{k}" for k in range(STAGES - 1))
            return BoundaryOptions(method="residual", rate=self.rate, after=after)
        return None

    @property
    def model(self) -> ModelSpec:
        options: dict[str, object] = {
            "vocab_size": 256,
            "sequence_length": SEQUENCE,
            "width": WIDTH,
            "layers": STAGES,
            "heads": HEADS,
        }
        return ModelSpec(name="gpt", options=options, boundary=self.boundary)

    def job(self, micro_batches: int) -> Job:
        batch = MICRO_BATCHES * MICRO_BATCH_SIZE
        training = TrainingConfig(steps=3, batch_size=batch, micro_batches=micro_batches)
        return Job(name="twin", model=self.model, data=DATA, training=training)


def fleet() -> Fleet:
    devices = tuple(
        Device(name=f"d{k}", region="far", flops_per_s=FLOPS_PER_S, memory_bytes=1 << 40) for k in range(STAGES)
    )
    return Fleet(name="twin", devices=devices, links=Links(default=LINK))


def _bounded(method: str, rate: float) -> Variant:
    return Variant(name=f"{method} {rate:g}x", method=method, rate=rate)


def _combined(method: str, rate: float, codec: str) -> Variant:
    """The mildest codec with which the wire takes no longer than the compute."""
    return Variant(
        name=f"delayed {method} {rate:g}x {codec} muon",
        method=method,
        rate=rate,
        compression=codec,
        optimizer="muon",
        delayed=True,
    )


VARIANTS = (
    Variant(name="dense"),
    Variant(name="int4", compression="int4"),
    Variant(name="delayed", delayed=True),
    *(_bounded("subspace", rate) for rate in (6.4, 16, 50, 100)),
    *(_bounded("residual", rate) for rate in (4, 16, 50, 100)),
    Variant(name="delayed int4", compression="int4", delayed=True),
    Variant(name="delayed muon", optimizer="muon", delayed=True),
    Variant(name="delayed int4 muon", compression="int4", optimizer="muon", delayed=True),
    Variant(name="delayed int4-int8 muon", compression="int4", backward="int8", optimizer="muon", delayed=True),
    _combined("residual", 4, "int4"),
    _combined("residual", 16, "bf16"),
    _combined("subspace", 6.4, "int4"),
    _combined("subspace", 6.4, "int8"),
    _combined("subspace", 16, "bf16"),
    Variant(name="dense muon", optimizer="muon"),
    Variant(name="int8", compression="int8"),
    Variant(name="uniform top-K 50x", compression="uniform"),
    Variant(name="AdaTopK 50x", compression="adatopk"),
    Variant(name="just-enough", compression="just-enough"),
    Variant(name="uniform top-K 10x", compression="uniform", ratio=10),
)
