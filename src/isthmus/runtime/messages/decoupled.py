"""Messages between the merger of decoupled replicas and the replicas."""

from __future__ import annotations

from isthmus.protocol.decoupled_events import ReplicaOrder, ReplicaReport
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.runtime.messages.message import Message


class ToReplica(Message, frozen=True, kw_only=True):
    """With `FragmentSent` comes the fragment's version, or the payload of its change."""

    body: ReplicaOrder


class FromReplica(Message, frozen=True, kw_only=True):
    """With `Contributed` come payloads, one for each fragment."""

    body: ReplicaReport | DeviceFailed


DecoupledMessage = ToReplica | FromReplica
