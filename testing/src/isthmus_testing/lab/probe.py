"""Measures one directed path between two places of one machine: a receiver there, a sender here, real TCP.

Run as a script (it imports nothing of Isthmus): `receive ADDRESS` prints the port it listens on and then its
findings as JSON; `send ADDRESS PORT SECONDS` feeds it. Both ends read the same monotonic clock, so
one-way delay is measured directly and not as half a round trip.
"""

from __future__ import annotations

import json
import socket
import statistics
import struct
import sys
import time

_STAMP = struct.Struct("=d")
_STAMPS = 40
_STAMP_GAP_S = 0.01
_SETTLE_FRACTION = 0.4  # of the bulk phase, left to slow start
_WINDOW_S = 0.25
_CHUNK_BYTES = 1 << 18


def receive(address: str) -> None:
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        delays = sorted(_one_delay(connection) for _ in range(_STAMPS))
        (bulk_s,) = _STAMP.unpack(connection.recv(_STAMP.size, socket.MSG_WAITALL))
        rates = _rates(connection, bulk_s)
    print(json.dumps({"delay_s": statistics.median(delays), "payload_bytes_per_s": statistics.median(rates)}))


def _one_delay(connection: socket.socket) -> float:
    (sent_s,) = _STAMP.unpack(connection.recv(_STAMP.size, socket.MSG_WAITALL))
    return time.monotonic() - sent_s


def _rates(connection: socket.socket, bulk_s: float) -> list[float]:
    """Bytes per second in each full window after the connection has settled."""
    buffer = bytearray(_CHUNK_BYTES)
    settled_s = time.monotonic() + _SETTLE_FRACTION * bulk_s
    window_start_s, window_bytes = settled_s, 0
    rates: list[float] = []
    while size := connection.recv_into(buffer):
        now_s = time.monotonic()
        if now_s < settled_s:
            window_start_s = now_s
            continue
        window_bytes += size
        if now_s - window_start_s >= _WINDOW_S:
            rates.append(window_bytes / (now_s - window_start_s))
            window_start_s, window_bytes = now_s, 0
    return rates


def send(address: str, port: int, bulk_s: float) -> None:
    with socket.create_connection((address, port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_STAMPS):
            connection.sendall(_STAMP.pack(time.monotonic()))
            time.sleep(_STAMP_GAP_S)
        connection.sendall(_STAMP.pack(bulk_s))
        chunk = bytes(_CHUNK_BYTES)
        end_s = time.monotonic() + bulk_s
        while time.monotonic() < end_s:
            connection.sendall(chunk)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
