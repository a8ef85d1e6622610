"""Text as samples for language models: windows of tokens, wherever the text comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from isthmus.data.dataset import Array, ColumnSpec, Indices, as_tensors, check_columns, checked, fingerprint_of
from isthmus.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from isthmus.errors import UserError

if TYPE_CHECKING:
    import torch


class WindowOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How text is cut."""

    sequence_length: Annotated[int, Meta(ge=1)] = 128
    """Tokens per sample."""
    tokenizer: str = BYTES
    """"bytes" (256 tokens), or a directory with a tokenizer.json."""
    shift_labels: bool = True
    """true: labels are the next tokens. false: they equal the inputs, for models that shift inside (Hugging Face)."""


class TokenWindows:
    """Non-overlapping windows of tokens: sample i holds tokens i T .. (i + 1) T of all texts, joined.

    Columns: `input_ids` and `labels`, int64 [T]; labels are the next tokens, or with `shift_labels` = false the
    inputs again. Texts are read and tokenized on first use and kept in memory, 1 to 4 bytes per token.
    """

    def __init__(self, texts: Callable[[], Iterable[bytes]], options: WindowOptions, source: str) -> None:
        """`texts` gives UTF-8, or raises UserError where it cannot be read; `source` is what messages call it."""
        self._texts = texts
        self._options = options
        self._source = source
        self._tokenizer: Tokenizer = load_tokenizer(options.tokenizer)

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        ids = ColumnSpec(dtype="int64", shape=(self._options.sequence_length,), limit=self._tokenizer.vocab_size)
        return {"input_ids": ids, "labels": ids}

    @property
    def fingerprint(self) -> str:
        settings = {"sequence_length": self._options.sequence_length, "shift": self._options.shift_labels}
        return fingerprint_of({"kind": "text", **settings}, [self._tokens])

    @cached_property
    def _tokens(self) -> npt.NDArray[np.integer]:
        # Text by text: a tokenizer takes far more memory for one long text than for its parts.
        parts = [self._tokenizer.tokens(text) for text in self._texts()]
        tokens = np.concatenate(parts) if parts else np.empty(0, np.uint8)
        needed = self._options.sequence_length + 1
        if len(tokens) < needed:
            raise UserError(
                f"{self._source}: got {len(tokens)} tokens from {len(parts)} texts, expected at least "
                f"sequence_length + 1 = {needed}"
            )
        return tokens

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._options.sequence_length

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        check_columns(columns, self.columns)
        length = self._options.sequence_length
        starts = checked(indices, len(self))[:, None] * length + np.arange(length)
        shift = int(self._options.shift_labels)
        arrays: dict[str, Array] = {
            name: self._tokens[starts + (shift if name == "labels" else 0)].astype(np.int64) for name in columns
        }
        return as_tensors(arrays)
