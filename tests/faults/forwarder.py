"""A TCP forwarder in front of a device: what can go wrong with a link between two devices, without privileges.

It listens on another loopback address with the device's own port. `Place(address=...)` sends others there.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Literal

ADDRESS = "127.0.0.2"
Way = Literal["there", "back"]
CHUNK_BYTES = 4096


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Forwarder:
    """Forwards each connection to the device until something is done to it."""

    def __init__(self, port: int, *, bandwidth_bytes_per_s: float = 0.0, latency_s: float = 0.0) -> None:
        """0 bytes/s: as fast as it goes."""
        self._port = port
        self._bandwidth = bandwidth_bytes_per_s
        self._latency_s = latency_s
        self._open = threading.Event()
        self._open.set()
        self._lost: set[int] = set()
        """Connections whose bytes go nowhere any more, on the way back."""
        self._count = 0
        self._listener = socket.create_server((ADDRESS, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Nothing gets through, and nobody is told."""
        self._open.clear()
        time.sleep(seconds)
        self._open.set()

    def half_open(self) -> None:
        """What the device sends on connections that it has vanishes; what is sent to it arrives."""
        self._lost |= set(range(self._count))

    def close(self) -> None:
        self._open.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._port), timeout=60)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                number, self._count = self._count, self._count + 1
                for source, target, way in ((near, far, "there"), (far, near, "back")):
                    line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    arguments = (source, line)
                    threading.Thread(target=self._take, args=arguments, daemon=True).start()
                    threading.Thread(target=self._give, args=(target, line, number, way), daemon=True).start()

    def _take(self, source: socket.socket, line: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        free_s = 0.0
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                if self._bandwidth:
                    free_s = max(free_s, time.monotonic()) + len(data) / self._bandwidth
                    time.sleep(max(0.0, free_s - time.monotonic()))
                line.put((time.monotonic() + self._latency_s, data))
        line.put((time.monotonic() + self._latency_s, b""))

    def _give(self, target: socket.socket, line: queue.SimpleQueue[tuple[float, bytes]], number: int, way: Way) -> None:
        with contextlib.suppress(OSError):
            while True:
                due_s, data = line.get()
                time.sleep(max(0.0, due_s - time.monotonic()))
                self._open.wait()
                if way == "back" and number in self._lost:
                    continue
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
