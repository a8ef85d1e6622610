"""The page over HTTP. It answers GET alone, reads and never writes, and is for this machine unless a token is asked."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import uvicorn
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.dashboard import run_view
from isthmus.dashboard.run_folder import WatchedRun
from isthmus.dashboard.sources import Source
from isthmus.errors import UserError

PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html", **{f"/{n}": n for n in ("style.css", "app.js", "uPlot.iife.min.js", "uPlot.min.css")}}
LOOK_S = 0.4
"""How often a run's folder is looked at, for who has the page open."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
COOKIE = "isthmus-dashboard"


class Guard:
    """Refuses who does not come from the page itself: another origin, another host name, no token.

    A page of another site can make a browser ask for http://127.0.0.1:7434, or point its own name here: the first has
    another Origin, the second another Host. Where a token is asked for, any name will do: a foreign one has no cookie.
    """

    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self._app, self._token = app, token
        self._hosts = {f"{name}:{port}" for name in LOOPBACK}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer = self._refusal(request)
        if answer is None and self._token and "token" in request.query_params:  # it leaves the address and its history
            rest = "&".join(f"{k}={v}" for k, v in request.query_params.multi_items() if k != "token")
            answer = RedirectResponse(f"{request.url.path}{'?' if rest else ''}{rest}", 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.encode(), v.encode()) for k, v in HEADERS.items()]
            await send(message)

        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return PlainTextResponse("another origin is refused", 403)
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("another site is refused", 403)
        if not self._token:
            return None if host in self._hosts else PlainTextResponse(f"host {host!r} is refused", 421)
        given = request.query_params.get("token") or request.cookies.get(COOKIE, "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return PlainTextResponse("a token is needed: open the address that `isthmus dashboard` has printed", 401)
        return None


def application(source: Source, *, port: int, token: str = "") -> Starlette:
    """What answers at this port. With a token every request needs it."""

    def found(request: Request) -> WatchedRun:
        runs, wanted = source.runs(), request.query_params.get("run", "")
        if wanted not in runs:
            raise HTTPException(404, f"There is no run {wanted!r} here.")
        return runs[wanted]

    one_at_a_time = threading.Lock()  # files are read on from where the last request left them

    def answer(make: Callable[[Request], object]) -> Callable[[Request], object]:
        def made(request: Request) -> bytes:
            with one_at_a_time:
                return msgspec.json.encode(make(request))

        async def respond(request: Request) -> Response:
            return Response(await run_in_threadpool(made, request), media_type="application/json")

        return respond

    def runs(_: Request) -> object:
        listed = {name: run_view.head(run) for name, run in source.runs().items()}
        return {"runs": [{**shown, "id": name} for name, shown in listed.items()], "fleet": source.fleet()}

    def at(request: Request) -> object:
        moment = _number(request, "moment")
        return run_view.state_at(found(request), None if moment is None else max(0, int(moment)))

    def timeline(request: Request) -> object:
        step, columns = _number(request, "step"), _number(request, "columns")
        from_s, to_s = _number(request, "from"), _number(request, "to")
        span = (from_s, to_s) if from_s is not None and to_s is not None and to_s > from_s else None
        return run_view.timeline(found(request), int(step or 1), span, min(4000, max(50, int(columns or 800))))

    def stamp(name: str) -> object:
        with one_at_a_time:
            return _stamp(source, name)

    async def changes(request: Request) -> Response:
        name = request.query_params.get("run", "")

        async def told() -> AsyncGenerator[dict[str, str]]:
            before: object = None
            while True:
                now = await run_in_threadpool(stamp, name)
                if now != before:
                    before = now
                    yield {"event": "changed", "data": json.dumps({"run": name})}
                await asyncio.sleep(LOOK_S)

        return EventSourceResponse(told(), ping=15)

    routes = [Route(path, _file(name)) for path, name in FILES.items()]
    routes += [
        Route("/api/runs", answer(runs)),
        Route("/api/run", answer(lambda request: run_view.overview(found(request)))),
        Route("/api/at", answer(at)),
        Route("/api/timeline", answer(timeline)),
        Route("/api/changes", changes),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, port=port, token=token)])


def _number(request: Request, name: str) -> float | None:
    given = request.query_params.get(name)
    try:
        return None if given is None else float(given)
    except ValueError:
        raise HTTPException(400, f"{name}: got {given!r}, expected a number") from None


def _stamp(source: Source, name: str) -> object:
    runs = source.runs()
    if name in runs:
        return runs[name].stamp()
    return [(known, run_view.state_of(run)) for known, run in runs.items()], msgspec.json.encode(source.fleet())


def _file(name: str) -> Callable[[Request], object]:
    async def respond(_: Request) -> Response:
        return FileResponse(PAGE / name)

    return respond


def serve(source: Source, host: str, port: int, said: Callable[[str], None]) -> None:
    """Until Ctrl-C. `said` gets the page's address. UserError where nothing can listen there."""
    local = host in ("127.0.0.1", "localhost", "::1")
    token = "" if local else secrets.token_urlsafe(24)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as e:
        reason = e.strerror or e
        raise UserError(f"dashboard: {host}:{port}: cannot listen: {reason}; --port 0 takes a free one") from None
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    said(f"http://{shown}:{port}/{f'?token={token}' if token else ''}")
    app = application(source, port=port, token=token)
    config = uvicorn.Config(app, log_level="error", lifespan="off", server_header=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run([listener])
