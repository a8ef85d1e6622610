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
from isthmus.wire_types import (
    MOST_SECONDS,
    Above,
    Amount,
    Count,
    Host,
    Id,
    Many,
    NotNegative,
    Port,
    Seconds,
    Table,
    Text,
    Threads,
)


class ExpectDial(Message, frozen=True, kw_only=True):
    """Coordinator to device: the device with this id will dial, for the probe that `run` names."""

    id: Id


class ExpectingDial(Message, frozen=True, kw_only=True):
    """Device to coordinator: here, or why not."""

    host: Host = ""
    port: Port = 0
    failure: Text = ""


class MeasureLink(Message, frozen=True, kw_only=True):
    """Coordinator to device: dial the device with this id there, and time messages to it."""

    host: Host
    port: Port
    id: Id


SIZES_BYTES = (1 << 8, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)  # sizes of the messages that are timed


class LinkTimes(Message, frozen=True, kw_only=True):
    """Device to coordinator: sizes in bytes and seconds of round trips, or what went wrong."""

    times: Many[tuple[Amount, Seconds]] = ()
    relayed: bool = False  # whether the way was by the coordinator
    failure: Text = ""


class MatrixProduct(msgspec.Struct, frozen=True, tag="product"):
    """`count` products of `batch` matrices [m, k] and [k, n] each."""

    batch: Amount
    m: Amount
    n: Amount
    k: Amount
    count: Count = 1

    @property
    def flops(self) -> int:
        """FLOPs of all of the products."""
        return 2 * self.batch * self.m * self.n * self.k * self.count


class AttentionShape(msgspec.Struct, frozen=True, tag="attention"):
    """`count` times the fused attention of queries [batch, heads, queries, size] to keys [batch, key_heads, keys, size]
    with values of `value_size`."""

    batch: Amount
    heads: Amount
    key_heads: Amount
    queries: Amount
    keys: Amount
    size: Amount
    value_size: Amount
    causal: bool = False
    masked: bool = False  # whether it gets a mask, which some kernels do not take
    count: Count = 1

    @property
    def flops(self) -> int:
        """FLOPs of all of them; FLOPs that a causal mask leaves out are counted, as in graphs."""
        return 2 * self.batch * self.heads * self.queries * self.keys * (self.size + self.value_size) * self.count


MOST_OPERATORS = 64
MOST_LAYERS = 8


class LayerStage(msgspec.Struct, frozen=True, kw_only=True):
    """The first operators of a job's model, as one stage."""

    stage: StageGraph
    operators: Count  # how many that is, without those that every stage computes for itself
    flops: Affine  # FLOPs of a micro-batch's forward and backward
    memory_bytes: Amount  # bytes of weights and gradients, and of the tensors that one micro-batch keeps


class SyntheticColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column of the batch, of which the device makes up the values."""

    op: Text  # the placeholder's name in the graph
    spec: TensorSpec
    limit: Amount | None = None  # whole numbers are below it


class LayerTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Stages of a job's model that a device tries, each longer than the one before. Data and weights do not travel."""

    layers: Annotated[tuple[LayerStage, ...], Meta(min_length=1, max_length=MOST_LAYERS)]
    operators: Count  # operators of the whole model
    columns: Table[Text, SyntheticColumn]
    engine: EngineConfig
    precision: Precision
    any_batch: bool  # whether the graphs are valid at other sizes of a micro-batch than the engine's


class MeasureSpeed(Message, frozen=True, kw_only=True):
    """Coordinator to device: how fast are you? In what a job's model computes; without a job, in a benchmark."""

    operators: Annotated[tuple[MatrixProduct | AttentionShape, ...], Meta(max_length=MOST_OPERATORS)] = ()
    trial: LayerTrial | None = None
    threads: Threads = 1  # threads of torch, on a CPU


Kind = Literal["layers", "products", "attention", "convolutions"]


class SpeedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A measured computation of a device, and the seconds that it took."""

    what: Kind
    precision: Precision
    flops: Above
    seconds: Annotated[float, Meta(gt=0, le=MOST_SECONDS)]
    operators: Count = 0  # how many of the model's operators were measured, for `layers`

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


class MeasuredSpeed(Message, frozen=True, kw_only=True):
    """Device to coordinator."""

    figures: Annotated[tuple[SpeedSample, ...], Meta(max_length=16)] = ()
    shorter: Text = ""  # why not all of the trial's stages were measured, where that is no matter of time
    peak_flops_per_s: NotNegative = 0.0  # the speed of a product of two large matrices in fp32
    host_bytes_per_s: NotNegative = 0.0  # between accelerator and host, the slower way; 0 on the CPU
    memory_bytes: Amount = 0  # bytes that one process can have now
    hardware: Text = ""
    engine: EngineName = "torch"  # the engine that was measured, and computes the device's stages
    failure: Text = ""


class LoadMessage(Message, frozen=True, kw_only=True):
    """Between two devices: a tensor for nothing, and on the way back none."""


ProbeMessage = ExpectDial | ExpectingDial | MeasureLink | LinkTimes | MeasureSpeed | MeasuredSpeed | LoadMessage
