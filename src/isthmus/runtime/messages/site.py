"""What a coordinator and a site say to each other besides phases: a site has one client, and its data stay there."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from isthmus.federated.task_spec import TaskSpec
from isthmus.protocol.federated_events import NONE, PhaseId
from isthmus.runtime.messages.message import Message


class TaskMessage(Message, frozen=True, kw_only=True):
    """To the site, first: what is to be trained. The site compares it with what its owner allows."""

    task_spec: TaskSpec


class RegisteredMessage(Message, frozen=True, kw_only=True):
    """To the coordinator: the site takes part, with so many samples."""

    samples: Annotated[int, Meta(ge=1, lt=1 << 40)]


class UpdateMessage(Message, frozen=True, kw_only=True):
    """To the coordinator: what the site's client returned; the tensors are its values."""

    phase: PhaseId
    seconds: float
    weight: float | None = None
    state: int = NONE
    """The client's new state, as the site numbers it."""
    renewed: bool = False
    """Its state of before was lost: it went on with that of a new client."""


SiteMessage = TaskMessage | RegisteredMessage | UpdateMessage
