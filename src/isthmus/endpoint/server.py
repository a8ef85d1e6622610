"""The endpoint over HTTP. It is for this machine, or for who has its key."""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.api.generation import ModelService
from isthmus.endpoint.documents import (
    MAX_TOKENS,
    Answer,
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    Finish,
    refusal,
)
from isthmus.endpoint.text_stream import TextPiece, text_stream
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.listening import PrivateListener, own_hosts, private_listener
from isthmus.protocol.generation import Sampling

MOST_BYTES = 1 << 22
"""Of a request."""
Wanted = TypeVar("Wanted", bound=AnyRequest)


class KeyGuard:
    """Lets a request pass if it has the key; without a key, if it comes to this machine's own name, from no page of
    another site."""

    def __init__(self, app: ASGIApp, *, port: int, key: str) -> None:
        self._app, self._key = app, key
        self._hosts = own_hosts(port)

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
        asked = await _document_of(request, CompletionRequest)
        if asked.echo and asked.stream:
            raise UserError("echo: got true with stream, expected one of the two")
        prompts = [self._service.tokens(prompt) for prompt in asked.prompts]
        before = [p if asked.echo and isinstance(p, str) else "" for p in asked.prompts]
        sampling = asked.sampling(MAX_TOKENS if asked.max_tokens is None else asked.max_tokens)
        return await self._answered(request, asked, prompts, sampling, before)

    async def chat(self, request: Request) -> Response:
        asked = await _document_of(request, ChatRequest)
        messages = [{"role": m.role, "content": m.content} for m in asked.messages]
        tokens = await run_in_threadpool(self._service.chat_tokens, messages)
        room = self._service.context - len(tokens)
        sampling = asked.sampling(room if asked.most_tokens is None else asked.most_tokens)
        return await self._answered(request, asked, [tokens], sampling, [""])

    async def _answered(
        self,
        request: Request,
        asked: AnyRequest,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        before: Sequence[str],
    ) -> Response:
        streams = [
            text_stream(self._service.pieces(tokens, sampling), asked.stops, self._service.ends) for tokens in prompts
        ]
        answer = Answer(self._service.name, chat=isinstance(asked, ChatRequest))
        if asked.stream:
            return StreamingResponse(_events(answer, streams), media_type="text/event-stream")
        found = await _whole(request, streams)
        texts = [first + "".join(piece.text for piece in one) for first, one in zip(before, found, strict=True)]
        finishes: list[Finish] = [one[-1].finish or "stop" for one in found]
        given, made = sum(map(len, prompts)), sum(map(len, found))
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        return _document(answer.whole(texts, finishes, usage))


async def _whole(request: Request, streams: Sequence[AsyncGenerator[TextPiece]]) -> list[list[TextPiece]]:
    """All answers. PeerError where one fails, or the client hangs up before."""
    reading, watching = asyncio.create_task(_side_by_side(streams)), asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        raise PeerError("the client hung up")
    finally:
        reading.cancel()
        watching.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _side_by_side(streams: Sequence[AsyncGenerator[TextPiece]]) -> list[list[TextPiece]]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_read(stream)) for stream in streams]
    except ExceptionGroup as e:
        raise e.exceptions[0] from None
    return [task.result() for task in tasks]


async def _read(stream: AsyncGenerator[TextPiece]) -> list[TextPiece]:
    async with aclosing(stream):
        return [piece async for piece in stream]


async def _events(answer: Answer, streams: Sequence[AsyncGenerator[TextPiece]]) -> AsyncGenerator[bytes]:
    """One prompt's answer after the other's: clients stream one."""
    try:
        for number, stream in enumerate(streams):
            async with aclosing(stream):
                async for piece in stream:
                    if piece.text or piece.finish:
                        yield _event(answer.chunk(number, piece.text, piece.finish))
    except IsthmusError as e:
        yield _event(_said(e)[0])
        return
    yield b"data: [DONE]\n\n"


def _event(document: object) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _document(document: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


async def _document_of(request: Request, kind: type[Wanted]) -> Wanted:
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
    return _document(*_said(error))


def _said(error: Exception) -> tuple[dict[str, object], int]:
    """The document and the status."""
    if isinstance(error, UserError):
        return refusal(str(error), "invalid_request_error"), 400
    return refusal(str(error), "server_error"), 503


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


def open_port(host: str, port: int) -> PrivateListener:
    """UserError for an address that cannot be bound."""
    return private_listener(host, port, "serve-model")


def serve(service: ModelService, at: PrivateListener, log: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM, or until no device is left. `log` gets the address, and the key where one is needed."""
    log(f"{at.address}/v1{f' key {at.secret}' if at.secret else ''}")
    _until_ended(service, at.socket, at.secret)


class _Server(uvicorn.Server):
    """Refuses open requests when it ends, so that their clients get the reason."""

    def __init__(self, service: ModelService, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        await super().shutdown(sockets)


def _until_ended(service: ModelService, listener: socket.socket, key: str) -> None:
    app = application(service, port=listener.getsockname()[1], key=key)
    config = uvicorn.Config(
        app, log_level="error", lifespan="off", ws="none", server_header=False, timeout_graceful_shutdown=1
    )
    server = _Server(service, config)

    def end() -> None:
        service.wait_ended()
        server.should_exit = True

    threading.Thread(target=end, name="ended", daemon=True).start()
    server.run([listener])
