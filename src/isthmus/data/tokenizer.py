"""Text to token ids: the bytes themselves, or a Hugging Face tokenizer from a local directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from isthmus.data.within import check_within
from isthmus.errors import UserError
from isthmus.extensions import import_extra
from isthmus.reading import read_json

BYTES = "bytes"
PAD, CLS, SEP = 0, 256, 257
NO_BYTE = 0xFF  # in the place of a token that is none: no UTF-8 has it
NO_TEMPLATE = UserError("messages: the tokenizer has no chat template, expected a request of /v1/completions")
Ids = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """The interface of tokenizers for the data sets."""

    @property
    def vocab_size(self) -> int:
        """Every id of `tokens` is below this."""
        ...

    @property
    def pair_vocab_size(self) -> int:
        """Every id of `pairs` is below this."""
        ...

    @property
    def identity(self) -> str:
        """A text that two tokenizers share only if they give the same ids."""
        ...

    def tokens(self, text: bytes) -> npt.NDArray[np.integer]:
        """The ids of UTF-8 `text`, [tokens], without special tokens, in the smallest dtype that holds them."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids. What is no UTF-8, as the end of a text may be, is U+FFFD."""
        ...

    def chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        """A conversation, `role` and `content` of each message, as the text that an answer follows. UserError where
        there is no template for it."""
        ...

    def pairs(self, first: Sequence[str], second: Sequence[str], length: int) -> tuple[Ids, Ids, Ids]:
        """Ids, attention mask and token types of sentence pairs, each [pairs, length].

        The longest sentence is cut first; what is short is padded at its end.
        """
        ...


class ByteTokenizer:
    """A byte is a token. Pairs are `CLS first SEP second SEP`, padded with 0 (a byte that text does not use)."""

    vocab_size = 256
    pair_vocab_size = 258
    identity = "bytes: pad 0, cls 256, sep 257"

    def tokens(self, text: bytes) -> npt.NDArray[np.integer]:
        return np.frombuffer(text, dtype=np.uint8)

    def text(self, ids: Sequence[int]) -> str:
        return bytes(token if token < self.vocab_size else NO_BYTE for token in ids).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        raise NO_TEMPLATE

    def pairs(self, first: Sequence[str], second: Sequence[str], length: int) -> tuple[Ids, Ids, Ids]:
        ids = np.full((len(first), length), PAD, dtype=np.int64)
        mask = np.zeros_like(ids)
        types = np.zeros_like(ids)
        for row, (a, b) in enumerate(zip(first, second, strict=True)):
            head, tail = cut_longest_first(list(a.encode()), list(b.encode()), length - 3)
            sample = [CLS, *head, SEP, *tail, SEP]
            ids[row, : len(sample)] = sample
            mask[row, : len(sample)] = 1
            types[row, len(head) + 2 : len(sample)] = 1
        return ids, mask, types


