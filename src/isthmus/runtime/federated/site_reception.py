"""Sites at the coordinator: one connection each at a time, which may end and begin again while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from isthmus.runtime.messages.every import AnyMessage
from isthmus.runtime.messages.federated import TurnMessage
from isthmus.runtime.messages.run import Join
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.reception import Heard, Reception

FLUSH_S = 5.0


class SiteReception(Reception):
    """Whoever comes again displaces the connection that it had: it knows better than we that this one is dead."""

    def __init__(
        self,
        run: str,
        devices: Collection[str],
        *,
        heard: Callable[[Heard], None],
        guard: Callable[[str, AnyMessage], None],
        patience_s: float,
    ) -> None:
        super().__init__(run, devices, heard=heard, guard=guard, patience_s=patience_s)
        self._endings: dict[SocketChannel, threading.Event] = {}

    def admit(self, channel: SocketChannel, join: Join) -> None:
        super().admit(channel, join)
        if (ended := self._endings.pop(channel, None)) is not None:
            ended.set()

    def _takes(self, channel: SocketChannel, join: Join) -> bool:
        if join.run != self._run or join.device not in self._devices:
            return False
        with self._admitting:
            former = self._channels.get(join.device)
            ended = None if former is None else self._endings.get(former)
        if former is not None and ended is not None:
            former.close()
            if not ended.wait(self._patience_s):  # what it said must be heard before what this one says
                return False
        with self._admitting:
            if self._closed or self._channels.get(join.device) is not former:
                return False
            self._channels[join.device] = channel
            self._endings[channel] = threading.Event()
            return True


class Lane:
    """A way out with a thread of its own: a site that takes nothing holds up nobody."""

    def __init__(self, channel: SocketChannel, patience_s: float, fail: Callable[[Exception], None]) -> None:
        self._lane = SendLane(channel, patience_s=patience_s, on_error=fail)

    def put(self, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        if isinstance(message, TurnMessage):  # or one that takes nothing would be kept a model of each round
            self._lane.withdraw(TurnMessage)
        self._lane.put(message, tensors)

    def flush(self) -> None:
        """What is not taken within seconds is dropped."""
        self._lane.close(FLUSH_S)

    def close(self) -> None:
        self._lane.close(0.0)
