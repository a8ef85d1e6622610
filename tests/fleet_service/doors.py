"""What an unknown peer on the same machine or network finds of running processes."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from pathlib import Path

from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.transport.channel import frame

LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""


def family_of(pid: int) -> list[int]:
    """The process and all that it has started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for file in children for child in file.read_text().split()]
    return [pid, *(descendant for child in found for descendant in family_of(child))]


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses on which a process listens."""
    inodes: set[str] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found: list[tuple[str, int]] = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and words[9] in inodes:
                address, _, port = words[1].rpartition(":")
                raw = bytes.fromhex(address)
                in_order = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.append((socket.inet_ntop(family, in_order), int(port, 16)))
    return found


def _answer(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    told = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            told += data
    return told


def refuses_unknown_peers(address: tuple[str, int]) -> None:
    """Who does not speak TLS is told nothing but that, in TLS's own alert; nor who has no certificate, but for the
    authority's certificate where devices join."""
    plain_frame = b"".join(frame(Heartbeat(run="guessed"), []))
    for said in (b"GET / HTTP/1.1\r\n\r\n" * 4, plain_frame * 8, b"\x80\x04\x95\x00" * 64, bytes(5000)):
        with socket.create_connection(address, timeout=10) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(said)
            told = _answer(connection)
            assert len(told) <= 7 and told[:1] in (b"", b"\x15"), (address, told)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(address, timeout=10) as connection, contextlib.suppress(OSError):
        session = context.wrap_socket(connection)
        session.sendall(plain_frame * 400)
        assert len(_answer(session)) < 2000, address


def readable_by_others(folder: Path) -> list[bytes]:
    """Contents of the files in a folder that others may look into; a run may replace files and folders meanwhile."""
    told = []
    for parent, _, names in os.walk(folder):  # passes over a folder that is gone
        for path in (Path(parent) / name for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
                    told.append(path.read_bytes())
    return told
