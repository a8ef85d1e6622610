"""What requests and answers of the endpoint say: the part of OpenAI's documents that a model of a run can fill."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.api.generation import sampling_of
from isthmus.errors import UserError
from isthmus.protocol.generation import Sampling

MOST_PROMPTS = 64
MAX_TOKENS = 16
"""Of a completion that says none: OpenAI's."""
Finish = Literal["stop", "length"]


class AnyRequest(msgspec.Struct, kw_only=True):
    """Of both kinds of request. Fields that are not here are ignored, as other servers have more of them. None is a
    field that was not sent, or as null."""

    model: str = ""
    """Any name: there is one model."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Not OpenAI's: as in other servers."""
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: int | bool | None = None
    suffix: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in found if text)

    def sampling(self, max_tokens: int) -> Sampling:
        """UserError for what this endpoint cannot do, and values out of range."""
        for name, plain in (("n", 1), ("best_of", 1), ("frequency_penalty", 0), ("presence_penalty", 0)):
            if getattr(self, name) not in (None, plain):
                raise UserError(f"{name}: got {getattr(self, name)}, expected {plain}")
        if self.logprobs is not None and self.logprobs is not False:  # 0 asks for that of the token itself
            raise UserError("logprobs: is not supported")
        for name in ("suffix", "logit_bias"):
            if getattr(self, name):
                raise UserError(f"{name}: is not supported")
        return sampling_of(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbits(31) if self.seed is None else self.seed,
        )


class CompletionRequest(AnyRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """A text, token ids, or several of these."""
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


class ChatMessage(msgspec.Struct):
    role: str
    content: str


class ChatRequest(AnyRequest, kw_only=True):
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class Answer:
    """Documents of one request's answer, whole or in chunks."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, texts: list[str], finishes: list[Finish], usage: Mapping[str, int]) -> dict[str, object]:
        choices = [
            self._choice(
                n, finish, {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            )
            for n, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def chunk(self, number: int, text: str, finish: Finish | None) -> dict[str, object]:
        """Of the choice `number`."""
        said = {"delta": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [self._choice(number, finish, said)]}

    @staticmethod
    def _choice(number: int, finish: Finish | None, said: Mapping[str, object]) -> dict[str, object]:
        return {"index": number, "finish_reason": finish, "logprobs": None, **said}


def refusal(text: str, kind: str) -> dict[str, object]:
    """As OpenAI's clients read errors."""
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}
