"""Messages between the coordinator and the executors of a federated run."""

from __future__ import annotations

from isthmus.federated.partial import AggregationWeights
from isthmus.protocol.federated_events import (
    ClientTask,
    ClientTime,
    ExecutorNotice,
    PhaseId,
    PhaseOpened,
    RefusedUpdate,
)
from isthmus.runtime.messages.message import Message
from isthmus.training.layout import TensorHeader

# Coordinator to executor


class PhaseMessage(Message, frozen=True, kw_only=True):
    """A phase begins; the tensors are the broadcast. Once per executor and phase."""

    opened: PhaseOpened
    in_shared_memory: tuple[TensorHeader, ...] = ()
    """Those that lie on the board that this executor shares with the coordinator."""


class NoticeMessage(Message, frozen=True, kw_only=True):
    notice: ExecutorNotice


# Executor to coordinator


class DrainedMessage(Message, frozen=True, kw_only=True):
    phase: PhaseId


class ReturnedMessage(Message, frozen=True, kw_only=True):
    phase: PhaseId
    tasks: tuple[ClientTask, ...]


class SumsMessage(Message, frozen=True, kw_only=True):
    """The tensors are the sums, 8 bytes a number, and what is collected, per client. None where no client is in."""

    shared_bounds: dict[str, float] | None = None
    """These sums lie in the room that this executor shares with the coordinator: no number is further from 0."""

    phase: PhaseId
    timed: tuple[ClientTime, ...]
    refused: tuple[RefusedUpdate, ...]
    weights: AggregationWeights


FederatedMessage = PhaseMessage | NoticeMessage | DrainedMessage | ReturnedMessage | SumsMessage
