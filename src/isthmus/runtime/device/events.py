"""Events between a running stage and its device's process."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from isthmus.runtime.messages.all_messages import AnyMessage


class CoordinatorMessage(NamedTuple):
    """What the coordinator said that is nothing for a stage at work."""

    message: AnyMessage
    tensors: list[Tensor]
