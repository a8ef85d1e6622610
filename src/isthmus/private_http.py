"""HTTP on a `PrivateListener`: uvicorn, with bounds on connections that have not shown that they may ask.

A connection is known once a request of it has passed the application's guard, which calls `mark_known`. Others are
closed after a while, and the oldest ones of the address with most of them where there are too many: who has the secret
gets in however many connections unknown peers keep open, from its own address too, as behind a proxy.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Any, NamedTuple, cast

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

FIRST_REQUEST_S = 20.0  # in which a connection has to become known
MOST_OF_ADDRESS = 64  # unknown connections of one address that have been here for longer than `JUST_CAME_S`
JUST_CAME_S = 2.0  # so long the request of a new connection may take to arrive, though hundreds come at once
MOST_UNKNOWN = 1024  # unknown connections, at most a quarter of the files that the process may open
BACKLOG = 32  # connections that are accepted at once, before any of them is counted
QUEUE = 2048  # connections that wait to be accepted
_MARK = "isthmus.mark_known"


class _Connection(NamedTuple):
    since_s: float
    close: Callable[[], None]


class UnknownConnections:
    """Which of them are closed. Knows no clock and no socket."""

    def __init__(self, most: int = MOST_UNKNOWN) -> None:
        self._most = most
        self._of: dict[str, dict[Hashable, _Connection]] = {}  # connections by address, the oldest first
        self._address: dict[Hashable, str] = {}

    def __len__(self) -> int:
        return len(self._address)

    def came(self, key: Hashable, host: str, now_s: float, close: Callable[[], None]) -> None:
        """May close older ones."""
        address = network_of(host)
        mine = self._of.setdefault(address, {})
        mine[key], self._address[key] = _Connection(now_s, close), address
        if len(mine) > MOST_OF_ADDRESS:
            above = next(islice(mine.values(), MOST_OF_ADDRESS, None))
            if above.since_s < now_s - JUST_CAME_S:
                self._close_oldest(address)
        if len(self) > self._most:
            self._close_oldest(max(self._of, key=lambda one: len(self._of[one])))

    def left(self, key: Hashable) -> None:
        """It is closed, or known."""
        if (address := self._address.pop(key, None)) is not None:
            del self._of[address][key]
            if not self._of[address]:
                del self._of[address]

    def _close_oldest(self, address: str) -> None:
        key, connection = next(iter(self._of[address].items()))
        self.left(key)
        connection.close()


def network_of(host: str) -> str:
    """Return a client's network: an IPv4 address, or the 64 bits that begin an IPv6 address."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((found, 64), strict=False))


def mark_known(scope: Scope) -> None:
    """The request of this scope may ask: its connection is bounded no more."""
    if (mark := scope.get("state", {}).get(_MARK)) is not None:
        mark()


def _protocol_of(unknown: UnknownConnections, first_request_s: float) -> type[asyncio.Protocol]:
    class BoundedProtocol(AutoHTTPProtocol):
        deadline: asyncio.TimerHandle | None = None

        def __init__(self, **given: Any) -> None:
            given["app_state"] = {**given["app_state"], _MARK: self._settled}
            super().__init__(**given)

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            abort = cast("asyncio.Transport", transport).abort  # uvloop's has it without being one
            super().connection_made(transport)
            peer = transport.get_extra_info("peername")
            loop = asyncio.get_running_loop()
            unknown.came(self, peer[0] if peer else "", loop.time(), abort)
            self.deadline = loop.call_later(first_request_s, abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self._settled()
            super().connection_lost(exc)

        def _settled(self) -> None:
            unknown.left(self)
            if self.deadline is not None:
                self.deadline.cancel()

    return BoundedProtocol


class PrivateServer(uvicorn.Server):
    """Serves an application on a socket that listens, until Ctrl-C or SIGTERM."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, first_request_s: float = FIRST_REQUEST_S) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MOST_UNKNOWN if files == resource.RLIM_INFINITY else min(MOST_UNKNOWN, files // 4)
        self.unknown = UnknownConnections(most)
        self._listener, self._app = listener, app
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",  # of a method uvicorn does not see it
            http=_protocol_of(self.unknown, first_request_s),
            log_level="error",
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that leaves, or that reads no further when the server ends, is no error: uvicorn would print one."""
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            if not self.should_exit:
                raise

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.listen(QUEUE)  # uvicorn has one number for both

    def serve_until_ended(self) -> None:
        self.run([self._listener])
