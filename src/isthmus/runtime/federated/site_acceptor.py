"""The coordinator's connections to sites: one per site at a time. A site may reconnect while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from isthmus.protocol.federated_messages import PhaseOpened
from isthmus.runtime.messages.all_messages import AnyMessage, content
from isthmus.runtime.transport.acceptor import Acceptor
from isthmus.runtime.transport.channel import MessageChannel, SocketChannel
from isthmus.runtime.transport.lanes import SendLane

FLUSH_S = 5.0


class SiteAcceptor(Acceptor):
    """A new connection of a site replaces its old one: the site noticed before the coordinator that the old one is
    dead."""

    replaces = True


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
