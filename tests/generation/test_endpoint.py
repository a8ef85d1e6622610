"""OpenAI's requests and answers, over a service that repeats the prompt."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from isthmus.api.generation import ModelService, Piece
from isthmus.endpoint.server import _until_ended, application  # pyright: ignore[reportPrivateUsage]
from isthmus.errors import PeerError
from isthmus.protocol.generation import Sampling

from .parrot import Parrot

DEEP = b"[" * 100_000
ANYIO_THREADS = 40
"""That Starlette would have."""


class Stuck(Parrot):
    """Gives no token before it is stopped."""

    def __init__(self, requests: int) -> None:
        super().__init__()
        self.requests = requests
        self.begun, self.stopped = threading.Semaphore(0), threading.Event()

    async def pieces(self, tokens: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece]:
        self.begun.release()
        while not self.stopped.is_set():
            await asyncio.sleep(1e-3)
        raise PeerError("the service was stopped")
        yield

    def stop(self) -> None:
        self.stopped.set()

    def wait_ended(self) -> None:
        """Once all have asked."""
        for _ in range(self.requests):
            self.begun.acquire()


def client_of(parrot: Parrot, host: str = "127.0.0.1:7435", key: str = "") -> TestClient:
    return TestClient(application(cast("ModelService", parrot), port=7435, key=key), base_url=f"http://{host}")


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


def test_a_completion(parrot: Parrot) -> None:
    asked = {"model": "parrot", "prompt": "abc", "max_tokens": 5, "temperature": 0, "user": "somebody"}
    answer = client_of(parrot).post("/v1/completions", json=asked).json()
    choice = {"index": 0, "finish_reason": "length", "logprobs": None, "text": "abcab"}
    assert (answer["object"], answer["model"], answer["choices"]) == ("text_completion", "parrot", [choice])
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert parrot.asked == [Sampling(max_tokens=5, seed=parrot.asked[0].seed)]


def test_several_prompts_and_tokens(parrot: Parrot) -> None:
    asked = {"prompt": [[97, 98], [99]], "max_tokens": 3, "seed": 9, "top_p": 0.5, "top_k": 7}
    answer = client_of(parrot).post("/v1/completions", json=asked).json()
    assert [choice["text"] for choice in answer["choices"]] == ["aba", "ccc"]
    assert parrot.asked[0] == Sampling(max_tokens=3, temperature=1.0, top_p=0.5, top_k=7, seed=9)


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream(parrot: Parrot) -> None:
    asked = {"prompt": "abc", "max_tokens": 4, "stream": True}
    answer = client_of(parrot).post("/v1/completions", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    choices = [event["choices"][0] for event in _events(answer.text)]
    assert [choice["text"] for choice in choices] == ["a", "b", "c", "a"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"], [[97, 98]]])
def test_an_echo_is_the_prompt_as_text_whatever_it_was_given_as(parrot: Parrot, prompt: object, stream: bool) -> None:
    asked = {"prompt": prompt, "max_tokens": 3, "echo": True, "stream": stream}
    answer = client_of(parrot).post("/v1/completions", json=asked)
    choices = [event["choices"][0] for event in _events(answer.text)] if stream else answer.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "ababa"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_cancels_the_rest(parrot: Parrot, stream: bool) -> None:
    asked = {"prompt": "abcd", "max_tokens": 60, "stop": ["xyz", "da"], "stream": stream}
    answer = client_of(parrot).post("/v1/completions", json=asked)
    choices = [event["choices"][0] for event in _events(answer.text)] if stream else answer.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "abc"
    assert choices[-1]["finish_reason"] == "stop" and parrot.cancelled == 1


def test_a_token_that_ends_texts_ends_the_answer(parrot: Parrot) -> None:
    answer = client_of(parrot).post("/v1/completions", json={"prompt": [97, 98, 0, 99], "max_tokens": 9}).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "stop")


def test_a_chat(parrot: Parrot) -> None:
    asked: dict[str, object] = {"messages": [{"role": "user", "content": "hey"}], "max_tokens": 4}
    answer = client_of(parrot).post("/v1/chat/completions", json=asked).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "heyh"}
    streamed = _events(client_of(parrot).post("/v1/chat/completions", json={**asked, "stream": True}).text)
    assert [event["choices"][0]["delta"] for event in streamed] == [
        {"role": "assistant", "content": "h"},
        {"content": "e"},
        {"content": "y"},
        {"content": "h"},
    ]
    assert not any("usage" in event for event in streamed)
    without = client_of(parrot).post("/v1/chat/completions", json={"messages": asked["messages"]}).json()
    assert without["usage"]["total_tokens"] == parrot.context


def test_what_clients_send_as_messages(parrot: Parrot) -> None:
    """openai, litellm and langchain send texts in parts, and null for an assistant that called tools."""
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages: list[dict[str, object]] = [
        {"role": "system", "content": parts},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call], "function_call": None},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
        {"role": "assistant"},
        {"role": "user", "content": "hey", "name": "me"},
    ]
    answer = client_of(parrot).post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
    assert answer.json()["choices"][0]["message"]["content"] == "hey"
    call["function"] = {"name": "now", "arguments": {"zone": "UTC"}}  # as templates read it
    assert parrot.talks == [
        [
            {"role": "system", "content": "hey"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "12:00", "tool_call_id": "1"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "hey", "name": "me"},
        ]
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_ends_with_its_usage_where_that_is_asked_for(parrot: Parrot, chat: bool) -> None:
    given = {"messages": [{"role": "user", "content": "abc"}]} if chat else {"prompt": ["abc", "de"]}
    asked = {**given, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    *events, last = _events(client_of(parrot).post(path, json=asked).text)
    made, prompt = (4, 3) if chat else (8, 5)
    assert len(events) == made and all(event["usage"] is None for event in events)
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    assert (last["choices"], last["usage"], last["object"]) == ([], usage, events[0]["object"])


def test_who_asks_for_its_health_needs_no_key(parrot: Parrot) -> None:
    guarded = client_of(parrot, "model.example", key="secret")
    assert (guarded.get("/health").status_code, guarded.get("/health").json()) == (200, {"status": "ok"})
    assert guarded.get("/health/").status_code == guarded.get("/v1/models").status_code == 401
    assert guarded.post("/health").status_code == 405


def test_models(parrot: Parrot) -> None:
    assert [model["id"] for model in client_of(parrot).get("/v1/models").json()["data"]] == ["parrot"]


@pytest.mark.parametrize("name", ["parrot", "birds:Parrot", "birds.of/paradise:Parrot"])
@pytest.mark.parametrize("quoted", [False, True])
def test_a_model_by_its_name(parrot: Parrot, name: str, quoted: bool) -> None:
    parrot.name = name
    answer = client_of(parrot).get(f"/v1/models/{quote(name, safe='') if quoted else name}")
    assert (answer.status_code, answer.json()["id"], answer.json()["object"]) == (200, name, "model")


def test_what_is_not_there_is_said_as_clients_read_it(parrot: Parrot) -> None:
    answer = client_of(parrot).get("/v1/models/eagle:Bald")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "model: got 'eagle:Bald', there is 'parrot'"
    assert client_of(parrot).get("/v1/embeddings").json()["error"]["message"] == "Not Found"
    assert client_of(parrot).get("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": []}, "expected 1 to 64 prompts"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a", "seed": 1 << 64}, "seed: got 18446744073709551616"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "n": 2}, "n: got 2, expected 1"),
        ("completions", {"prompt": "a", "logprobs": 3}, "logprobs: is not supported"),
        ("completions", {"prompt": "a", "logprobs": 0}, "logprobs: is not supported"),
        ("completions", {"prompt": "a", "tools": [{"type": "function"}]}, "tools: is not supported"),
        ("completions", {"prompt": "a", "tool_choice": "required"}, "tool_choice: is not supported"),
        (
            "completions",
            {"prompt": "a", "response_format": {"type": "json_object"}},
            "response_format: got {'type': 'json_object'}, expected {'type': 'text'}",
        ),
        ("completions", {"prompt": "a", "stop": ["x"] * 65}, "stop: got 65 strings"),
        (
            "completions",
            {"prompt": "a", "stop": "x" * 1025},
            "strings of up to 1025 characters, expected at most 64",
        ),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content: got null of the role 'user'"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages[0].content[1]: got a part of type 'image_url', expected 'text'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
            "messages[0].tool_calls: arguments",
        ),
        ("completions", {"prompt": "a" * 64}, "got 64 tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * 2}, "no chat template"),
    ],
)
def test_bad_requests_get_a_line(parrot: Parrot, path: str, asked: dict[str, object], said: str) -> None:
    answer = client_of(parrot).post(f"/v1/{path}", json=asked)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_a_lost_fleet_is_no_fault_of_the_request(parrot: Parrot) -> None:
    answer = client_of(parrot).post("/v1/completions", json={"prompt": "!"})
    assert answer.status_code == 503 and "no device is left" in answer.json()["error"]["message"]
    streamed = client_of(parrot).post("/v1/completions", json={"prompt": "!", "stream": True})
    assert "no device is left" in streamed.text and "[DONE]" not in streamed.text


def test_what_turns_out_to_be_the_requests_fault_is_said_to_be(parrot: Parrot) -> None:
    """Only the last stage knows which temperatures its logits bear."""
    answer = client_of(parrot).post("/v1/completions", json={"prompt": ["a", "?"], "temperature": 1e-40})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("temperature: got 1e-40")
    streamed = client_of(parrot).post("/v1/completions", json={"prompt": "?", "stream": True})
    assert "invalid_request_error" in streamed.text and "[DONE]" not in streamed.text


def test_fields_may_be_null(parrot: Parrot) -> None:
    nothing = dict.fromkeys(("max_tokens", "stream", "echo", "seed", "stop", "n"))
    answer = client_of(parrot).post("/v1/completions", json={"prompt": "ab", **nothing}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_half_of_a_surrogate_pair_is_said_to_be_one(parrot: Parrot) -> None:
    for half in (r"\ud800", r"\udfff", r"\ud83d\ud83d\ude00"):
        answer = client_of(parrot).post("/v1/completions", content=b'{"prompt": "a%s"}' % half.encode())
        said = f"request: got {half[:6]} alone, half of a surrogate pair: expected whole characters"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)
    whole = client_of(parrot).post("/v1/completions", content=rb'{"prompt": "\ud83d\ude00", "max_tokens": 1}')
    assert whole.status_code == 200


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000, b'{"user": "\xff"}', b"", b"9" * 9000]
)
def test_a_request_that_is_no_document_is_refused(parrot: Parrot, body: bytes) -> None:
    for path in ("completions", "chat/completions"):
        answer = client_of(parrot).post(f"/v1/{path}", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("request: cannot be read: ")


@pytest.mark.parametrize("asked", [{"prompt": "ab"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_long_prompts_stop_no_stream(parrot: Parrot, asked: dict[str, object]) -> None:
    """Tokenizing and templates are not for the thread that gives all streams their tokens."""
    at_work = set[str]()

    def tokens(_: object) -> tuple[int, ...]:
        at_work.add("loop" if _is_loop() else "thread")
        return (97,)

    parrot.tokens = parrot.chat_tokens = tokens
    path = "completions" if "prompt" in asked else "chat/completions"
    assert client_of(parrot).post(f"/v1/{path}", json={**asked, "max_tokens": 1}).status_code == 200
    assert at_work == {"thread"}


def _is_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error(parrot: Parrot) -> None:
    scope: dict[str, object] = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(b"host", b"127.0.0.1:7435")]
    said: list[dict[str, object]] = [
        {"type": "http.request", "body": b'{"prompt"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    statuses: list[object] = []

    async def receive() -> dict[str, object]:
        return said.pop(0)

    async def send(message: Mapping[str, object]) -> None:
        statuses.append(message.get("status"))

    app = cast("Any", application(cast("ModelService", parrot), port=7435))
    asyncio.run(app(scope, receive, send))
    assert statuses[0] == 503 and not parrot.asked


def test_a_client_that_hangs_up_cancels_its_request(parrot: Parrot) -> None:
    scope: dict[str, object] = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(b"host", b"127.0.0.1:7435")]
    body = json.dumps({"prompt": "ab", "max_tokens": 1 << 40}).encode()
    said: list[dict[str, object]] = [
        {"type": "http.request", "body": body, "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, object]:
        return said.pop(0)

    async def send(_: object) -> None: ...

    app = cast("Any", application(cast("ModelService", parrot), port=7435))
    asyncio.run(app(scope, receive, send))
    assert parrot.cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_waits_for_no_token(stream: bool) -> None:
    """Of many requests: none of them holds a thread."""
    stuck, answers = Stuck(2 * ANYIO_THREADS), list[bytes]()
    body = json.dumps({"prompt": "ab", "stream": stream}).encode()
    with socket.create_server(("127.0.0.1", 0), backlog=stuck.requests) as listener:
        address = listener.getsockname()

        def ask() -> None:
            with socket.create_connection(address) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                answers.append(connection.makefile("rb").read())

        asking = [threading.Thread(target=ask) for _ in range(stuck.requests)]
        for thread in asking:
            thread.start()
        _until_ended(cast("ModelService", stuck), listener, "")
        for thread in asking:
            thread.join()
    assert len(answers) == stuck.requests and all(b"the service was stopped" in answer for answer in answers)
    assert stream or b"503" in answers[0]


def test_a_websocket_is_answered_as_any_request() -> None:
    stuck, answers = Stuck(1), list[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        host = f"127.0.0.1:{address[1]}"

        def ask() -> None:
            head = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
            key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            with socket.create_connection(address, timeout=60) as connection:
                connection.sendall(f"{head}{key}".encode())
                answers.append(connection.makefile("rb").read())
            stuck.begun.release()

        asking = threading.Thread(target=ask)
        asking.start()
        _until_ended(cast("ModelService", stuck), listener, "")
        asking.join()
    assert answers[0].startswith(b"HTTP/1.1 200 ")


def test_who_is_refused(parrot: Parrot) -> None:
    client = client_of(parrot)
    assert client.get("/v1/models", headers={"host": "evil.example:7435"}).status_code == 403
    assert client.get("/v1/models", headers={"origin": "http://evil.example"}).status_code == 403
    guarded = client_of(parrot, "10.0.0.9:7435", "secret")
    assert guarded.get("/v1/models").status_code == 401
    assert guarded.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert guarded.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
