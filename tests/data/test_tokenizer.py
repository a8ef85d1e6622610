"""Ids back to text, and conversations as prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.data.tokenizer import ByteTokenizer, load_tokenizer
from isthmus.errors import UserError

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{{ 'sat' if add_generation_prompt }}"
BAD = "{{ raise_exception('no such role') }}"
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "ran"}]


def test_bytes_become_text() -> None:
    tokens = ByteTokenizer()
    assert tokens.text(tokens.tokens("naïve".encode()).tolist()) == "naïve"
    assert tokens.text([97, 256, 98]) == "a\ufffdb"
    assert tokens.text("ï".encode()[:1]) == "\ufffd"


def test_ids_become_words(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_dir))
    assert tokenizer.text(tokenizer.tokens(b"the cat sat").tolist()) == "the cat sat"


def test_a_conversation_becomes_a_prompt(tokenizer_dir: Path) -> None:
    pytest.importorskip("transformers")
    path = tokenizer_dir / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    assert load_tokenizer(str(tokenizer_dir)).chat(TALK) == "[user] the cat [assistant] ran sat"


def test_without_a_template_a_conversation_is_refused(tokenizer_dir: Path) -> None:
    pytest.importorskip("transformers")
    for name in ("bytes", str(tokenizer_dir)):
        with pytest.raises(UserError, match="has no chat template"):
            load_tokenizer(name).chat(TALK)
    path = tokenizer_dir / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": BAD}))
    with pytest.raises(UserError, match="its chat template failed: no such role"):
        load_tokenizer(str(tokenizer_dir)).chat(TALK)
