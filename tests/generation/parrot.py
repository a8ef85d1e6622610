"""A service that repeats the prompt, and servers for real connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Literal, cast

from starlette.types import ASGIApp

from isthmus.api.generation import ModelService, Piece
from isthmus.data.tokenizer import ByteTokenizer
from isthmus.endpoint.server import application
from isthmus.errors import PeerError, UserError
from isthmus.private_http import FIRST_REQUEST_S, PrivateServer
from isthmus.protocol.generation import Sampling


class Parrot:
    """Answers with the prompt, over and over."""

    name, context, ends = "parrot", 64, (0,)

    def __init__(self) -> None:
        self.asked: list[Sampling] = []
        self.talks: list[Sequence[Mapping[str, object]]] = []
        self.cancelled = 0

    def tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        found = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
        if len(found) >= self.context:
            raise UserError(f"prompt: got {len(found)} tokens")
        return found

    def text(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def chat_tokens(self, messages: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
        self.talks.append(messages)
        if len(messages) > 1 and messages[1]["role"] == "user":
            return self.tokens(ByteTokenizer().chat(messages))
        return self.tokens(str(messages[0]["content"]))

    async def pieces(self, tokens: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece]:
        self.asked.append(sampling)
        if tokens[0] == ord("!"):
            raise PeerError("no device is left")
        if tokens[0] == ord("?"):
            raise UserError("temperature: got 1e-40, which is too small for these logits")
        try:
            for number in range(sampling.max_tokens):
                await asyncio.sleep(0)
                token = tokens[number % len(tokens)]
                last = number == sampling.max_tokens - 1 or token in self.ends
                yield Piece(token, "" if token in self.ends else chr(token), last)
                if last:
                    return
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise


@contextlib.contextmanager
def serving(
    app: ASGIApp, listener: socket.socket, first_request_s: float, loop: Literal["auto", "asyncio"] = "auto"
) -> Generator[PrivateServer]:
    """In a thread, while the block lasts."""
    server = PrivateServer(app, listener, first_request_s=first_request_s)
    server.config.loop = loop
    thread = threading.Thread(target=server.serve_until_ended)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def served_parrot(
    parrot: Parrot, key: str = "", first_request_s: float = FIRST_REQUEST_S
) -> Generator[tuple[str, int]]:
    """Its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: tuple[str, int] = listener.getsockname()
        app = application(cast("ModelService", parrot), port=address[1], key=key)
        with serving(app, listener, first_request_s):
            yield address
