"""A crowd of unknown_peers at a listener's door: they connect, say nothing or not enough, and come again when cut."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Generator

DRIP_S = 0.05
"""Between two bytes of one that drips."""


def hello() -> bytes:
    """The first bytes of one who speaks TLS."""
    said = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    session = context.wrap_bio(ssl.MemoryBIO(), said)
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return said.read()


class Crowd:
    """Keeps so many connections of each kind open, until `stop`."""

    def __init__(self, address: tuple[str, int], *, idle: int, dripping: int, halfway: int) -> None:
        self._address = address
        self._kinds = ["idle"] * idle + ["drip"] * dripping + ["halfway"] * halfway
        self._hello = hello()
        self._over = threading.Event()
        self.reopened = 0
        self.all_there = threading.Event()
        self._thread = threading.Thread(target=self._press, name="crowd", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _press(self) -> None:
        with selectors.DefaultSelector() as held:
            for kind in self._kinds:
                self._connect(held, kind)
            self.all_there.set()
            dripped_s = 0.0
            while not self._over.is_set():
                for key, _ in held.select(DRIP_S):
                    if not _lives(key.fileobj):
                        held.unregister(key.fileobj)
                        key.fileobj.close()
                        self.reopened += 1
                        self._connect(held, key.data[0])
                if time.monotonic() - dripped_s > DRIP_S:
                    dripped_s = time.monotonic()
                    for key in list(held.get_map().values()):
                        kind, left = key.data
                        if kind == "drip" and left:
                            with contextlib.suppress(OSError):
                                key.fileobj.send(left[:1])
                            held.modify(key.fileobj, selectors.EVENT_READ, (kind, left[1:]))
            for key in list(held.get_map().values()):
                key.fileobj.close()

    def _connect(self, held: selectors.BaseSelector, kind: str) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            if connection.connect_ex(self._address) not in (0, errno.EINPROGRESS):
                connection.close()
                return
        if kind == "halfway":
            connection.settimeout(5)
            with contextlib.suppress(OSError):
                connection.sendall(self._hello)
            connection.setblocking(False)
        held.register(connection, selectors.EVENT_READ, (kind, self._hello))


def _lives(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1 << 16))
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def crowd(port: int, *, idle: int = 0, dripping: int = 0, halfway: int = 0) -> Generator[Crowd]:
    """Of this machine, around `with`; they are all there at its beginning."""
    made = Crowd(("127.0.0.1", port), idle=idle, dripping=dripping, halfway=halfway)
    assert made.all_there.wait(60)
    try:
        yield made
    finally:
        made.stop()
