"""Small Parquet files and tar shards with the same samples, and how they are opened."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from isthmus.data import DataSpec, Split, load_dataset
from isthmus.data.streams.dataset import StreamDataset


def stream_of(path: str | Sequence[str], split: Split = "train", **options: object) -> StreamDataset:
    found = load_dataset(DataSpec(kind="stream", options={"path": path, **options}), split)
    assert isinstance(found, StreamDataset)
    return found


def texts(count: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    words = ["isthmus", "bridge", "sea", "canal", "ridge", "harbour", "narrow"]
    return [" ".join(draw.choice(words, draw.integers(3, 30))) for _ in range(count)]


def vectors(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


def write_parquet(folder: Path, files: int = 3, rows: int = 60, group: int = 20) -> str:
    """Columns `text`, `x` (float32 [4]), `y` (int64) and `note`. Returns a glob."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    x, text = vectors(files * rows), texts(files * rows)
    for file in range(files):
        own = slice(file * rows, (file + 1) * rows)
        flat = arrow.FixedSizeListArray.from_arrays(arrow.array(x[own].ravel()), 4)
        y = arrow.array(np.arange(files * rows)[own] % 10)
        note = arrow.array(["n"] * rows)
        table = arrow.table({"text": text[own], "x": flat, "y": y, "note": note})
        parquet.write_table(table, folder / f"train-{file}.parquet", row_group_size=group)
    return str(folder / "train-*.parquet")


def write_tar(folder: Path, files: int = 3, rows: int = 60) -> str:
    """The same samples as `txt`, `npy` and `cls`. Returns a name with braces."""
    folder.mkdir(parents=True, exist_ok=True)
    x, text = vectors(files * rows), texts(files * rows)
    for file in range(files):
        with tarfile.open(folder / f"shard-{file:03d}.tar", "w") as archive:
            for row in range(file * rows, (file + 1) * rows):
                packed = io.BytesIO()
                np.save(packed, x[row])
                members = {"txt": text[row].encode(), "npy": packed.getvalue(), "cls": b"%d\n" % (row % 10)}
                for ending, content in members.items():
                    member = tarfile.TarInfo(f"part/{row:06d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return str(folder / f"shard-{{000..{files - 1:03d}}}.tar")
