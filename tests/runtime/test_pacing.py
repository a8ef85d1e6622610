"""Which congestion control long links get."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest import mock

import pytest

from isthmus.runtime.transport import tcp
from isthmus.runtime.transport.tcp import round_trip_s, use_bbr, uses_bbr


def test_long_links_are_paced_where_the_kernel_can() -> None:
    known = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    if not known.exists() or "bbr" not in known.read_text().split():
        pytest.skip("this kernel has no BBR to choose")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        usual = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        trip_s = round_trip_s(near)
        assert trip_s is not None and 0 <= trip_s < 1
        with mock.patch.object(tcp, "LONG_S", 2.0):
            use_bbr(near)
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == usual
        assert uses_bbr(near) == usual.startswith(b"bbr")
        with mock.patch.object(tcp, "LONG_S", 0.0):
            use_bbr(near)
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")
        assert uses_bbr(near)


def test_what_is_no_tcp_stays_as_it_is() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert round_trip_s(near) is None and not uses_bbr(near)
        use_bbr(near)
