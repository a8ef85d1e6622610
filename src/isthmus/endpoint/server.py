"""The endpoint over HTTP. It is for this machine, or for who has its key."""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.api.generation import ModelService, Piece
from isthmus.endpoint.documents import (
    MAX_TOKENS,
    Answer,
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    Finish,
    model_card,
    refusal,
)
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.listening import PrivateListener, own_hosts, private_listener
from isthmus.private_http import PrivateServer, mark_known
from isthmus.protocol.generation import Sampling
from isthmus.reading import parse_json


class TextPiece(NamedTuple):
    """The text that one token adds."""

    text: str
    finish: Finish | None  # why the answer ends with it; None where it goes on


async def text_stream(
    pieces: AsyncGenerator[Piece], stops: Sequence[str], ends: Sequence[int]
) -> AsyncGenerator[TextPiece]:
    """`ends` are the tokens with which the model ends a text. What may be the beginning of a stop string waits."""
    held, waits = "", max((len(stop) - 1 for stop in stops), default=0)
    async with aclosing(pieces):  # an answer that is not read to its end is cancelled
        async for piece in pieces:
            held += piece.text
            at = min((found for stop in stops if (found := held.find(stop)) >= 0), default=-1)
            if at >= 0:
                yield TextPiece(held[:at], "stop")
                return
            if piece.last:
                yield TextPiece(held, "stop" if piece.token in ends else "length")
                return
            ready, held = held[: max(0, len(held) - waits)], held[max(0, len(held) - waits) :]
            yield TextPiece(ready, None)


MOST_BYTES = 1 << 22  # bytes of a request


HEALTH = "/health"  # the path that load balancers and containers ask for, without the key


