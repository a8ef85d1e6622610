"""Data sets by id, tried on a folder: the hub gives the same object."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.data import DataSpec, load_dataset
from isthmus.data.registry import check_kind
from isthmus.errors import UserError


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
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


def test_a_null_in_place_of_a_text_is_named_by_its_row(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"train": [{"text": "a"}, {"text": "b"}, {"text": None}]})
    with pytest.raises(UserError, match="column 'text', row 3: got null, expected texts in every row"):
        len(load_dataset(DataSpec(kind="hub", options={"path": path, "text": "text", "holdout": 0}), "train"))


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


TABLES: dict[str, tuple[list[object], str]] = {
    "label": ([40, 50, None], "row 3: got null"),
    "first": ([None, 7, 8], "row 1: got null"),
    "pair": ([[1, 2], [3, None], [5, 6]], "row 2: got null"),
    "list": ([[1, 2], None, [5, 6]], "row 2: got null"),
    "nested": ([[[1], [2]], [[3], [4]], [[5], None]], "row 3: got null"),
    "share": ([0.5, None, 0.25], "row 2: got null"),
    "larges": ([[1, 2], [2**63 + 1, 4], [5, 6]], f"row 2: got {2**63 + 1}, expected whole numbers up to 2\\^63 - 1"),
    "large": ([1, 2**63 + 1, 3], f"row 2: got {2**63 + 1}, expected whole numbers up to 2\\^63 - 1"),
}


KINDS = ("disk", "stream", "stream in groups")


@pytest.mark.parametrize(
    ("kind", "column"),
    [(k, c) for k in KINDS for c in TABLES if (k, c) != ("disk", "large")],  # there scalars keep their type, uint64
)
def test_what_int64_has_no_place_for_is_refused_by_its_row(kind: str, column: str, tmp_path: Path) -> None:
    """numpy would make -9223372036854775808 of a null, and a negative number of one above 2^63."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    library = pytest.importorskip("datasets")
    values, words = TABLES[column]
    kinds = {"large": arrow.uint64(), "larges": arrow.list_(arrow.uint64())}
    held = arrow.array(values, kinds.get(column))
    table = arrow.table({"id": ["a", "b", "c"], column: held})
    if kind == "disk":
        library.Dataset(table).save_to_disk(str(tmp_path / "saved"))
        options: dict[str, object] = {"path": str(tmp_path / "saved"), "holdout": 0.0}
    else:
        parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=1 if "groups" in kind else 3)
        options = {"path": str(tmp_path / "rows.parquet"), "holdout": 0.0, "columns": {"x": column}}
    with pytest.raises(UserError, match=f"column '{column}', {words}") as refused:
        data = load_dataset(DataSpec(kind=kind.split()[0], options=options), "train")
        data.batch([0, 1, 2], list(data.columns))
    assert kind == "disk" or "rows.parquet" in str(refused.value)


def test_types_are_the_declared_ones_not_those_of_the_first_row(tmp_path: Path) -> None:
    """Of the rows that are used: what was held out may hold nulls."""
    arrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    columns = {
        "small": arrow.array([1, 2, 2**63 + 1], arrow.uint64()),
        "byte": arrow.array([1, 2, 3], arrow.uint8()),
        "half": arrow.array([1.0, 2.5, -0.5], arrow.float16()),
        "double": arrow.array([1.0, 2.5, 1e300]),
        "yes": arrow.array([True, False, True]),
        "empty": arrow.array([[], [], []], arrow.list_(arrow.int32())),
        "grid": arrow.array([[[1, 2]], [[3, 4]], [[5, 6]]], arrow.list_(arrow.list_(arrow.int8(), 2))),
        "note": arrow.array(["a", None, "c"]),
        "when": arrow.array([1, 2, 3], arrow.timestamp("s")),
    }
    library.Dataset(arrow.table(columns)).save_to_disk(str(tmp_path / "saved"))
    data = load_dataset(DataSpec(kind="disk", options={"path": str(tmp_path / "saved"), "holdout": 0.0}), "train")
    assert {name: (spec.dtype, spec.shape) for name, spec in data.columns.items()} == {
        "small": ("uint64", ()),
        "byte": ("uint8", ()),
        "half": ("float16", ()),
        "double": ("float64", ()),
        "yes": ("bool", ()),
        "empty": ("int64", (0,)),
        "grid": ("int64", (1, 2)),
    }
    found = data.batch([2, 0, 2], list(data.columns))
    assert found["small"].tolist() == [2**63 + 1, 1, 2**63 + 1] and found["yes"].tolist() == [True, True, True]
    assert found["half"].tolist() == [-0.5, 1.0, -0.5] and found["grid"].tolist() == [[[5, 6]], [[1, 2]], [[5, 6]]]
    with pytest.raises(UserError, match=r"column 'note', row 2: got null"):
        data.owners("note")  # pyright: ignore
