"""Messages between the coordinator and the executors of a federated run: processes with everybody's data, or sites."""

from __future__ import annotations

import msgspec

from isthmus.federated.partial import AggregationWeights
from isthmus.federated.task_spec import TaskSpec
from isthmus.protocol.federated_messages import ExecutorOrder, ExecutorReport
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.protocol.secure_messages import SecureOrder, SecureReport
from isthmus.runtime.messages.message import Message
from isthmus.training.layout import TensorHeader
from isthmus.wire_types import Many, Name, NotNegative, Table, Text


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


class ToExecutor(Message, frozen=True, kw_only=True):
    """With `PhaseOpened` comes the broadcast."""

    body: ExecutorOrder | SecureOrder | Halt
    in_shared_memory: Many[TensorHeader] = ()
    """Those of the broadcast that lie in the memory that this executor shares with the coordinator."""


# Executor to coordinator


class FromExecutor(Message, frozen=True, kw_only=True):
    """With `SumsSent` come values."""

    body: ExecutorReport | SecureReport | DeviceFailed
    values: SentValues | None = None  # the meaning of the tensors


FederatedMessage = TaskMessage | ToExecutor | FromExecutor
