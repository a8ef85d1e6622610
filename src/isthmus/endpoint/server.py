"""The endpoint over HTTP. It is for this machine, or for who has its key."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.api.generation import ModelService, Piece, sampling_of
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.listening import PrivateListener, own_hosts, private_listener
from isthmus.private_http import PrivateServer, mark_known
from isthmus.protocol.generation import Sampling
from isthmus.reading import parse_json

MOST_PROMPTS = 64
MAX_TOKENS = 16  # tokens of a completion that asks for no number: OpenAI's default
MOST_STOPS, STOP_LENGTH = 64, 1024
"""Stop strings of a request, and characters of one: every token's text is compared with all."""
Finish = Literal["stop", "length"]


class UsageOption(msgspec.Struct):
    include_usage: bool | None = None  # a last chunk has the tokens of all choices


class AnyRequest(msgspec.Struct, kw_only=True):
    """Fields of both kinds of request. Other fields are ignored, since other servers have more. None stands for a field
    that was not sent, or as null."""

    model: str = ""  # any name: there is one model
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # not OpenAI's: as in other servers
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: UsageOption | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: int | bool | None = None
    suffix: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_logprobs: int | None = None
    tools: list[object] | None = None
    functions: list[object] | None = None
    tool_choice: object = None
    function_call: object = None
    response_format: dict[str, object] | None = None
    modalities: list[str] | None = None
    web_search_options: object = None

    @property
    def stops(self) -> tuple[str, ...]:
        """UserError for more of them, or longer ones, than are searched for after every token."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(found) > MOST_STOPS or any(len(text) > STOP_LENGTH for text in found):
            longest = max(map(len, found))
            raise UserError(
                f"stop: got {len(found)} strings of up to {longest} characters, expected at most {MOST_STOPS} of at "
                f"most {STOP_LENGTH}"
            )
        return tuple(text for text in found if text)

    @property
    def counts_usage(self) -> bool:
        """Return whether a stream ends with the number of its tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, max_tokens: int) -> Sampling:
        """UserError for what this endpoint cannot do, and values out of range."""
        for name, plain in (("n", 1), ("best_of", 1), ("frequency_penalty", 0), ("presence_penalty", 0)):
            if getattr(self, name) not in (None, plain):
                raise UserError(f"{name}: got {getattr(self, name)}, expected {plain}")
        if self.logprobs is not None and self.logprobs is not False:  # 0 asks for that of the token itself
            raise UserError("logprobs: is not supported")
        for name in ("suffix", "logit_bias", "top_logprobs", "tools", "functions", "web_search_options"):
            if getattr(self, name):
                raise UserError(f"{name}: is not supported")
        for name in ("tool_choice", "function_call"):  # without tools these two say nothing
            if getattr(self, name) not in (None, "none", "auto"):
                raise UserError(f"{name}: is not supported")
        for name, plain in (("response_format", {"type": "text"}), ("modalities", ["text"])):
            if getattr(self, name) not in (None, plain):
                raise UserError(f"{name}: got {getattr(self, name)!r:.80}, expected {plain!r}")
        return sampling_of(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbits(31) if self.seed is None else self.seed,
        )


class CompletionRequest(AnyRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]  # a text, token ids, or several of these
    max_tokens: int | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """UserError for none, or too many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [token for token in self.prompt if isinstance(token, int)]
        texts = [given for given in self.prompt if not isinstance(given, int)]
        found: list[str | list[int]] = [ids] if ids else texts
        if not 0 < len(found) <= MOST_PROMPTS or len(ids) not in (0, len(self.prompt)):
            raise UserError(f"prompt: got a list of {len(self.prompt)}, expected 1 to {MOST_PROMPTS} prompts")
        return found


class ContentPart(msgspec.Struct):
    type: str
    text: str = ""


class ToolFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"  # a JSON object


class ToolCall(msgspec.Struct):
    function: ToolFunction
    id: str = ""
    type: str = "function"


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None  # a text, or its parts; an assistant that called tools may have none
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self, at: int) -> dict[str, object]:
        """Return the message as chat templates read the message `at`. UserError for what is no text."""
        found: dict[str, object] = {"role": self.role, "content": self._text(f"messages[{at}].content")}
        found |= {k: given for k in ("name", "tool_call_id") if (given := getattr(self, k)) is not None}
        if self.tool_calls:
            source = f"messages[{at}].tool_calls: arguments"
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {
                        "name": call.function.name,
                        "arguments": parse_json(call.function.arguments or "{}", dict[str, object], source),
                    },
                }
                for call in self.tool_calls
            ]
        return found

    def _text(self, field: str) -> str:
        if self.content is None:
            if self.role != "assistant":
                raise UserError(f"{field}: got null of the role {self.role!r}, expected a text: an assistant's may be")
            return ""
        if isinstance(self.content, str):
            return self.content
        for number, part in enumerate(self.content):
            if part.type != "text":
                raise UserError(f"{field}[{number}]: got a part of type {part.type!r}, expected 'text'")
        return "".join(part.text for part in self.content)


class ChatRequest(AnyRequest, kw_only=True):
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class Answer:
    """Documents of one request's answer, whole or in chunks."""

    def __init__(self, model: str, asked: AnyRequest, prompt_tokens: int) -> None:
        self._chat, self._counts_usage = isinstance(asked, ChatRequest), asked.counts_usage
        self._prompt_tokens = prompt_tokens
        self._begun = set[int]()  # choices that had a chunk
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, texts: list[str], finishes: list[Finish], made: int) -> dict[str, object]:
        """`made` tokens are in all texts."""
        choices = [
            self._choice(
                n, finish, {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            )
            for n, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(made)}

    def chunk(self, number: int, text: str, finish: Finish | None) -> dict[str, object]:
        """Return a chunk of choice `number`. The role is in its first chunk only: clients join the chunks' texts."""
        said: dict[str, object] = {"text": text}
        if self._chat:
            role = {} if number in self._begun else {"role": "assistant"}
            said = {"delta": {**role, "content": text}}
        self._begun.add(number)
        return self._chunk([self._choice(number, finish, said)], None)

    def usage_chunk(self, made: int) -> dict[str, object] | None:
        """The last one, where it was asked for: it has no choice."""
        return self._chunk([], self._usage(made)) if self._counts_usage else None

    def _chunk(self, choices: list[dict[str, object]], usage: Mapping[str, int] | None) -> dict[str, object]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, **({"usage": usage} if self._counts_usage else {})}

    def _usage(self, made: int) -> dict[str, int]:
        given = self._prompt_tokens
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}

    @staticmethod
    def _choice(number: int, finish: Finish | None, said: Mapping[str, object]) -> dict[str, object]:
        return {"index": number, "finish_reason": finish, "logprobs": None, **said}


def model_card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "isthmus"}


def refusal(text: str, kind: str) -> dict[str, object]:
    """Return the refusal as OpenAI's clients read errors."""
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


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
