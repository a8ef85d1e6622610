"""Sentence pairs with a class, the shape of MNLI (Williams et al. 2018): premise, hypothesis, label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from isthmus.data.hugging_face import saved_part
from isthmus.data.tokenizer import BYTES, load_tokenizer
from isthmus.data.within import open_file
from isthmus.errors import UserError, unknown_name
from isthmus.reading import parse_json

if TYPE_CHECKING:
    import torch


class PairsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pairs of sentences with a label."""

    path: str  # A file of JSON lines, or a directory that `datasets.save_to_disk` wrote.
    heldout_path: str | None = None  # Held-out pairs; without it the directory's own split, else a share of `path`.
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05  # That share: the last pairs.
    sequence_length: Annotated[int, Meta(ge=8)] = 128  # Tokens per sample, both sentences together.
    tokenizer: str = BYTES  # "bytes", or a directory with a tokenizer.json.
    fields: tuple[str, str, str] = ("premise", "hypothesis", "label")
    """Names of the first sentence, the second sentence and the label."""
    label_names: Annotated[tuple[str, ...], Meta(min_length=1)] = ("entailment", "neutral", "contradiction")
    """Labels that are texts, in the order of their numbers."""


class Rows(msgspec.Struct, frozen=True):
    """The pairs as read: two lists of sentences, and int64 labels [rows]."""

    first: list[str]
    second: list[str]
    labels: npt.NDArray[np.int64]


class PairsDataset:
    """Tokenized pairs of fixed length T; a batch is tokenized when it is asked for.

    Columns: `input_ids`, `attention_mask`, `token_type_ids`, int64 [T]; `labels`, int64 scalar.
    """

    def __init__(self, rows: Rows, options: PairsOptions) -> None:
        self._rows = rows
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        shape = (self._options.sequence_length,)
        return {
            "input_ids": ColumnSpec(dtype="int64", shape=shape, limit=self._tokenizer.pair_vocab_size),
            "attention_mask": ColumnSpec(dtype="int64", shape=shape, limit=2),
            "token_type_ids": ColumnSpec(dtype="int64", shape=shape, limit=2),
            "labels": ColumnSpec(dtype="int64", limit=len(self._options.label_names)),
        }

    @property
    def fingerprint(self) -> str:
        settings = {
            "kind": "pairs",
            "sequence_length": self._options.sequence_length,
            "tokenizer": self._tokenizer.identity,
            "first": self._rows.first,
            "second": self._rows.second,
        }
        return fingerprint_of(settings, [self._rows.labels])

    def __len__(self) -> int:
        return len(self._rows.labels)

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        check_columns(columns, self.columns)
        positions = checked(indices, len(self))
        arrays: dict[str, Array] = {"labels": self._rows.labels[positions]}
        if set(columns) - {"labels"}:
            arrays["input_ids"], arrays["attention_mask"], arrays["token_type_ids"] = self._tokenizer.pairs(
                [self._rows.first[position] for position in positions],
                [self._rows.second[position] for position in positions],
                self._options.sequence_length,
            )
        return as_tensors({name: arrays[name] for name in columns})


def load_pairs(options: PairsOptions, split: Split) -> PairsDataset:
    """The pairs of `split`. Raises `UserError` for what is missing, malformed or empty, with the row's number."""
    separate = options.heldout_path is not None
    source = options.heldout_path if split == "heldout" and options.heldout_path is not None else options.path
    path = Path(source).expanduser()
    if path.is_dir():
        columns, whole = _read_directory(path, options.fields, split)
    elif path.is_file():
        columns, whole = _read_lines(path, options.fields), False
    else:
        raise UserError(f"pairs option 'path': no file or directory {source}")
    rows = _check_rows(columns, options, source)
    if not (whole or separate):
        refuse_empty_holdout(split, options.holdout, "pairs")
        # By position: MNLI lists the pairs of one premise together, and both splits should not share a premise.
        kept = len(rows.labels) - held_out_count(len(rows.labels), options.holdout, f"pairs of {source}")
        part = slice(kept) if split == "train" else slice(kept, None)
        rows = Rows(first=rows.first[part], second=rows.second[part], labels=rows.labels[part])
    return PairsDataset(rows, options)


def _read_lines(path: Path, fields: tuple[str, str, str]) -> list[list[object]]:
    columns: list[list[object]] = [[], [], []]
    with open_file(path) as file:
        lines = file.read().splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parse_json(line, dict[str, object], f"{path} line {number}")
        for column, field in zip(columns, fields, strict=True):
            if field not in row:
                raise UserError(f"{path} line {number}: no field {field!r}, got {', '.join(sorted(row)) or 'none'}")
            column.append(row[field])
    return columns


def _read_directory(path: Path, fields: tuple[str, str, str], split: Split) -> tuple[list[list[object]], bool]:
    """The three columns, and whether they are the whole split already."""
    table, whole = saved_part("pairs", path, split)
    for field in fields:
        if field not in table.column_names:
            raise unknown_name(f"field of {path}", field, table.column_names)
    return [list(table[field]) for field in fields], whole


def _check_rows(columns: list[list[object]], options: PairsOptions, source: str) -> Rows:
    sentences: list[list[str]] = []
    for field, column in zip(options.fields[:2], columns, strict=False):
        texts = [value for value in column if isinstance(value, str)]
        if len(texts) < len(column):
            row = next(number for number, value in enumerate(column, start=1) if not isinstance(value, str))
            raise UserError(f"{source} row {row}: field {field!r}: got {column[row - 1]!r}, expected a text")
        sentences.append(texts)
    if not columns[2]:
        raise UserError(f"{source}: holds no pairs")
    number_of = {name: number for number, name in enumerate(options.label_names)}
    labels = np.empty(len(columns[2]), dtype=np.int64)
    for position, value in enumerate(columns[2]):
        label = number_of.get(value, -1) if isinstance(value, str) else value
        if type(label) is not int or not 0 <= label < len(number_of):
            raise UserError(
                f"{source} row {position + 1}: field {options.fields[2]!r}: got {value!r}, expected "
                f"0 .. {len(number_of) - 1} or one of: {', '.join(number_of)}"
            )
        labels[position] = label
    return Rows(first=sentences[0], second=sentences[1], labels=labels)