class KeyGuard:
    """Lets a request pass if it has the key, or asks for no more than `HEALTH`; without a key, if it comes to this
    machine's own name, from no page of another site."""

    def __init__(self, app: ASGIApp, *, port: int, key: str) -> None:
        self._app, self._key = app, key
        self._hosts = own_hosts(port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if scope["path"] == HEALTH:  # it tells nothing, and makes nobody known
            answer = self._app
        elif self._key and not hmac.compare_digest(given.encode(), self._key.encode()):
            answer = _document(refusal("expected the key that `isthmus serve-model` has printed", "auth"), 401)
        elif not self._key and (host not in self._hosts or (origin and origin.partition("://")[2] != host)):
            answer = _document(refusal(f"host {host!r} or origin {origin!r} is refused", "auth"), 403)
        else:
            mark_known(scope)
            answer = self._app
        await answer(scope, receive, send)


class _Work(NamedTuple):
    asked: AnyRequest
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    stops: Sequence[str]
    echoed: Sequence[str]  # the beginning of the answer to each prompt


class ModelEndpoint:
    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def health(self, _: Request) -> Response:
        return _document({"status": "ok"})

    async def models(self, _: Request) -> Response:
        return _document({"object": "list", "data": [model_card(self._service.name)]})

    async def model(self, request: Request) -> Response:
        """The name may have colons and slashes."""
        if (name := request.path_params["name"]) != self._service.name:
            raise HTTPException(404, f"model: got {name!r}, there is {self._service.name!r}")
        return _document(model_card(name))

    async def completions(self, request: Request) -> Response:
        body = await _body_of(request)
        return await self._answered(request, await run_in_threadpool(self._completion, body))

    async def chat(self, request: Request) -> Response:
        body = await _body_of(request)
        return await self._answered(request, await run_in_threadpool(self._conversation, body))

    # Decoding and tokenizing take seconds of long prompts: threads do it, while streams go on.

    def _completion(self, body: bytes) -> _Work:
        asked = parse_json(body, CompletionRequest, "request")
        given = asked.prompts
        prompts = [self._service.tokens(prompt) for prompt in given]
        sampling = asked.sampling(MAX_TOKENS if asked.max_tokens is None else asked.max_tokens)
        echoed = [
            "" if not asked.echo else prompt if isinstance(prompt, str) else self._service.text(prompt)
            for prompt in given
        ]
        return _Work(asked, prompts, sampling, asked.stops, echoed)

    def _conversation(self, body: bytes) -> _Work:
        asked = parse_json(body, ChatRequest, "request")
        tokens = self._service.chat_tokens([m.for_template(at) for at, m in enumerate(asked.messages)])
        room = self._service.context - len(tokens)
        sampling = asked.sampling(room if asked.most_tokens is None else asked.most_tokens)
        return _Work(asked, [tokens], sampling, asked.stops, [""])

    async def _answered(self, request: Request, work: _Work) -> Response:
        streams = [
            text_stream(self._service.pieces(tokens, work.sampling), work.stops, self._service.ends)
            for tokens in work.prompts
        ]
        answer = Answer(self._service.name, work.asked, sum(map(len, work.prompts)))
        if work.asked.stream:
            return StreamingResponse(_events(answer, streams, work.echoed), media_type="text/event-stream")
        found = await _whole(request, streams)
        texts = [first + "".join(piece.text for piece in one) for first, one in zip(work.echoed, found, strict=True)]
        finishes: list[Finish] = [one[-1].finish or "stop" for one in found]
        return _document(answer.whole(texts, finishes, sum(map(len, found))))


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


async def _events(
    answer: Answer, streams: Sequence[AsyncGenerator[TextPiece]], echoed: Sequence[str]
) -> AsyncGenerator[bytes]:
    """One prompt's answer after the other's: clients stream one."""
    made = 0
    try:
        for number, (stream, before) in enumerate(zip(streams, echoed, strict=True)):
            if before:
                yield _event(answer.chunk(number, before, None))
            async with aclosing(stream):
                async for piece in stream:
                    made += 1
                    if piece.text or piece.finish:
                        yield _event(answer.chunk(number, piece.text, piece.finish))
        if (usage := answer.usage_chunk(made)) is not None:
            yield _event(usage)
    except IsthmusError as e:
        yield _event(_said(e)[0])
        return
    yield b"data: [DONE]\n\n"


def _event(document: object) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _document(document: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


async def _body_of(request: Request) -> bytes:
    """UserError for one that is too large, PeerError for a client that leaves."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise UserError(f"request: more than {MOST_BYTES} bytes")
    except ClientDisconnect:
        raise PeerError("the client hung up") from None
    return bytes(body)


async def _not_there(_: Request, error: Exception) -> Response:
    """A path or a method that is none, as OpenAI's clients read it."""
    assert isinstance(error, HTTPException)
    return _document(refusal(error.detail, "invalid_request_error"), error.status_code)


async def _refused(_: Request, error: Exception) -> Response:
    return _document(*_said(error))


def _said(error: Exception) -> tuple[dict[str, object], int]:
    """The document and the status."""
    if isinstance(error, UserError):
        return refusal(str(error), "invalid_request_error"), 400
    return refusal(str(error), "server_error"), 503


def application(service: ModelService, *, port: int, key: str = "") -> Starlette:
    """Return the application at this port. With a key every request needs it."""
    endpoint = ModelEndpoint(service)
    routes = [
        Route(HEALTH, endpoint.health),
        Route("/v1/models", endpoint.models),
        Route("/v1/models/{name:path}", endpoint.model),
        Route("/v1/completions", endpoint.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
    ]
    guard = Middleware(KeyGuard, port=port, key=key)
    return Starlette(
        routes=routes, middleware=[guard], exception_handlers={IsthmusError: _refused, HTTPException: _not_there}
    )


def open_port(host: str, port: int) -> PrivateListener:
    """UserError for an address that cannot be bound."""
    return private_listener(host, port, "serve-model")


def serve(service: ModelService, at: PrivateListener, log: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM, or until no device is left. `log` gets the address, and the key where one is needed."""
    log(f"{at.address}/v1{f' key {at.secret}' if at.secret else ''}")
    _until_ended(service, at.socket, at.secret)


class _Server(PrivateServer):
    """Refuses open requests when it ends, so that their clients get the reason."""

    def __init__(self, service: ModelService, listener: socket.socket, key: str) -> None:
        super().__init__(application(service, port=listener.getsockname()[1], key=key), listener)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        await super().shutdown(sockets)


def _until_ended(service: ModelService, listener: socket.socket, key: str) -> None:
    server = _Server(service, listener, key)

    def end() -> None:
        service.wait_ended()
        server.should_exit = True

    threading.Thread(target=end, name="ended", daemon=True).start()
    server.serve_until_ended()
