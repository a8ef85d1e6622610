"""Data sets of the Hugging Face hub, by id, or a folder of Parquet, CSV or JSON files."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from isthmus.data.dataset import Dataset, Split, rows_of_split
from isthmus.data.disk import HELD_OUT_NAMES, DiskDataset
from isthmus.data.windows import TokenWindows, WindowOptions
from isthmus.data.within import check_within
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_extra

KIND = "hub"


class HubOptions(WindowOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A data set of the Hugging Face hub, by id, or a folder of Parquet, CSV or JSON files."""

    path: str
    """The id, as "wikitext", or a folder."""
    name: str = ""
    """Of the id's configurations, one: "wikitext-2-raw-v1"."""
    revision: str = ""
    """A commit or tag of the id; without it the newest."""
    train_split: str = "train"
    """The split to train on."""
    heldout_split: str = ""
    """The split to evaluate on; without it `validation` or `test` if there is one, else a share of `train_split`."""
    text: str = ""
    """The column of texts, for a language model: rows are joined, one per line, and cut into windows of tokens. Without
    it rows are samples."""
    columns: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Where rows are samples: the model's names of columns, each with the data set's name; without it every column of
    numbers is taken."""
    holdout: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the rows that training never sees, where there is no split for it."""


def load_hub(options: HubOptions, split: Split) -> Dataset:
    """The rows of `split`, or their text. No code of the data set is run.

    Raises UserError for what cannot be found or read, an unknown split or column, or an empty split.
    """
    source = f"{KIND} {options.path}"
    splits = _load(options)
    held = [name for name in ([options.heldout_split] if options.heldout_split else HELD_OUT_NAMES) if name in splits]
    if options.heldout_split and not held:
        raise unknown_name(f"split of {source}", options.heldout_split, list(splits))
    wanted = held[0] if held and split == "heldout" else options.train_split
    if wanted not in splits:
        raise unknown_name(f"split of {source}", wanted, list(splits))
    table = splits[wanted]
    if not len(table):
        raise UserError(f"{source}: split {wanted!r} holds no samples")
    rows = np.arange(len(table), dtype=np.int64) if held else rows_of_split(len(table), options.holdout, split, source)
    if not options.text:
        return DiskDataset(table, rows, options.columns, source)
    if options.columns:
        raise UserError(f"{source}: columns: got them beside text, expected one of the two")
    if options.text not in table.column_names:
        raise unknown_name(f"column of {source}", options.text, table.column_names)
    return TokenWindows(partial(_texts, table, rows, options.text, source), options, f"{source} {split}")


def _load(options: HubOptions) -> dict[str, Any]:
    """The splits by name."""
    library = import_extra("datasets", f"data of kind {KIND}")
    folder = Path(options.path).expanduser()
    if folder.is_dir():
        check_within(folder)
        if options.revision:
            raise UserError(f"{KIND} option 'revision': got one for a folder, expected none")
    elif options.path.startswith(("/", ".", "~")):
        raise UserError(f"{KIND} option 'path': no folder {options.path}")
    library.disable_progress_bars()
    try:
        found = library.load_dataset(
            str(folder) if folder.is_dir() else options.path, options.name or None, revision=options.revision or None
        )
    except Exception as e:  # no network, an unknown id, a script, malformed files: one family each
        raise UserError(f"{KIND} option 'path': cannot load {options.path}: {' '.join(str(e).split())}") from e
    return dict(found)


def _texts(table: Any, rows: Any, column: str, source: str) -> Iterable[bytes]:
    texts = table.select_columns([column])[rows][column]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{source} column {column!r}: expected texts in every row")
    return [b"".join(f"{text.rstrip(chr(10))}\n".encode() for text in texts)]
