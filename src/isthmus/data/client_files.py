"""Text in files, one client per file: a client's file is read and cut into windows when it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from isthmus.data.dataset import Array, ColumnSpec, as_tensors, fingerprint_of, joined
from isthmus.data.text import TextOptions, files_of
from isthmus.data.tokenizer import BYTES, load_tokenizer
from isthmus.errors import UserError

if TYPE_CHECKING:
    import torch


class TextClients:
    """The files of the training split, in the order of their names. Columns as those of `TokenWindows`.

    With the tokenizer `bytes` sizes come of the files' lengths; any other reads every file once, at the start.
    `max_bytes` bounds each client's text.
    """

    def __init__(self, options: TextOptions) -> None:
        """UserError for files that are missing, and for one that is too short for a single window."""
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)
        files = files_of(options, "train")
        self._names, self._paths = list(files), list(files.values())
        self._lengths = np.array([self._length(path) for path in self._paths], dtype=np.int64)
        self._sizes = (self._lengths - 1) // options.sequence_length
        short = np.flatnonzero(self._sizes < 1)
        if len(short):
            raise UserError(
                f"text: client {short[0]} has no data: {self._paths[short[0]]} holds {self._lengths[short[0]]} tokens, "
                f"expected at least sequence_length + 1 = {options.sequence_length + 1}"
            )

    def _length(self, path: Path) -> int:
        if self._options.tokenizer != BYTES:
            return len(self._tokens(path))
        most = self._options.max_bytes
        size = path.stat().st_size
        return size if most is None else min(size, most)

    def _tokens(self, path: Path) -> NDArray[np.integer]:
        try:
            text = path.read_bytes()
        except OSError as e:
            raise UserError(f"text option 'files': cannot read {path}: {e.strerror}") from e
        return self._tokenizer.tokens(text[: self._options.max_bytes])

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        ids = ColumnSpec(dtype="int64", shape=(self._options.sequence_length,), limit=self._tokenizer.vocab_size)
        return {"input_ids": ids, "labels": ids}

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self._sizes

    @property
    def fingerprint(self) -> str:
        """Of names and lengths: to read all files for it would take as long as a round."""
        settings = {
            "kind": "text by files",
            "names": self._names,
            "sequence_length": self._options.sequence_length,
            "shift": self._options.shift_labels,
            "tokenizer": self._tokenizer.identity,
        }
        return fingerprint_of(settings, [self._lengths])

    def load(self, client: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens(self._paths[client])
        if len(tokens) != self._lengths[client]:
            raise UserError(f"text: {self._paths[client]} has changed since the run began")
        length = self._options.sequence_length
        at = np.arange(self._sizes[client])[:, None] * length + np.arange(length)
        shift = int(self._options.shift_labels)
        arrays: dict[str, Array] = {
            "input_ids": tokens[at].astype(np.int64),
            "labels": tokens[at + shift].astype(np.int64),
        }
        return as_tensors(arrays)

    def load_many(self, clients: Sequence[int]) -> dict[str, torch.Tensor]:
        return joined([self.load(client) for client in clients])
