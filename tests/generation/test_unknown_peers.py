"""Connections that do not show the key, of the endpoint and the page, keep nobody out who has it."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from starlette.types import ASGIApp

from isthmus.api.generation import ModelService
from isthmus.dashboard.run_folder import FolderSource
from isthmus.dashboard.server import application as page
from isthmus.endpoint.server import application as endpoint
from isthmus.private_http import (
    FIRST_REQUEST_S,
    JUST_CAME_S,
    MOST_OF_ADDRESS,
    PrivateServer,
    UnknownConnections,
    network_of,
)

from .parrot import Parrot, served_parrot, serving

PEERS = 2000
FILES = 512
"""That the server's process may open."""
OTHERS = """
import resource, socket, sys, urllib.request
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
port, count, hosts, path, body, header, value = sys.argv[1:]
held = []
for number in range(int(count)):
    host = hosts.split(",")[number % len(hosts.split(","))]
    held.append(socket.create_connection(("127.0.0.1", int(port)), 60, (host, 0)))
    if number % 3 == 1:
        try:
            held[-1].sendall(b"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n")  # and no further
        except OSError:
            pass
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body.encode() or None, {header: value})
for _ in range(3):
    with opener.open(request, timeout=60) as answer:
        print(answer.read(), flush=True)
sys.stdin.read()
"""
"""They, and who has the key, are a process of their own: the files of the server's are few."""


@pytest.fixture
def few_files() -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


OF_MODEL = (
    "/v1/completions",
    json.dumps({"prompt": "ab", "max_tokens": 3, "stream": True}),
    "Authorization",
    "Bearer secret",
)
OF_PAGE = ("/api/runs?run=&token=secret", "", "Cookie", "isthmus-dashboard=secret")


def of_model(port: int, _: Path) -> ASGIApp:
    return endpoint(cast("ModelService", Parrot()), port=port, key="secret")


def of_page(port: int, folder: Path) -> ASGIApp:
    return page(FolderSource(folder), port=port, token="secret")


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize(
    ("make", "hosts", "loop"),
    [
        (of_model, "127.0.0.1", "auto"),
        (of_model, "127.0.0.1", "asyncio"),
        (of_model, "127.0.0.2,127.0.0.3,127.0.0.4", "asyncio"),
        (of_page, "127.0.0.1", "asyncio"),
    ],
)
def test_idle_peers_keep_nobody_out_who_has_the_key(
    make: Callable[[int, Path], ASGIApp], hosts: str, loop: Literal["auto", "asyncio"], tmp_path: Path
) -> None:
    """They have the address of who has it, as behind one router, or others; more than the process may open files."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        server = stack.enter_context(serving(make(port, tmp_path), listener, FIRST_REQUEST_S, loop))
        asked = OF_MODEL if make is of_model else OF_PAGE
        command = [sys.executable, "-c", OTHERS, str(port), str(PEERS), hosts, *asked]
        others = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert others.stdout is not None
        for _ in range(3):
            assert b"[DONE]" in (answer := others.stdout.readline()) or b'"runs":[]' in answer
        assert len(server.unknown) <= FILES // 4
        others.communicate()


@pytest.mark.parametrize("said", [b"", b"GET /v1/models HTTP/1.1\r\n"])
def test_who_has_not_shown_the_key_in_time_is_cut_off(said: bytes) -> None:
    """Whether it says nothing, or the half of a request."""
    with (
        served_parrot(Parrot(), key="secret", first_request_s=0.1) as address,
        socket.create_connection(address, 60) as peer,
        suppress(ConnectionError),
    ):
        peer.sendall(said)
        assert peer.recv(1) == b""


@pytest.mark.parametrize(("key", "status"), [(b"secret", b"200"), (b"wrong", b"401")])
def test_a_request_with_the_key_ends_the_time_and_no_other_does(key: bytes, status: bytes) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = listener.getsockname()
        server = stack.enter_context(serving(of_model(address[1], Path()), listener, 999.0))
        connection = stack.enter_context(socket.create_connection(address, 60))
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key + b"\r\n\r\n")
        assert connection.makefile("rb").readline().split()[1] == status
        (held,) = cast("set[Any]", server.server_state.connections)
        assert held.deadline.cancelled() == (key == b"secret")
        assert len(server.unknown) == (0 if key == b"secret" else 1)


class Door:
    """Connections by number, and those that were closed, in order."""

    def __init__(self, most: int) -> None:
        self.unknown, self.closed = UnknownConnections(most), list[int]()

    def come(self, numbers: range, host: str, now_s: float) -> None:
        for number in numbers:
            self.unknown.came(number, host, now_s, lambda number=number: self.closed.append(number))


def test_the_oldest_of_an_address_goes_first_and_a_burst_has_its_time() -> None:
    door = Door(9999)
    door.come(range(500), "10.0.0.1", 0.0)
    assert door.closed == [], "all have just come: their requests are on the way"
    door.come(range(500, 501), "10.0.0.1", JUST_CAME_S + 1)
    assert door.closed == [0]
    for number in range(1, 490):
        door.unknown.left(number)  # known now, or gone
    door.come(range(501, 501 + MOST_OF_ADDRESS - 11), "10.0.0.1", 2 * JUST_CAME_S + 2)
    assert door.closed == [0] and len(door.unknown) == MOST_OF_ADDRESS
    door.come(range(900, 901), "10.0.0.2", 99.0)
    assert door.closed == [0], "another address"
    door.come(range(700, 702), "10.0.0.1", 99.0)
    assert door.closed == [0], "these have just come"
    door.come(range(702, 705), "10.0.0.1", 99.0 + JUST_CAME_S + 1)
    assert door.closed == [0, 490, 491]


def test_where_there_are_too_many_the_address_with_most_pays() -> None:
    door = Door(10)
    door.come(range(2), "10.0.0.1", 0.0)
    door.come(range(10, 18), "10.0.0.2", 1.0)
    assert door.closed == []
    door.come(range(20, 22), "10.0.0.1", 1.0)
    door.come(range(30, 31), "10.0.0.3", 1.0)
    assert door.closed == [10, 11, 12] and len(door.unknown) == 10


def test_a_network_of_ipv6_is_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("fe80::1%eth0") == network_of("fe80::2%eth0")


def test_a_server_leaves_most_of_its_files_to_others(few_files: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = PrivateServer(of_page(1, Path()), listener)
        door = server.unknown
        closed = list[int]()
        for number in range(FILES):
            door.came(number, f"10.0.{number}.1", 0.0, lambda number=number: closed.append(number))
        assert closed == list(range(FILES - FILES // 4))
