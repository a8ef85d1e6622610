"""What coordinator and executors of a federated run say to each other."""

from __future__ import annotations

from isthmus.federated.partial import Weights
from isthmus.protocol.federated_events import Refusal, Task, Timed, Told, Turn, TurnOpened
from isthmus.runtime.messages.message import Message
from isthmus.training.layout import TensorHeader

# Coordinator to executor


class TurnMessage(Message, frozen=True, kw_only=True):
    """A turn begins; the tensors are the broadcast. Once per executor and turn."""

    opened: TurnOpened
    lie: tuple[TensorHeader, ...] = ()
    """Those that lie on the board that this executor shares with the coordinator."""


class ToldMessage(Message, frozen=True, kw_only=True):
    told: Told


# Executor to coordinator


class DrainedMessage(Message, frozen=True, kw_only=True):
    turn: Turn


class ReturnedMessage(Message, frozen=True, kw_only=True):
    turn: Turn
    tasks: tuple[Task, ...]


class SumsMessage(Message, frozen=True, kw_only=True):
    """The tensors are the sums, 8 bytes a number, and what is collected, per client. None where no client is in."""

    lent: dict[str, float] | None = None
    """These sums lie in the room that this executor shares with the coordinator: no number is further from 0."""

    turn: Turn
    timed: tuple[Timed, ...]
    refused: tuple[Refusal, ...]
    weights: Weights


FederatedMessage = TurnMessage | ToldMessage | DrainedMessage | ReturnedMessage | SumsMessage
