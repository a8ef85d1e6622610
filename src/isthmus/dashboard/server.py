"""The page over HTTP. It answers GET alone, reads and never writes, and is for this machine unless a token is asked."""

from __future__ import annotations

import asyncio
import hmac
import math
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from pathlib import Path

import msgspec
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.dashboard.run_folder import Source, WatchedRun
from isthmus.dashboard.run_view import head, overview, state_at
from isthmus.dashboard.timeline import Timelines
from isthmus.listening import own_hosts, private_listener
from isthmus.private_http import PrivateServer, mark_known

PAGE = Path(__file__).parent / "page"
FILES = {"/" if path.name == "index.html" else f"/{path.name}": path for path in sorted(PAGE.glob("*.*"))}
LOOK_S = 0.4  # how often a run's folder is looked at, for who has the page open
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
MOST_NUMBER = 1e15
COOKIE = "isthmus-dashboard"


class Guard:
    """Refuses who does not come from the page itself: another origin, another host name, no token.

    A page of another site can make a browser ask for http://127.0.0.1:7434, or point its own name here: the first has
    another Origin, the second another Host. Where a token is asked for, any name will do: a foreign one has no cookie.
    """

    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self._app, self._token = app, token
        self._hosts = own_hosts(port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        answer = self._refusal(request)
        if answer is None:
            mark_known(scope)
        if answer is None and self._token and "token" in request.query_params:  # it leaves the address and its history
            answer = RedirectResponse(request.url.remove_query_params("token").replace(scheme="", netloc=""), 303)
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


class Answers:
    """Documents for the page, made one at a time: files are read on from where the last request left them."""

    def __init__(self, source: Source) -> None:
        self._source, self._timelines, self._lock = source, Timelines(), threading.Lock()

    def route(self, path: str, make: Callable[[Request], object]) -> Route:
        def made(request: Request) -> bytes:
            try:
                with self._lock:
                    return msgspec.json.encode(make(request))
            except HTTPException:
                raise
            except Exception as e:  # of any kind: files say anything
                raise HTTPException(500, f"The run's files cannot be shown: {type(e).__name__}: {e}") from e

        async def respond(request: Request) -> Response:
            return Response(await run_in_threadpool(made, request), media_type="application/json")

        return Route(path, respond)

    def runs(self, _: Request) -> object:
        listed = [head(run) | {"id": name} for name, run in self._source.runs().items()]
        return {"runs": listed, "fleet": self._source.fleet()}

    def run(self, request: Request) -> object:
        return overview(self._found(request))

    def at(self, request: Request) -> object:
        return state_at(self._found(request), _moment(request))

    def timeline(self, request: Request) -> object:
        step, columns = int(_number(request, "step") or 1), int(_number(request, "columns") or 800)
        from_s, to_s = _number(request, "from"), _number(request, "to")
        span_s = (from_s, to_s) if from_s is not None and to_s is not None and to_s > from_s else None
        columns, run = min(4000, max(50, columns)), self._found(request)
        return self._timelines.timeline(run, step, _moment(request), span_s=span_s, columns=columns)

    async def changes(self, request: Request) -> Response:
        stamp = partial(self._stamp, request.query_params.get("run", ""))

        async def events() -> AsyncGenerator[dict[str, str]]:
            before: object = None
            while True:
                now = await run_in_threadpool(stamp)
                if now != before:
                    before = now
                    yield {"event": "changed", "data": ""}
                await asyncio.sleep(LOOK_S)

        return EventSourceResponse(events(), ping=15)

    def _found(self, request: Request) -> WatchedRun:
        runs, wanted = self._source.runs(), request.query_params.get("run", "")
        if wanted not in runs:
            raise HTTPException(404, f"There is no run {wanted!r} here.")
        return runs[wanted]

    def _stamp(self, name: str) -> object:
        with self._lock:
            runs = self._source.runs()
            if name in runs:
                return runs[name].stamp()
            return [(known, head(run)["state"]) for known, run in runs.items()], msgspec.json.encode(
                self._source.fleet()
            )


def _number(request: Request, name: str) -> float | None:
    given = request.query_params.get(name)
    try:
        found = None if given is None else float(given)
    except ValueError:
        found = math.nan
    if found is not None and not abs(found) < MOST_NUMBER:  # nor one that is no number
        raise HTTPException(400, f"{name}: got {given!r}, expected a number")
    return found


def _moment(request: Request) -> int | None:
    found = _number(request, "moment")
    return None if found is None else max(0, int(found))


def _file(path: Path) -> Callable[[Request], Coroutine[None, None, Response]]:
    async def respond(_: Request) -> Response:
        return FileResponse(path)

    return respond


def application(source: Source, *, port: int, token: str = "") -> Starlette:
    """Return the application at this port. With a token every request needs it."""
    answers = Answers(source)
    routes = [
        *(Route(url, _file(path)) for url, path in FILES.items()),
        *(answers.route(f"/api/{make.__name__}", make) for make in (answers.runs, answers.run, answers.at)),
        answers.route("/api/timeline", answers.timeline),
        Route("/api/changes", answers.changes),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, port=port, token=token)])


def serve_page(source: Source, listener: socket.socket, token: str = "") -> None:
    """Until Ctrl-C, or SIGTERM."""
    app = application(source, port=listener.getsockname()[1], token=token)
    PrivateServer(app, listener).serve_until_ended()


def serve(source: Source, host: str, port: int, log: Callable[[str], None]) -> None:
    """Until Ctrl-C. `log` gets the page's address. UserError where nothing can listen there."""
    listener, token, address = private_listener(host, port, "dashboard")
    log(f"{address}/{f'?token={token}' if token else ''}")
    serve_page(source, listener, token)