def cut_longest_first(first: list[int], second: list[int], budget: int) -> tuple[list[int], list[int]]:
    """Shortens the longer of both, one by one from its end, until both fit in `budget`."""
    keep_second = min(len(second), max(budget // 2, budget - len(first)))
    return first[: budget - keep_second], second[:keep_second]


class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer` read from a local directory; no network, no code from the directory.

    Raises `UserError` if the directory is missing, or holds nothing that can be read.
    """

    def __init__(self, directory: str) -> None:
        path = Path(directory).expanduser()
        if not path.is_dir():
            raise UserError(f"tokenizer: no directory {directory}: expected 'bytes' or a tokenizer directory")
        check_within(path)
        self._path = path
        fast = path / "tokenizer.json"
        try:
            if fast.is_file():
                self._tokenizer = import_extra("tokenizers", "the tokenizer").Tokenizer.from_file(str(fast))
            else:
                automatic = import_extra("transformers", "the tokenizer").AutoTokenizer
                self._tokenizer = automatic.from_pretrained(
                    str(path), local_files_only=True, trust_remote_code=False
                ).backend_tokenizer
        except UserError:
            raise
        except Exception as error:  # the libraries raise bare Exceptions for malformed files
            raise UserError(f"tokenizer: cannot read {directory}: {' '.join(str(error).split())}") from error
        self._pad_id, self._pad_token = self._padding(path)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.identity: str = self._tokenizer.to_str()
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self.pair_vocab_size: int = self.vocab_size

    def _padding(self, directory: Path) -> tuple[int, str]:
        """The padding token; without one, id 0, which the attention mask hides anyway."""
        if self._tokenizer.padding is not None:
            return self._tokenizer.padding["pad_id"], self._tokenizer.padding["pad_token"]
        for token in [*_configured_pad(directory), "[PAD]", "<pad>", "<|endoftext|>"]:
            found = self._tokenizer.token_to_id(token)
            if found is not None:
                return found, token
        return 0, self._tokenizer.id_to_token(0) or ""

    def tokens(self, text: bytes) -> npt.NDArray[np.integer]:
        encoded = self._tokenizer.encode(_whole_characters(text).decode(), add_special_tokens=False)
        return np.array(encoded.ids, dtype=np.uint16 if self.vocab_size <= 2**16 else np.int32)

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        automatic = import_extra("transformers", "the chat template").AutoTokenizer
        try:
            whole = automatic.from_pretrained(str(self._path), local_files_only=True, trust_remote_code=False)
            if whole.chat_template is None:
                raise NO_TEMPLATE
            return whole.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except UserError:
            raise
        except Exception as error:  # the library and a template raise of many kinds
            raise UserError(f"tokenizer: its chat template failed: {' '.join(str(error).split())}") from error

    def pairs(self, first: Sequence[str], second: Sequence[str], length: int) -> tuple[Ids, Ids, Ids]:
        self._tokenizer.enable_truncation(length, strategy="longest_first")
        self._tokenizer.enable_padding(length=length, pad_id=self._pad_id, pad_token=self._pad_token)
        encoded = self._tokenizer.encode_batch(list(zip(first, second, strict=True)))
        shape = (len(first), length)
        return (
            np.array([one.ids for one in encoded], dtype=np.int64).reshape(shape),
            np.array([one.attention_mask for one in encoded], dtype=np.int64).reshape(shape),
            np.array([one.type_ids for one in encoded], dtype=np.int64).reshape(shape),
        )


class _PadToken(msgspec.Struct):
    content: str


class _TokenizerConfig(msgspec.Struct):
    """The one field read of tokenizer_config.json, which holds many others."""

    pad_token: str | _PadToken | None = None


def _configured_pad(directory: Path) -> list[str]:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return []
    pad = read_json(path, _TokenizerConfig, f"tokenizer: {path}").pad_token
    if pad is None:
        return []
    return [pad if isinstance(pad, str) else pad.content]


def _whole_characters(text: bytes) -> bytes:
    """Without the parts of characters at its ends, where a text was cut."""
    begin = next((n for n, byte in enumerate(text[:3]) if byte & 0xC0 != 0x80), min(3, len(text)))
    for back, byte in enumerate(reversed(text[-3:]), 1):
        if byte & 0xC0 == 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return text[begin : len(text) - back] if back < length else text[begin:]
        if byte < 0x80:
            break
    return text[begin:]


def tokens_of(tokenizer: Tokenizer, text: bytes, named: str) -> npt.NDArray[np.integer]:
    """The tokens of a text. UserError, which says where by `named`, for one that is no UTF-8."""
    try:
        return tokenizer.tokens(text)
    except UnicodeDecodeError as e:
        byte = e.object[e.start]
        what = f"byte 0x{byte:02x} before {e.object[e.start + 1 : e.start + 9]!r} is no UTF-8"
        kind = "" if (found := no_text(text)) is None else f" (it begins as {found} does)"
        raise UserError(f"{named}: {what}{kind}, expected text in UTF-8, or tokenizer 'bytes'") from None


_BEGINNINGS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def no_text(beginning: bytes) -> str | None:
    """Name the kind of a file that begins so, where its first bytes, or its zeros, show that it is no text in UTF-8."""
    for start, kind in _BEGINNINGS.items():
        if beginning.startswith(start):
            return kind
    head = beginning[:1024]
    return "UTF-16 or UTF-32" if head.count(0) * 4 > len(head) else None


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name: `bytes`, or a path to a directory."""
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(name)
