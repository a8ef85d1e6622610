"""What coordinator and executors of a federated run say to each other."""

from __future__ import annotations

from isthmus.federated.partial import Weights
from isthmus.protocol.federated_events import Closed, Dropped, Granted, Recalled, Refusal, Task, Timed, Turn, TurnOpened
from isthmus.runtime.message import Message

# Coordinator to executor


class TurnMessage(Message, frozen=True, kw_only=True):
    """A turn begins; the tensors are the broadcast. Once per executor and turn."""

    opened: TurnOpened


class ToldMessage(Message, frozen=True, kw_only=True):
    told: Granted | Recalled | Closed | Dropped


# Executor to coordinator


class DrainedMessage(Message, frozen=True, kw_only=True):
    turn: Turn


class ReturnedMessage(Message, frozen=True, kw_only=True):
    turn: Turn
    tasks: tuple[Task, ...]


class SumsMessage(Message, frozen=True, kw_only=True):
    """The tensors are the sums, 8 bytes a number, and what is collected, per client. None where no client is in."""

    turn: Turn
    timed: tuple[Timed, ...]
    refused: tuple[Refusal, ...]
    weights: Weights


FederatedMessage = TurnMessage | ToldMessage | DrainedMessage | ReturnedMessage | SumsMessage
