"""Between coordinator and devices when links and speeds are measured."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.engines import EngineName
from isthmus.graph import Affine, StageGraph
from isthmus.graph.opgraph import TensorSpec
from isthmus.job.settings import Precision
from isthmus.runtime.messages.message import Message
from isthmus.training.engine import EngineConfig


class ExpectDial(Message, frozen=True, kw_only=True):
    """Coordinator to device: the device with this id will dial, for the probe that `run` names."""

    id: str


class ExpectingDial(Message, frozen=True, kw_only=True):
    """Device to coordinator: here, or why not."""

    host: str = ""
    port: int = 0
    failure: str = ""


class MeasureLink(Message, frozen=True, kw_only=True):
    """Coordinator to device: dial the device with this id there, and time messages to it."""

    host: str
    port: int
    id: str


class LinkTimes(Message, frozen=True, kw_only=True):
    """Device to coordinator: sizes in bytes and seconds of round trips, or what went wrong."""

    times: tuple[tuple[int, float], ...] = ()
    relayed: bool = False
    """Whether the way was by the coordinator."""
    failure: str = ""


class MatrixProduct(msgspec.Struct, frozen=True, tag="product"):
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


class AttentionShape(msgspec.Struct, frozen=True, tag="attention"):
    """`count` times the fused attention of queries [batch, heads, queries, size] to keys [batch, key_heads, keys, size]
    with values of `value_size`."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    causal: bool = False
    masked: bool = False
    """Whether it gets a mask, which some kernels do not take."""
    count: int = 1

    @property
    def flops(self) -> int:
        """Of all of them; what a causal mask leaves out is counted, as in graphs."""
        return 2 * self.batch * self.heads * self.queries * self.keys * (self.size + self.value_size) * self.count


MOST_OPERATORS = 64
MOST_LAYERS = 8
MOST_THREADS = 1024


class LayerStage(msgspec.Struct, frozen=True, kw_only=True):
    """The first operators of a job's model, as one stage."""

    stage: StageGraph
    operators: int
    """How many that is, without those that every stage computes for itself."""
    flops: Affine
    """Of a micro-batch's forward and backward."""
    memory_bytes: int
    """Of weights and gradients, and of what one micro-batch keeps."""


class SyntheticColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column of the batch, of which the device makes up the values."""

    op: str
    """The placeholder's name in the graph."""
    spec: TensorSpec
    limit: int | None = None
    """Whole numbers are below it."""


class LayerTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Stages of a job's model that a device tries, each longer than the one before. Data and weights do not travel."""

    layers: Annotated[tuple[LayerStage, ...], Meta(min_length=1, max_length=MOST_LAYERS)]
    operators: int
    """Of the whole model."""
    columns: dict[str, SyntheticColumn]
    engine: EngineConfig
    precision: Precision
    any_batch: bool
    """Whether the graphs are valid at other sizes of a micro-batch than the engine's."""


class MeasureSpeed(Message, frozen=True, kw_only=True):
    """Coordinator to device: how fast are you? In what a job's model computes; without a job, in a benchmark."""

    operators: Annotated[tuple[MatrixProduct | AttentionShape, ...], Meta(max_length=MOST_OPERATORS)] = ()
    trial: LayerTrial | None = None
    threads: Annotated[int, Meta(ge=1, le=MOST_THREADS)] = 1
    """Of torch, on a CPU."""


Kind = Literal["layers", "products", "attention", "convolutions"]


class SpeedSample(msgspec.Struct, frozen=True, kw_only=True):
    """What a device computed, and how long that took."""

    what: Kind
    precision: Precision
    flops: Annotated[float, Meta(gt=0)]
    seconds: Annotated[float, Meta(gt=0)]
    operators: int = 0
    """Of `layers`: how many of the model's."""

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


class MeasuredSpeed(Message, frozen=True, kw_only=True):
    """Device to coordinator."""

    figures: Annotated[tuple[SpeedSample, ...], Meta(max_length=16)] = ()
    shorter: str = ""
    """Why not all of the trial's stages were measured, where that is no matter of time."""
    peak_flops_per_s: float = 0.0
    """Of nothing but a matrix product in fp32."""
    host_bytes_per_s: float = 0.0
    """Between accelerator and host, the slower way; 0 on the CPU."""
    memory_bytes: int = 0
    """Of an accelerator, what one process can have now."""
    hardware: str = ""
    engine: EngineName = "torch"
    """What computed all that, and computes its stages."""
    failure: str = ""


class LoadMessage(Message, frozen=True, kw_only=True):
    """Between two devices: a tensor for nothing, and on the way back none."""


ProbeMessage = ExpectDial | ExpectingDial | MeasureLink | LinkTimes | MeasureSpeed | MeasuredSpeed | LoadMessage
