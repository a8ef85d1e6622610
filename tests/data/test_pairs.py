from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.data import ColumnSpec, Dataset, DataSpec, Split, load_dataset
from isthmus.data.tokenizer import cut_longest_first
from isthmus.errors import UserError

ALL = ["input_ids", "attention_mask", "token_type_ids", "labels"]
ROWS = [
    {"premise": "the cat sat", "hypothesis": "the cat", "label": 0, "extra": None},
    {"premise": "the dog ran", "hypothesis": "the cat ran", "label": "neutral"},
    {"premise": "the", "hypothesis": "the dog ran the dog ran", "label": 2},
    {"premise": "", "hypothesis": "dog", "label": 1},
]


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows) + b"\n\n")
    return str(path)


def load(split: Split = "train", **options: object) -> Dataset:
    return load_dataset(DataSpec(kind="pairs", options=options), split)


def test_bytes_of_a_pair(tmp_path):
    data = load(path=write(tmp_path / "p.jsonl", ROWS), sequence_length=12, holdout=0)
    assert len(data) == 4
    assert data.columns["input_ids"] == ColumnSpec(dtype="int64", shape=(12,), limit=258)
    assert data.columns["labels"] == ColumnSpec(dtype="int64", shape=(), limit=3)
    batch = data.batch([3, 0], ALL)
    assert batch["input_ids"].tolist() == [
        [256, 257, *b"dog", 257, 0, 0, 0, 0, 0, 0],
        [256, *b"the c", 257, *b"the ", 257],
    ]
    assert batch["attention_mask"].tolist() == [[1] * 6 + [0] * 6, [1] * 12]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 1, 1, 1] + [0] * 6, [0] * 7 + [1] * 5]
    assert batch["labels"].tolist() == [1, 0]


def test_hugging_face_tokenizer(tmp_path, tokenizer_dir):
    path = write(tmp_path / "p.jsonl", ROWS)
    data = load(path=path, sequence_length=8, holdout=0, tokenizer=str(tokenizer_dir))
    batch = data.batch([0, 2], ALL)
    assert batch["input_ids"].tolist() == [[2, 4, 5, 6, 3, 4, 5, 3], [2, 4, 3, 4, 7, 8, 4, 3]]
    assert batch["token_type_ids"].tolist() == [[0] * 5 + [1] * 3, [0] * 3 + [1] * 5]
    padded = data.batch([3], ALL)
    assert padded["input_ids"].tolist() == [[2, 3, 7, 3, 0, 0, 0, 0]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
    assert data.columns["input_ids"].limit == 9
    assert data.fingerprint != load(path=path, sequence_length=8, holdout=0).fingerprint


def test_only_the_asked_columns_are_made(tmp_path, monkeypatch):
    data = load(path=write(tmp_path / "p.jsonl", ROWS), holdout=0)
    monkeypatch.delattr("isthmus.data.tokenizer.ByteTokenizer.pairs")
    assert data.batch(range(4), ["labels"])["labels"].tolist() == [0, 1, 2, 1]
    with pytest.raises(UserError, match="unknown column 'label': did you mean 'labels'"):
        data.batch([0], ["label"])


def test_heldout_pairs_by_position_or_from_their_own_file(tmp_path):
    path = write(tmp_path / "p.jsonl", ROWS)
    assert load("train", path=path, holdout=0.25).batch(range(3), ["labels"])["labels"].tolist() == [0, 1, 2]
    assert load("heldout", path=path, holdout=0.25).batch([0], ["labels"])["labels"].tolist() == [1]
    other = write(tmp_path / "h.jsonl", ROWS[2:])
    assert len(load("train", path=path, heldout_path=other)) == 4
    assert load("heldout", path=path, heldout_path=other).batch([0, 1], ["labels"])["labels"].tolist() == [2, 1]


def columns_of(rows: list[dict[str, object]]) -> dict[str, list[object]]:
    labels = {"neutral": 1}
    columns: dict[str, list[object]] = {name: [row[name] for row in rows] for name in ("premise", "hypothesis")}
    return {**columns, "label": [labels.get(row["label"], row["label"]) for row in rows]}


def test_hugging_face_dataset_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict(columns_of(ROWS))
    table.save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": table, "validation": table.select([1])}).save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "sole"))
    lines = write(tmp_path / "p.jsonl", ROWS)
    for name, train, heldout in (("single", 3, 1), ("both", 4, 1), ("sole", 3, 1)):
        options = {"path": str(tmp_path / name), "holdout": 0.25, "sequence_length": 16}
        assert len(load("train", **options)) == train and len(load("heldout", **options)) == heldout
    as_lines = load(path=lines, holdout=0.25, sequence_length=16)
    assert load(path=str(tmp_path / "single"), holdout=0.25, sequence_length=16).fingerprint == as_lines.fingerprint
    assert load("heldout", path=str(tmp_path / "both")).batch([0], ["labels"])["labels"].tolist() == [1]
    with pytest.raises(UserError, match=r"unknown field of .*: did you mean 'label'"):
        load(path=str(tmp_path / "single"), fields=["premise", "hypothesis", "lable"])


@given(
    first=st.lists(st.integers(), max_size=20), second=st.lists(st.integers(), max_size=20), budget=st.integers(0, 30)
)
def test_the_longest_is_cut_first(first, second, budget):
    head, tail = list(first), list(second)
    while len(head) + len(tail) > budget:
        (head if len(head) > len(tail) else tail).pop()
    assert cut_longest_first(first, second, budget) == (head, tail)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"premise": "a", "hypothesis": "b", "label": 3}, "row 2: field 'label': got 3, expected 0 .. 2"),
        ({"premise": "a", "hypothesis": "b", "label": -1}, "got -1, expected 0 .. 2"),
        ({"premise": "a", "hypothesis": "b", "label": True}, "got True"),
        ({"premise": "a", "hypothesis": "b", "label": "netural"}, "got 'netural', expected 0 .. 2 or one of: entail"),
        ({"premise": "a", "hypothesis": 4, "label": 1}, "row 2: field 'hypothesis': got 4, expected a text"),
        ({"premise": "a", "label": 1}, "line 2: no field 'hypothesis', got label, premise"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(UserError) as caught:
        load(path=write(tmp_path / "p.jsonl", [ROWS[0], row]))
    assert message in str(caught.value)


def test_bad_sources(tmp_path):
    with pytest.raises(UserError, match="no file or directory nowhere"):
        load(path="nowhere")
    with pytest.raises(UserError, match="holds no pairs"):
        load(path=write(tmp_path / "empty.jsonl", []))
    (tmp_path / "bad.jsonl").write_text('{"premise"\n')
    with pytest.raises(UserError, match="line 1: cannot be read: Input data was truncated"):
        load(path=str(tmp_path / "bad.jsonl"))
    with pytest.raises(UserError, match="1 cannot be divided"):
        load(path=write(tmp_path / "one.jsonl", ROWS[:1]))
    with pytest.raises(UserError, match="pairs option 'sequence_length'"):
        load(path=write(tmp_path / "p.jsonl", ROWS), sequence_length=4)
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match="pairs option 'path': cannot read"):
        load(path=str(tmp_path))
