"""Who may talk to the coordinator: one connection per device of the run, and nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Collection

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.runtime.channel import SocketChannel
from isthmus.runtime.messages import AnyMessage, Join

Heard = tuple[str, AnyMessage | Exception | None, list[Tensor]]
"""A device's name and its message with tensors; or what ended its connection, None if it closed it."""


class Reception:
    """Listens, admits whoever knows the run's secret name and says a device's name that is free, and receives.

    Every connection has a thread of its own: a stranger that is silent, or sends anything at all, holds up nobody.
    """

    def __init__(
        self,
        host: str,
        run: str,
        devices: Collection[str],
        *,
        heard: Callable[[Heard], None],
        guard: Callable[[str, AnyMessage], None],
        patience_s: float,
    ) -> None:
        """`guard` refuses (PeerError) a message before its tensors are received. Threads call both."""
        self._run = run
        self._devices = devices
        self._heard = heard
        self._guard = guard
        self._patience_s = patience_s
        self._admitting = threading.Lock()
        self._channels: dict[str, SocketChannel] = {}
        self._listener = socket.create_server((host, 0), backlog=len(devices) + 8)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def channel(self, device: str) -> SocketChannel:
        """The connection of a device that has joined."""
        return self._channels[device]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept that waits in its thread: close does not
        self._listener.close()
        for channel in list(self._channels.values()):
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            channel = SocketChannel(connection, f"{address[0]}:{address[1]}", self._patience_s)
            name = f"receive {channel.other}"
            threading.Thread(target=self._receive, args=(channel,), name=name, daemon=True).start()

    def _receive(self, channel: SocketChannel) -> None:
        """Receive from whoever connected: one device until it leaves, or nothing more from a stranger."""
        join = self._admit(channel)
        if join is None:
            channel.close()  # nothing of the run has changed
            return
        device = join.device
        channel.other = f"device {device!r}"
        self._heard((device, join, []))
        try:
            while (received := channel.receive(lambda m: self._check(device, m), idle_s=self._patience_s)) is not None:
                self._heard((device, *received))
            self._heard((device, None, []))
        except Exception as e:  # whoever listens decides
            self._heard((device, e, []))

    def _admit(self, channel: SocketChannel) -> Join | None:
        try:
            received = channel.receive(self._only_join, idle_s=self._patience_s)
        except PeerError:
            return None
        join = received[0] if received is not None else None
        if not isinstance(join, Join):
            return None
        with self._admitting:
            return join if self._channels.setdefault(join.device, channel) is channel else None

    def _only_join(self, message: AnyMessage) -> None:
        if not isinstance(message, Join) or message.tensors or message.device not in self._devices:
            raise PeerError(f"{type(message).__name__} from a stranger")
        self._check_run(message)

    def _check(self, device: str, message: AnyMessage) -> None:
        self._check_run(message)
        self._guard(device, message)

    def _check_run(self, message: AnyMessage) -> None:
        if message.run != self._run:
            raise PeerError("sent a frame of another run")
