"""The coordinator's connections to sites: one per site at a time. A site may reconnect while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from isthmus.protocol.federated_messages import PhaseOpened
from isthmus.runtime.messages.all_messages import AnyMessage, content
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.transport.acceptor import Acceptor, OnMessage
from isthmus.runtime.transport.channel import MessageChannel, SocketChannel
from isthmus.runtime.transport.lanes import SendLane

FLUSH_S = 5.0


class SiteAcceptor(Acceptor):
    """A new connection of a site replaces its old one: the site noticed before the coordinator that the old one is
    dead."""

    def __init__(
        self,
        run: str,
        devices: Collection[str],
        *,
        on_message: OnMessage,
        guard: Callable[[str, AnyMessage], None],
        timeout_s: float,
    ) -> None:
        super().__init__(run, devices, on_message=on_message, guard=guard, timeout_s=timeout_s)
        self._endings: dict[MessageChannel, threading.Event] = {}

    def admit(self, channel: MessageChannel, join: JoinRun) -> None:
        super().admit(channel, join)
        if (ended := self._endings.pop(channel, None)) is not None:
            ended.set()

    def _takes(self, channel: MessageChannel, join: JoinRun) -> bool:
        if join.run != self._run or join.device not in self._devices:
            return False
        with self._admitting:
            former = self._channels.get(join.device)
            ended = None if former is None else self._endings.get(former)
        if former is not None and ended is not None:
            former.close()
            if not ended.wait(self._timeout_s):  # messages of the old connection are handled first
                return False
        with self._admitting:
            if self._closed or self._channels.get(join.device) is not former:
                return False
            self._channels[join.device] = channel
            self._endings[channel] = threading.Event()
            return True


class SiteConnection:
    """An output with its own thread: a site that receives nothing does not delay the others."""

    def __init__(self, channel: MessageChannel, timeout_s: float, fail: Callable[[Exception], None]) -> None:
        assert isinstance(channel, SocketChannel), "sites connect by sockets"
        self._lane = SendLane(channel, timeout_s=timeout_s, on_error=fail)

    def put(self, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        if isinstance(content(message), PhaseOpened):  # or one that takes nothing would be kept a model of each round
            self._lane.withdraw(PhaseOpened)
        self._lane.put(message, tensors)

    def flush(self) -> None:
        """Close the output; messages that are not sent within `FLUSH_S` are dropped."""
        self._lane.close(FLUSH_S)

    def close(self) -> None:
        self._lane.close(0.0)
