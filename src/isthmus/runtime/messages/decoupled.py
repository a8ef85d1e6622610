"""Messages between the merger of decoupled replicas and the replicas."""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.cost.problem import Decoupled
from isthmus.protocol.decoupled_events import ReplicaOrder, ReplicaReport
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.runtime.messages.assignment import Assignment
from isthmus.runtime.messages.message import Message
from isthmus.wire_types import Count, Many, Shape, Table, Text


class TrainReplica(Message, frozen=True, kw_only=True):
    """First on each connection of a device that joined: what it trains. With it come the variables that are not
    trained, by the module's own names."""

    assignment: Assignment  # the whole model as one stage, and the replica's share of the samples
    fragments: Many[Table[Text, Shape]]  # shapes of the parameters of each fragment, in order
    rules: Decoupled
    steps: Count  # that this replica has made, by an earlier process


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


DecoupledMessage = TrainReplica | ToReplica | FromReplica
