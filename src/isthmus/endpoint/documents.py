"""Requests and answers of the endpoint: the part of OpenAI's documents that a model of a run can fill."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.api.generation import sampling_of
from isthmus.errors import UserError
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
