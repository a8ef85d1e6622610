"""Messages between the merger of decoupled replicas and the replicas."""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.protocol.decoupled_events import ReplicaOrder, ReplicaReport
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.runtime.messages.message import Message


class ToReplica(Message, frozen=True, kw_only=True):
    """With `FragmentSent` comes the fragment's version, or the payload of its change."""

    body: ReplicaOrder


MOST_NOTE = 400


class ReplicaNote(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """For people: what becomes of a replica's devices."""

    text: Annotated[str, msgspec.Meta(max_length=MOST_NOTE)]


class FromReplica(Message, frozen=True, kw_only=True):
    """With `Contributed` come payloads, one for each fragment."""

    body: ReplicaReport | DeviceFailed | ReplicaNote


DecoupledMessage = ToReplica | FromReplica
