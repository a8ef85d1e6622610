"""The coordinator gives a device its stage, its settings and its neighbours. Data only, never code."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from isthmus.data import DataSpec
from isthmus.data.layout import Layout
from isthmus.data.replica_share import ReplicaShare
from isthmus.fleet import Link
from isthmus.graph import StageGraph
from isthmus.plans import OuterOptimizer, Packing
from isthmus.protocol import StageView
from isthmus.protocol.generation import Sampling, StageReport
from isthmus.protocol.run_messages import Share, Work
from isthmus.runtime.messages.message import Message
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader
from isthmus.training.local_privacy import Released
from isthmus.wire_types import (
    Amount,
    Count,
    Distinct,
    Host,
    Id,
    Int64,
    Many,
    Name,
    NotNegative,
    Place,
    PlaceOrNone,
    Port,
    Positive,
    Seconds,
    Shape,
    Streams,
    Table,
    Text,
    Threads,
)


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another device: where it listens, and the link to it."""

    device: Name
    host: Host
    port: Port
    id: Id = ""  # the id of the key that must answer there. Empty where links are plain TCP.
    streams: Streams = 1  # streams of the connection to it, where that is TLS
    shape: Link | None = None  # emulated link for what we send to it; None sends as fast as the socket takes it


class Neighbour(Peer, frozen=True, kw_only=True):
    """Another stage's device, of this replica or of another one."""

    stage: Place
    later: Many[tuple[Count, Link]] = ()  # how the emulated link is from a step on
    sent: Packing | None = None  # how values, or gradients, of training that are sent to it are packed
    received: Packing | None = None  # how those are that come from it
    window_bytes: Amount = 1 << 28
    """How many bytes may be on the way before the receiver has taken any: granted ahead, for all micro-batches."""


class SnapshotReplication(msgspec.Struct, frozen=True, kw_only=True):
    """Where copies of this stage's snapshots go."""

    stage: Place
    every: Count  # steps from one to the next
    stretch_bytes: Amount = 1 << 18  # sent at once: what else the link has to send waits for no more


class ComputeEmulation(msgspec.Struct, frozen=True, kw_only=True):
    """Stretch compute to an emulated device: a tasklet lasts max(real time, FLOPs / flops_per_s)."""

    flops_per_s: Many[tuple[Count, NotNegative]]  # from each of these steps on; the first is 0
    flops_forward: Int64
    flops_backward: Int64
    flops_weights: Int64 = 0
    """The part of the backward's FLOPs that weight gradients take, where they are computed apart."""

    def least_s(self, work: Work, step: int) -> float:
        """Return how long the work on a micro-batch lasts in a step."""
        flops_per_s = next(speed for since, speed in reversed(self.flops_per_s) if since <= step)
        apart = {"B": self.flops_backward - self.flops_weights, "W": self.flops_weights}
        return apart.get(work, self.flops_forward) / flops_per_s


