"""Data sets by id, tried on a folder: the hub gives the same object."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.data import DataSpec, load_dataset
from isthmus.data.allowed import check_kind
from isthmus.errors import UserError

pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def folder_of(tmp_path: Path, splits: dict[str, list[dict[str, object]]]) -> str:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_texts_become_windows(tmp_path: Path) -> None:
    splits = {"train": [{"text": "hello\n"}, {"text": "world"}], "validation": [{"text": "held out text"}]}
    spec = DataSpec(kind="hub", options={"path": folder_of(tmp_path, splits), "text": "text", "sequence_length": 5})
    train, heldout = load_dataset(spec, "train"), load_dataset(spec, "heldout")
    ids = train.batch(np.arange(len(train)), ["input_ids", "labels"])
    assert bytes(ids["input_ids"].flatten().tolist()) == b"hello\nworl"
    assert bytes(ids["labels"].flatten().tolist()) == b"ello\nworld"
    assert len(heldout) == 2


def test_rows_of_numbers_are_samples(tmp_path: Path) -> None:
    rows = [{"x": [float(i), 0.0], "y": i % 2, "note": "n"} for i in range(20)]
    columns = {"pixel_values": "x", "labels": "y"}
    path = folder_of(tmp_path, {"train": rows})
    spec = DataSpec(kind="hub", options={"path": path, "columns": columns, "holdout": 0.2})
    train, heldout = load_dataset(spec, "train"), load_dataset(spec, "heldout")
    assert (len(train), len(heldout), sorted(train.columns)) == (16, 4, ["labels", "pixel_values"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "./nowhere"}, "hub option 'path': no folder"),
        ({"text": "words"}, "column of hub"),
        ({"train_split": "tain"}, "split of hub"),
        ({"heldout_split": "dev"}, "split of hub"),
        ({"text": "text", "columns": {"a": "b"}}, "columns: got them beside text"),
        ({"text": "text", "revision": "main"}, "revision"),
        ({"text": "text", "sequence_length": 500}, "got 11 tokens"),
    ],
)
def test_what_is_refused(options: dict[str, object], words: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"train": [{"text": "hello worl"}]})
    with pytest.raises(UserError, match=words):
        len(load_dataset(DataSpec(kind="hub", options={"path": path, "holdout": 0.0, **options}), "train"))


def test_nothing_is_fetched_for_somebody_else() -> None:
    spec = DataSpec(kind="hub", options={"path": "wikitext"})
    with pytest.raises(UserError, match="nothing is fetched for somebody else"):
        check_kind(spec, None, foreign=True)
    check_kind(spec, ("hub",), foreign=True)
    check_kind(spec, None, foreign=False)
