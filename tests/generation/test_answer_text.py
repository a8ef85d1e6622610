"""The text of an answer: that of all tokens, less that of the prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from isthmus.api.generation import ModelService
from isthmus.data.tokenizer import ByteTokenizer, Tokenizer
from isthmus.graph import Op, OpGraph, Ref, TensorSpec
from isthmus.job.first_weights import Served
from isthmus.protocol.generation import Prompt, Sampling
from isthmus.runtime.coordinator.generation_host import Answer, GenerationHost

WORDS = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁▁▁▁", "▁the", "▁cat", "▁sat", "▁on", "▁mat", "s", "."]
VOCABULARY = {word: number for number, word in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}


class HostOf:
    """Answers with these tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def submit(self, prompt: Prompt, answer: Answer) -> int:
        assert prompt.number == 0
        for number, token in enumerate(self._tokens, 1):
            answer((token, number == len(self._tokens)))
        return 0


class WordsAndBytes(ByteTokenizer):
    """Words that mark spaces at their beginning, and bytes for what they lack: as Llama's and Mistral's tokenizers."""

    def __init__(self, decoder: object) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        self._words = tokenizers.Tokenizer(tokenizers.models.BPE(VOCABULARY, [], unk_token="<unk>", byte_fallback=True))
        self._words.add_special_tokens(["<s>", "</s>"])
        self._words.decoder = decoder

    def text(self, ids: Sequence[int]) -> str:
        return self._words.decode(list(ids), skip_special_tokens=True)


def metaspace() -> Tokenizer:
    return WordsAndBytes(pytest.importorskip("tokenizers").decoders.Metaspace())


def with_bytes() -> Tokenizer:
    d = pytest.importorskip("tokenizers").decoders
    parts: list[Any] = [d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
    return WordsAndBytes(d.Sequence(parts))


def service_of(tokenizer: Tokenizer, answer: Sequence[int]) -> ModelService:
    logits = Op(name="a", kind="operator", target="a", outputs=(TensorSpec("float32", (1, 999), (999, 1)),))
    graph = OpGraph(name="g", mode="eval", ops=(logits,), loss=Ref("a"))
    served = Served(graph=graph, weights={}, context=99, step=0)
    return ModelService(cast("GenerationHost", HostOf(answer)), served, tokenizer, "words")


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> list[str]:
    """The pieces of both ways to ask, which are the same."""
    service = service_of(tokenizer, answer)
    found = [piece.text for piece in service.stream(prompt, Sampling())]

    async def asked() -> list[str]:
        return [piece.text async for piece in service.pieces(prompt, Sampling())]

    assert asyncio.run(asked()) == found
    return found


def expected(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """At once. What the prompt's last bytes begin belongs to the answer, half a character at its end to none."""
    before, both = tokenizer.text(prompt), tokenizer.text([*prompt, *answer])
    return both.removeprefix(before if both.startswith(before) else before.rstrip("\ufffd")).rstrip("\ufffd")


def ids(*words: str) -> list[int]:
    return [VOCABULARY[word] for word in words]


@pytest.mark.parametrize("make", [metaspace, with_bytes])
def test_a_space_at_the_answers_beginning_is_kept(make: Callable[[], Tokenizer]) -> None:
    prompt, answer = ids("▁the", "▁cat", "▁sat"), ids("▁on", "▁the", "▁mat")
    assert streamed(make(), prompt, answer) == [" on", " the", " mat"]


def test_half_a_character_is_never_sent() -> None:
    euro = ids("<0xE2>", "<0x82>", "<0xAC>")
    assert streamed(with_bytes(), ids("▁the"), euro) == ["", "", "€"]
    assert streamed(with_bytes(), [*ids("▁the"), euro[0]], [*euro[1:], *ids("s")]) == ["", "€", "s"]
    assert streamed(with_bytes(), ids("▁the"), [*ids("s"), *euro[:2]]) == ["s", "", ""]
    assert streamed(ByteTokenizer(), list(b"na"), list("ïve".encode())[:3]) == ["", "ï", "v"]
    assert streamed(ByteTokenizer(), list("naï".encode())[:3], list("ïve".encode())[1:]) == ["ï", "v", "e"]
    assert "".join(streamed(ByteTokenizer(), [97], [0xFF, 98, 0xC3])) == "\ufffdb", "a byte that begins no character"


@pytest.mark.parametrize("make", [metaspace, with_bytes, ByteTokenizer])
def test_pieces_are_the_text_of_all_tokens_less_that_of_the_prompt(make: Callable[[], Tokenizer]) -> None:
    drawn, tokenizer = random.Random(0), make()
    bytes_ = 0 if make is ByteTokenizer else len(WORDS)

    def tokens() -> list[int]:
        found: list[int] = []
        for _ in range(drawn.randint(1, 12)):
            character = [bytes_ + byte for byte in drawn.choice("é€😀a").encode()]
            found += character if drawn.random() < 0.3 else [drawn.randrange(len(WORDS))]
        return found

    for _ in range(300):
        both = [*tokens(), *tokens()]
        cut = drawn.randint(1, len(both) - 1)
        prompt, answer = both[:cut], both[cut:]
        pieces = "".join(piece.text for piece in service_of(tokenizer, answer).stream(prompt, Sampling()))
        assert pieces == expected(tokenizer, prompt, answer), (prompt, answer)