class GroupShare(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors that this stage adds to the sum of one group."""

    group: Place
    parameters: Many[Text]  # op names
    elements: Amount  # elements of the group's buffer


class Fingerprinting(msgspec.Struct, frozen=True, kw_only=True):
    """Hash what the stage sends, receives and computes."""

    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    leaves: bool = False  # report each tensor's digest, not one for all of a kind


class StorePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where in the run's store a stage's parts of checkpoints go, if its device may write there."""

    url: Text  # of the run's folder in the store
    name: Name  # of the file in the folder of each checkpoint; no other stage or epoch has the same
    prefix: Name  # before the names of its tensors


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    run: Id
    epoch: Count = 0
    start_step: Count = 0  # steps that the state which is placed has behind it
    first_item: Count = 0  # the epoch's first
    lease_ahead: Count = 3  # items that may be open, but for one more at the run's end
    device: Name
    view: StageView
    train: StageGraph
    evaluation: StageGraph
    placeholders: Table[Text, Text]  # batch column -> op name
    column_dtypes: Table[Text, Id]  # type that the graph was captured with, which for bf16 differs from the data's
    engine: EngineConfig
    recompute: bool = False  # run the forward again in the backward instead of keeping what it saves
    released: Released | None = None  # values that are clipped and covered with noise before they leave
    frozen: bool = False  # the stage computes on raw samples, and its weights are not to learn from them
    discloses: bool = True  # whether gradients of its parameters may be sent to devices that join later
    data: DataSpec
    digests: Table[Name, Name] = {}
    """Digests that this device gave of its samples before the run, by split: under its own key, so that it alone can
    tell whether they are still the same. Empty where it gave none."""
    replica: ReplicaShare | None = None  # the share of the samples that a replica with a plan of its own trains on
    train_samples: Count
    """With the seed, whether they are shuffled, and their layout, this is the order in which they are used."""
    layout: Layout | None = None  # the layout of samples that lie in blocks
    shuffle: bool = True
    evaluates: bool = True  # whether held-out data are needed at all
    eval_micro_batches: Count = 0
    """Whole ones of an evaluation: which samples it is of follows from their number and the rest."""
    eval_rest: Count = 0  # samples of an evaluation beyond whole micro-batches
    neighbours: Many[Neighbour] = ()
    emulation: ComputeEmulation | None = None
    norm_positions: Table[Place, Many[Count]] = {}
    """For each stage of the replica, where its trainable parameters stand in the module's own order."""
    share: Share  # the replica's part of every item
    groups: Many[GroupShare] = ()
    outer: OuterOptimizer | None = None  # the step that groups make with summed deltas
    saves: Many[Text] | None = None  # the names that this stage gives to a checkpoint; None for its whole state
    store: StorePlace | None = None
    snapshot_copy: SnapshotReplication | None = None
    snapshot_sources: Table[Place, Table[Text, Shape]] = {}
    """Stages whose snapshots this device keeps copies of, with the shapes of their parts."""
    memory_bytes: Amount = 0  # bytes that the stage takes according to the plan; 0 where the plan does not say
    threads: Threads = 1
    timeout_s: Seconds = 60.0
    trace: bool = True
    fingerprints: Fingerprinting | None = None

    @property
    def stage(self) -> int:
        return self.view.stage


class OfTransfer(Message, frozen=True, kw_only=True):
    """A message of one state transfer of the run: messages of another one that are still under way are dropped."""

    epoch: Count = 0
    number: Count


# Coordinator to device


class ReceiveStateMessage(OfTransfer, frozen=True, kw_only=True):
    """Get parts of these devices' states after `step` steps from them, and gradients to repeat their steps with."""

    step: Count
    peers: Many[Peer]  # the donors
    donated: Table[Name, Table[Text, Shape]]  # shapes of the parts that each device gives
    trained: Distinct[Text]  # those of the parameters' names that optimizers update
    config: EngineConfig


# Between two devices


class FollowHello(OfTransfer, frozen=True, kw_only=True):
    """First on a connection: the joining device gets the other one's state and gradients over it."""

    device: Name


class StateMessage(OfTransfer, frozen=True, kw_only=True):
    """The state after `step` steps begins, or the gradients that led to it; bytes follow in stretches."""

    of: Name
    kind: Literal["state", "gradients"]
    step: Count
    headers: Many[TensorHeader]


class StatePart(OfTransfer, frozen=True, kw_only=True):
    """The next stretch, as one tensor of bytes."""

    of: Name
    offset: Amount


StateTransferMessage = ReceiveStateMessage | FollowHello | StateMessage | StatePart


class SnapshotMessage(Message, frozen=True, kw_only=True):
    """A snapshot of the sender's stage begins; its bytes follow in stretches."""

    source: Place
    epoch: Count = 0
    step: Count
    headers: Many[TensorHeader]  # headers of the tensors in the buffer


class SnapshotPart(Message, frozen=True, kw_only=True):
    """The next stretch of the buffer, as one tensor of bytes."""

    source: Place
    epoch: Count = 0
    step: Count
    offset: Amount


class StateHello(Message, frozen=True, kw_only=True):
    """First on a connection for state: the device asks for these parts of the state that the epoch begins from."""

    device: Name
    epoch: Count = 0
    parts: Distinct[Text]


class GivenPart(Message, frozen=True, kw_only=True):
    """A part of the state after `step` steps: its tensors."""

    epoch: Count = 0
    step: Count
    part: Text


RecoveryMessage = SnapshotMessage | SnapshotPart | StateHello | GivenPart


COORDINATOR = -1  # as the source of a step


class ServeStage(Message, frozen=True, kw_only=True):
    """Coordinator to device: serve this stage. With values of its variables that the device has not got yet."""

    epoch: Count
    stage: Place  # in the chain. The last stage chooses tokens, and gives them to the first.
    device: Name
    graph: StageGraph
    token_input: Text  # name of the op whose value the tokens are
    vocabulary: Positive  # tokens are below it
    context: Positive  # tokens of a prompt and its answer together, at most
    neighbours: Many[Neighbour] = ()
    flops_per_s: NotNegative | None = None
    """The speed of an emulated device: a step lasts at least its FLOPs / flops_per_s."""
    threads: Threads = 1
    timeout_s: Seconds = 60.0


class NewPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A new prompt, without its tokens, as stages must know it."""

    sampling: Sampling
    made: Count = 0  # how many of the step's tokens were generated before, for a prompt that starts again
    capacity: Count  # tokens that its caches hold


class GenerateStep(Message, frozen=True, kw_only=True):
    """New tokens of one prompt: to the first stage the tokens, from stage to stage what crosses the cut."""

    epoch: Count
    prompt: Count
    source: PlaceOrNone  # a stage, or the coordinator
    start: Count  # position of the first token
    count: Positive  # tokens
    tokens: Many[Count] = ()
    new: NewPrompt | None = None  # with the first step of a prompt


class ForgetPrompts(Message, frozen=True, kw_only=True):
    """Coordinator to device: drop their keys and values."""

    epoch: Count
    prompts: Many[Count]


class ServingReport(Message, frozen=True, kw_only=True):
    """Device to coordinator."""

    body: StageReport


ServingOrder = ServeStage | GenerateStep | ForgetPrompts
GenerationMessage = ServeStage | GenerateStep | ForgetPrompts | ServingReport
