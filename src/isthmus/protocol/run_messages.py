"""The bodies of a run's frames. A machine emits a body, and the machine that receives the frame takes the same body.

A body names its plan epoch. A body does not name its sender: the receiver knows the sender from the connection.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.protocol.machine import Event
from isthmus.protocol.work import Item

NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class Body(Event, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What one frame says."""


# Coordinator to device


class Pause(Body, frozen=True, kw_only=True):
    """Close the stage and list the states in memory. The epoch is the new one."""


class PlaceWeights(Body, frozen=True, kw_only=True):
    """The weights of the stage follow, except the parts in `own`: the device has those in memory."""

    own: frozenset[str] = frozenset()


class OpenItem(Body, frozen=True, kw_only=True):
    """The coordinator leases an item to every device."""

    item: Item


class FetchState(Body, frozen=True, kw_only=True):
    """Give these parts of the state after `step` steps: another device needs them."""

    step: int
    parts: frozenset[str]


class RetireSnapshots(Body, frozen=True, kw_only=True):
    """The snapshot of this step is complete, with its copies: forget older snapshots."""

    step: int


class SendState(Body, frozen=True, kw_only=True):
    """Give these parts of the state after `step` steps, which the device has not passed yet, and each later step's
    gradients, in the background. No parts: give no more."""

    number: NotNegative
    """Of the state transfer, in the run."""
    step: NotNegative
    parts: frozenset[str]


class Halt(Body, frozen=True, kw_only=True):
    """The run is over for this device."""


DeviceOrder = Pause | PlaceWeights | FetchState | SendState
"""To one device."""
RunOrder = OpenItem | RetireSnapshots | Halt
"""To every device of the run."""
