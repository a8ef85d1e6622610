"""Messages between the coordinator and the executors of a federated run: processes with everybody's data, or sites."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.federated.partial import AggregationWeights
from isthmus.federated.task_spec import TaskSpec
from isthmus.protocol.federated_messages import ExecutorOrder, ExecutorReport
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.protocol.secure_messages import SecureOrder, SecureReport
from isthmus.runtime.messages.message import Message
from isthmus.training.layout import TensorHeader
from isthmus.wire_types import Client, Many, Name, NotNegative, Table, Text

MOST_JOB_BYTES = 1 << 20


class SummedValues(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The tensors are the sums, 8 bytes a number, and what is collected, per client. None where no client is in."""

    weights: AggregationWeights
    shared_bounds: Table[Text, NotNegative] | None = None
    """These sums lie in the memory that this executor shares with the coordinator: no number is further from 0."""


class SiteValues(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The tensors are what the site's client returned, with its weight."""

    weight: NotNegative | None = None
    figures: Table[Name, float] = {}
    """Figures of the model that the round began with, on the site's own data: the loss and metrics that its owner's
    file names."""


class MaskedValues(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The tensors are a site's sums under its masks, its weight among them; none where it has no update."""


SentValues = SummedValues | SiteValues | MaskedValues


# Coordinator to executor


class TaskMessage(Message, frozen=True, kw_only=True):
    """To a site, first: what is to be trained. The site compares it with what its owner allows."""

    task_spec: TaskSpec


class TrainClients(Message, frozen=True, kw_only=True):
    """First on each connection of a device of a fleet: whose clients it trains, and how."""

    job: Annotated[bytes, Meta(max_length=MOST_JOB_BYTES)]
    """The federated job (JSON), without what the coordinator alone uses."""
    fingerprint: Name  # the fingerprint of the coordinator's data


class StatesFound(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The tensor are the states that a device asked for (uint8 [places, bytes]); none where one is missing."""


class StateFileGiven(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The device may fill this file of states."""

    number: Client


class ToExecutor(Message, frozen=True, kw_only=True):
    """With `PhaseOpened` comes the broadcast."""

    body: ExecutorOrder | SecureOrder | Halt | StatesFound | StateFileGiven
    in_shared_memory: Many[TensorHeader] = ()
    """Those of the broadcast that lie in the memory that this executor shares with the coordinator."""


# Executor to coordinator


class StatesWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A device asks for states of clients, or writes them: then the tensor are these (uint8 [places, bytes])."""

    places: Many[Client]
    writes: bool


class StateFileWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A device has no place left for a state."""


StateReport = StatesWanted | StateFileWanted


class FromExecutor(Message, frozen=True, kw_only=True):
    """With `SumsSent` come values."""

    body: ExecutorReport | SecureReport | DeviceFailed | StateReport
    values: SentValues | None = None  # the meaning of the tensors


FederatedMessage = TaskMessage | TrainClients | ToExecutor | FromExecutor
