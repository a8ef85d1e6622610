"""The endpoint over HTTP. It is for this machine, or for who has its key."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.api.generation import ModelService
from isthmus.endpoint.documents import Answer, AnyRequest, ChatRequest, CompletionRequest, Finish, refusal
from isthmus.endpoint.text_stream import TextPiece, text_stream
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.listening import is_loopback, listening_socket
from isthmus.protocol.generation import Sampling

MOST_BYTES = 1 << 22
"""Of a request."""
Wanted = TypeVar("Wanted", bound=AnyRequest)


class KeyGuard:
    """Lets a request pass if it has the key; without a key, if it comes to this machine's own name, from no page of
    another site."""

    def __init__(self, app: ASGIApp, *, port: int, key: str) -> None:
        self._app, self._key = app, key
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key and not hmac.compare_digest(given.encode(), self._key.encode()):
            answer = _document(refusal("expected the key that `isthmus serve-model` has printed", "auth"), 401)
        elif not self._key and (host not in self._hosts or (origin and origin.partition("://")[2] != host)):
            answer = _document(refusal(f"host {host!r} or origin {origin!r} is refused", "auth"), 403)
        else:
            answer = self._app
        await answer(scope, receive, send)


class ModelEndpoint:
    """Answers of one model."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def models(self, _: Request) -> Response:
        model = {"id": self._service.name, "object": "model", "created": 0, "owned_by": "isthmus"}
        return _document({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        asked = await _read(request, CompletionRequest)
        if asked.echo and asked.stream:
            raise UserError("echo: got true with stream, expected one of the two")
        prompts = [self._service.tokens(prompt) for prompt in asked.prompts]
        before = [p if asked.echo and isinstance(p, str) else "" for p in asked.prompts]
        return await self._answered(asked, prompts, asked.sampling(asked.max_tokens), before, chat=False)

    async def chat(self, request: Request) -> Response:
        asked = await _read(request, ChatRequest)
        messages = [{"role": m.role, "content": m.content} for m in asked.messages]
        tokens = await run_in_threadpool(self._service.chat_tokens, messages)
        room = self._service.context - len(tokens)
        sampling = asked.sampling(asked.max_completion_tokens or asked.max_tokens or room)
        return await self._answered(asked, [tokens], sampling, [""], chat=True)

    async def _answered(
        self,
        asked: AnyRequest,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        before: Sequence[str],
        *,
        chat: bool,
    ) -> Response:
        streams = [
            text_stream(self._service.stream(tokens, sampling), asked.stops, self._service.ends) for tokens in prompts
        ]
        answer = Answer(self._service.name, chat=chat)
        if asked.stream:
            return StreamingResponse(_events(answer, streams), media_type="text/event-stream")
        found = await run_in_threadpool(_side_by_side, streams)
        texts = [first + "".join(piece.text for piece in one) for first, one in zip(before, found, strict=True)]
        finishes: list[Finish] = [one[-1].finish or "stop" for one in found]
        given, made = sum(map(len, prompts)), sum(map(len, found))
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        return _document(answer.whole(texts, finishes, usage))


def _side_by_side(streams: Sequence[Iterator[TextPiece]]) -> list[list[TextPiece]]:
    """All streams read to their ends at the same time. PeerError where one fails."""
    found: list[list[TextPiece]] = [[] for _ in streams]
    failures: list[IsthmusError] = []

    def read(number: int) -> None:
        try:
            found[number].extend(streams[number])
        except IsthmusError as e:
            failures.append(e)

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return found


async def _events(answer: Answer, streams: Sequence[Iterator[TextPiece]]) -> AsyncGenerator[bytes]:
    """One prompt's answer after the other's: clients stream one."""
    try:
        for number, stream in enumerate(streams):
            async for piece in iterate_in_threadpool(stream):
                if piece.text or piece.finish:
                    yield _event(answer.chunk(number, piece.text, piece.finish))
    except IsthmusError as e:
        yield _event(refusal(str(e), "server_error"))
        return
    yield b"data: [DONE]\n\n"


def _event(document: object) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _document(document: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


async def _read(request: Request, kind: type[Wanted]) -> Wanted:
    """UserError for a document that is none, or too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise UserError(f"request: more than {MOST_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(body), type=kind)
    except ValueError as e:  # msgspec's, or UnicodeDecodeError
        raise UserError(f"request: {e}") from None


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, PeerError):
        return _document(refusal(str(error), "server_error"), 503)
    return _document(refusal(str(error), "invalid_request_error"), 400)


def application(service: ModelService, *, port: int, key: str = "") -> Starlette:
    """What answers at this port. With a key every request needs it."""
    endpoint = ModelEndpoint(service)
    routes = [
        Route("/v1/models", endpoint.models),
        Route("/v1/completions", endpoint.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
    ]
    guard = Middleware(KeyGuard, port=port, key=key)
    return Starlette(routes=routes, middleware=[guard], exception_handlers={IsthmusError: _refused})


def serve(service: ModelService, host: str, port: int, log: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM, or until no device is left. `log` gets the address, and the key where one is needed.
    UserError where nothing can listen there."""
    key = "" if is_loopback(host) else secrets.token_urlsafe(24)
    try:
        listener = listening_socket(host, port)
    except UserError as e:
        raise UserError(f"serve-model: {e}; --port 0 takes a free one") from None
    shown = f"[{host}]" if ":" in host else host
    log(f"http://{shown}:{listener.getsockname()[1]}/v1{f' key {key}' if key else ''}")
    _until_ended(service, listener, key)


def _until_ended(service: ModelService, listener: socket.socket, key: str) -> None:
    app = application(service, port=listener.getsockname()[1], key=key)
    config = uvicorn.Config(app, log_level="error", lifespan="off", server_header=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)

    def end() -> None:
        service.wait_ended()
        server.should_exit = True

    threading.Thread(target=end, name="ended", daemon=True).start()
    server.run([listener])
