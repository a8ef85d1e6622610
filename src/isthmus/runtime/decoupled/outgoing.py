"""The sending side of one connection between a replica and the merger: a thread that asks what to send next when the
link is free. Who decides what to send never waits for a link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from isthmus.fleet import Link
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.transport.channel import SocketChannel, frame
from isthmus.runtime.transport.shaping import ShapedLink
from isthmus.training.layout import pack

Outgoing = tuple[AnyMessage, Sequence[Tensor]]


class OutgoingLink:
    """Sends the messages of one channel. Tensors that it is given must not change."""

    def __init__(self, channel: SocketChannel, shape: Link | None, following: Callable[[], Outgoing | None]) -> None:
        """`following` gives the next message, None where there is none; called in the thread. `shape` is an emulated
        link. Where a message cannot be sent the channel is closed: who receives from it sees its end."""
        self._channel = channel
        self._following = following
        self._shaped = None if shape is None else ShapedLink(channel, shape, lambda _: channel.close())
        self._wakeup = threading.Condition()
        self._woken, self._over = False, False
        self.sent_bytes = 0
        """Bytes of tensors."""
        self._thread = threading.Thread(target=self._send, name=f"send to {channel.other}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something to send."""
        with self._wakeup:
            self._woken = True
            self._wakeup.notify()

    def finish(self, timeout_s: float) -> None:
        """Send what there is, but take no longer than this."""
        with self._wakeup:
            self._over = self._woken = True
            self._wakeup.notify()
        self._thread.join(timeout_s)

    def _send(self) -> None:
        try:
            while True:
                with self._wakeup:
                    self._wakeup.wait_for(lambda: self._woken)
                    self._woken, over = False, self._over
                while (message := self._following()) is not None:
                    self._put(*message)
                if over:
                    break
            if self._shaped is not None:
                self._shaped.close()
        except Exception:  # it closes the channel; who receives from it learns why it ended
            self._channel.close()

    def _put(self, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        payload = [pack(tensor) for tensor in tensors]
        if self._shaped is None:
            self._channel.send(message, payload)
        else:
            self._shaped.send(frame(message, payload), time.monotonic())
        self.sent_bytes += sum(part.nbytes for part in payload)
