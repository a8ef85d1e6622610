"""Text as samples for language models: windows of tokens, from files or from Python's own standard library."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from isthmus.data.dataset import (
    Array,
    ColumnSpec,
    Indices,
    Split,
    as_tensors,
    check_columns,
    checked,
    fingerprint_of,
    held_out_count,
    refuse_empty_holdout,
)
from isthmus.data.tokenizer import BYTES, Tokenizer, load_tokenizer, no_text, tokens_of
from isthmus.data.within import open_file
from isthmus.errors import UserError, warn

if TYPE_CHECKING:
    import torch


class WindowOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How text is cut."""

    sequence_length: Annotated[int, Meta(ge=1)] = 128  # Tokens per sample.
    tokenizer: str = BYTES  # "bytes" (256 tokens), or a directory with a tokenizer.json, for which texts must be UTF-8.
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
        parts = [tokens_of(self._tokenizer, text, self._source) for text in self._texts()]
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


STDLIB = "stdlib"
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# Written when Python is built: they differ from machine to machine.
_MACHINE_SPECIFIC = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


class TextOptions(WindowOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text files as windows of tokens, or the source of Python's standard library."""

    files: str | tuple[str, ...]
    """Paths or globs (`**` crosses folders), or "stdlib": the source of Python's standard library."""
    max_bytes: Annotated[int, Meta(ge=1)] | None = None  # The most bytes of text in each split; without it, all.
    heldout_path: str | None = None  # A path or glob of held-out text; without it a share of `files`.
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the files that training never sees; of a single file, of its text."""

    def parted(self, split: Split) -> tuple[TextOptions, Split]:
        """Where held-out text has files of its own: the files of the split, all of which are read."""
        if self.heldout_path is None:
            return self, split
        files = self.heldout_path if split == "heldout" else self.files
        return msgspec.structs.replace(self, files=files, heldout_path=None, holdout=0.0), "train"


class _Texts:
    def __init__(self, files: Mapping[str, Path], options: TextOptions, split: Split) -> None:
        """`files`: relative name to path. Raises `UserError` if the split would be empty."""
        refuse_empty_holdout(split, options.holdout, "text")
        self._options = options
        self._split: Split = split
        self._divides_text = len(files) == 1
        self._files = files if self._divides_text else _of_split(files, options.holdout, split)

    def __call__(self) -> list[bytes]:
        room = self._options.max_bytes
        texts: list[bytes] = []
        for path in self._files.values():
            try:
                with path.open("rb") if self._options.files == STDLIB else open_file(path) as file:
                    text = file.read()
            except OSError as error:
                raise UserError(f"text option 'files': cannot read {path}: {error.strerror}") from error
            check_text(text, path, self._options.tokenizer)
            if self._divides_text and self._options.holdout:
                kept = len(text) - held_out_count(len(text), self._options.holdout, f"bytes of {path}")
                text = text[:kept] if self._split == "train" else text[kept:]
            texts.append(text[:room])
            if room is not None:
                room -= len(texts[-1])
                if room == 0:
                    break
        return texts


def check_text(text: bytes, path: Path, tokenizer: str) -> None:
    """UserError for a file that is no UTF-8; a warning for one that looks like no text and is taken as it is."""
    found = no_text(text)
    if tokenizer != BYTES:
        try:
            text.decode()
        except UnicodeDecodeError as e:
            kind = "" if found is None else f" (it begins as {found} does)"
            what = f"byte {e.start + 1}, 0x{text[e.start]:02x}, is no UTF-8{kind}"
            raise UserError(
                f"text option 'files': {path}: {what}, expected text in UTF-8, or tokenizer 'bytes'"
            ) from None
    if found is not None:
        warn(f"text option 'files': {path} begins as {found} does, and is taken as it is")


def _of_split(files: Mapping[str, Path], holdout: float, split: Split) -> dict[str, Path]:
    """The hash of its name decides where a file belongs, so that neither order nor topic does."""
    by_hash = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    kept = len(files) - held_out_count(len(files), holdout, "files of text")
    return {name: files[name] for name in sorted(by_hash[:kept] if split == "train" else by_hash[kept:])}


@cache
def _stdlib_files() -> Mapping[str, Path]:
    root = sysconfig.get_path("stdlib")
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if _is_source(name)]  # what is installed may be thousands of files
        within = "" if folder == root else f"{Path(folder).relative_to(root).as_posix()}/"
        found += [within + name for name in names if _is_source(name, ".py")]
    if not found:
        raise UserError(f"text option 'files': this Python has no standard library source under {root}")
    return {name: Path(root, name) for name in sorted(found, key=lambda name: name.split("/"))}


def _is_source(name: str, ending: str = "") -> bool:
    return name not in _NOT_SOURCE and not name.startswith(_MACHINE_SPECIFIC) and name.endswith(ending)


def _named_files(patterns: Sequence[str]) -> dict[str, Path]:
    found: set[Path] = set()
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        # A file whose own name holds glob characters is meant as it is written.
        matches = [expanded] if os.path.exists(expanded) else glob.glob(expanded, recursive=True)
        paths = {Path(os.path.realpath(match)) for match in matches if os.path.isfile(match)}
        if not paths:
            raise UserError(
                f"text option 'files': no file matches {pattern!r}, expected a path or a glob like dir/**/*.txt"
            )
        found |= paths
    if not found:
        raise UserError("text option 'files': got none, expected paths, globs or 'stdlib'")
    root = os.path.commonpath([path.parent for path in found])
    return {path.relative_to(root).as_posix(): path for path in sorted(found)}


def load_text(options: TextOptions, split: Split) -> TokenWindows:
    """The text of `split`. Raises `UserError` for files that are missing and for splits that would be empty."""
    options, part = options.parted(split)
    return TokenWindows(_Texts(_all_files(options), options, part), options, f"text {split}")


def files_of(options: TextOptions, split: Split) -> dict[str, Path]:
    """The files of `split` by name, as `load_text` shares them out. UserError where that leaves none."""
    options, part = options.parted(split)
    refuse_empty_holdout(part, options.holdout, "text")
    return _of_split(_all_files(options), options.holdout, part)


def _all_files(options: TextOptions) -> Mapping[str, Path]:
    if options.files == STDLIB:
        return _stdlib_files()
    return _named_files((options.files,) if isinstance(options.files, str) else options.files)
