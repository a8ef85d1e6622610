"""CSV files, and a file or a folder for each client."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.data import DataSpec, load_dataset
from isthmus.data.clients import ClientFolders, GroupedClients, PartitionedData, divided
from isthmus.data.dataset import ColumnSpec, joined_columns, rows_of_split
from isthmus.data.partition import PartitionSpec
from isthmus.errors import UserError
from isthmus.federated.evaluation import test_data as held_out_data
from isthmus.federated.job import FederatedConfig, FederatedJob, client_data
from isthmus.models import ModelSpec

ROWS = """x1,x2,kind,age,ward
1,2.5,cat,30,10
3,4.5,dog,31,9
5,6.5,cat,32,10
"""
COLUMNS = {"pixels": ["x*"], "labels": "kind", "age": "age"}
CLASSES = ["cat", "dog"]


def table(path: Path, **options: object) -> DataSpec:
    return DataSpec(kind="csv", options={"path": str(path), "holdout": 0, **options})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(ROWS)
    return path


def test_columns_are_numbers_vectors_and_classes(file: Path) -> None:
    data = load_dataset(table(file, columns=COLUMNS, classes=CLASSES), "train")
    found = data.batch(range(3), list(data.columns))
    assert {name: (spec.dtype, spec.shape, spec.limit) for name, spec in data.columns.items()} == {
        "pixels": ("float32", (2,), None),
        "labels": ("int64", (), 2),
        "age": ("int64", (), None),
    }
    assert found["pixels"].tolist() == [[1, 2.5], [3, 4.5], [5, 6.5]]
    assert found["labels"].tolist() == [0, 1, 0] and found["age"].tolist() == [30, 31, 32]


def test_without_names_every_column_of_numbers_is_taken(file: Path) -> None:
    data = load_dataset(table(file), "train")
    assert list(data.columns) == ["x1", "x2", "age", "ward"]
    assert data.columns["x2"].dtype == "float32"


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("x\n2\n")
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "notes.txt").write_text("none")
    assert load_dataset(table(tmp_path), "train").batch([0, 1], ["x"])["x"].tolist() == [1, 2]


def test_a_share_is_held_out_or_a_file_of_its_own(file: Path, tmp_path: Path) -> None:
    parts = [load_dataset(table(file, holdout=0.3), split).batch([0], ["age"])["age"] for split in ("train", "heldout")]
    assert not torch.equal(*parts)
    (tmp_path / "other.csv").write_text("x1,x2,kind,age,ward\n9,9,dog,99,1\n")
    held = load_dataset(table(file, heldout_path=str(tmp_path / "other.csv")), "heldout")
    assert held.batch([0], ["age"])["age"].tolist() == [99]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("", {}, "is empty, expected a first line with the names"),
        ("x,x\n1,2\n", {}, "names the column 'x' twice"),
        ("x,y\n1\n", {}, "mine.csv, line 2: got 1 values, expected 2"),
        ("x,y\n", {}, "holds no samples"),
        ("x\n1\n\n", {"columns": {"a": "z"}}, "unknown column of csv .* 'z'"),
        ("x\n1\n,\n", {}, "line 3: got 2 values, expected 1"),
        ("x,y\n1,2\n,3\n", {}, "line 3, column 'x': got '', expected a number: it is empty"),
        ("x\n1\nnan\n", {}, "line 3, column 'x': got 'nan', expected a finite number"),
        ("x\ncat\n", {"columns": {"x": "x"}}, r"expected a number \(or the option classes"),
        ("x\ncat\nfox\n", {"columns": {"x": "x"}, "classes": CLASSES}, "got 'fox', expected one of: cat, dog"),
        ("x\ncat\n", {}, "has no column of numbers"),
        ('x\n"1\n', {}, "is no CSV file in UTF-8: unexpected end of data"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(
    content: str, options: dict[str, object], words: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.csv").write_text(content)
    with pytest.raises(UserError, match=words):
        load_dataset(table(tmp_path / "mine.csv", **options), "train")


def population(folder: Path) -> DataSpec:
    """carol is a folder."""
    clients = folder / "clients"
    (clients / "carol").mkdir(parents=True)
    for number, place in enumerate(("alice", "bob", "carol/1", "carol/2", "dan")):
        rows = "".join(f"{10 * number + row},{row % 2}\n" for row in range(number + 2))
        (clients / f"{place}.csv").write_text(f"x,labels\n{rows}")
    (clients / ".hidden").touch()
    return DataSpec(kind="clients", options={"path": str(clients), "options": {"holdout": 0}})


def test_each_file_or_folder_is_a_client(tmp_path: Path) -> None:
    data = divided(population(tmp_path), None, 0)
    assert isinstance(data, ClientFolders)
    assert data.sizes.tolist() == [2, 3, 4 + 5, 6]
    assert list(data.names) == ["alice", "bob", "carol", "dan"]
    assert data.load(2)["x"].tolist() == [20, 21, 22, 23, 30, 31, 32, 33, 34]
    assert data.load_many([3, 0])["x"].tolist() == [40, 41, 42, 43, 44, 45, 0, 1]
    before = data.fingerprint
    (tmp_path / "clients" / "dan.csv").write_text("x,labels\n1,1\n")
    assert divided(population_again(tmp_path), None, 0).fingerprint != before


def population_again(folder: Path) -> DataSpec:
    return DataSpec(kind="clients", options={"path": str(folder / "clients"), "options": {"holdout": 0}})


def test_all_clients_together_are_a_data_set(tmp_path: Path) -> None:
    data = load_dataset(population(tmp_path), "train")
    assert len(data) == 20 and data.batch([2, 19], ["x"])["x"].tolist() == [10, 45]


def test_held_out_samples_of_clients_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    spec = population(tmp_path)
    (tmp_path / "test.csv").write_text("x,labels\n7,1\n8,0\n")
    spec = msgspec.structs.replace(spec, options={"path": spec.options["path"]}, heldout=str(tmp_path / "test.csv"))
    assert load_dataset(spec, "heldout").batch([0, 1], ["x"])["x"].tolist() == [7, 8]
    assert len(load_dataset(spec, "train")) == 20 and divided(spec, None, 0).sizes.sum() == 20
    assert len(load_dataset(spec.training_alone(), "train")) == 20
    disk = msgspec.structs.replace(spec, options={**spec.options, "kind": "digits"})
    with pytest.raises(UserError, match=r"data\.heldout: got .* with kind 'digits', expected one of"):
        load_dataset(disk, "heldout")


def test_held_out_samples_need_not_say_whose_they_are(tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text("x,y,who\n1,0,3\n2,1,4\n3,0,3\n")
    (tmp_path / "test.csv").write_text("x,y\n7,1\n8,0\n")
    columns = {"features": "x", "labels": "y", "who": "who"}
    job = FederatedJob(
        name="natural",
        model=ModelSpec(name="mlp"),
        data=DataSpec(
            kind="csv",
            options={"path": str(tmp_path / "all.csv"), "columns": columns},
            heldout=str(tmp_path / "test.csv"),
        ),
        federated=FederatedConfig(partition=PartitionSpec(scheme="natural", column="who")),
    )
    data = client_data(job)
    assert data.sizes.tolist() == [2, 1]
    found = held_out_data(job, data)
    assert found is not None and list(found) == list(data.columns) and found["features"].tolist() == [7, 8]


def test_several_clients_are_one_where_a_site_holds_them(tmp_path: Path) -> None:
    data = divided(population(tmp_path), PartitionSpec(scheme="files", clients=2), 0)
    assert isinstance(data, GroupedClients)
    assert data.sizes.tolist() == [5, 15]
    assert data.load(0)["x"].tolist() == [0, 1, 10, 11, 12]
    assert data.load_many([1, 0])["x"].tolist()[-5:] == data.load(0)["x"].tolist()
    with pytest.raises(
        UserError, match=r"federated\.partition\.clients: got 5, expected at most the 4 clients of the data"
    ):
        divided(population_again(tmp_path), PartitionSpec(scheme="files", clients=5), 0)


def test_a_column_of_numbers_or_texts_says_whose_a_row_is(file: Path) -> None:
    """Numbers in their order, not in that of their texts. Its values are the clients' names."""
    given = (("ward", [[31], [30, 32]], ["9", "10"]), ("kind", [[30, 32], [31]], ["cat", "dog"]))
    for column, expected, names in given:
        data = divided(table(file), PartitionSpec(scheme="natural", column=column), 0)
        assert column not in data.columns
        assert [data.load(client)["age"].tolist() for client in range(2)] == expected
        assert isinstance(data, PartitionedData) and data.names == names
    with pytest.raises(
        UserError, match=r"^federated\.partition\.column: unknown column of csv .*: did you mean 'ward'"
    ):
        divided(table(file), PartitionSpec(scheme="natural", column="wards"), 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "none"}, "clients option 'path': no folder none"),
        ({"kind": "image-folder"}, "classes: missing, expected the names of all classes"),
        ({"kind": "clients"}, "kind"),
        ({"options": {"path": "/x"}}, "got 'path', expected none"),
    ],
)
def test_clients_that_cannot_be_read_are_refused(change: dict[str, object], words: str, tmp_path: Path) -> None:
    spec = population(tmp_path)
    with pytest.raises(UserError, match=words):
        divided(DataSpec(kind="clients", options={**spec.options, **change}), None, 0)


def test_a_client_with_other_columns_or_twice_is_named(tmp_path: Path) -> None:
    spec = population(tmp_path)
    (tmp_path / "clients" / "bob.csv").write_text("x,label\n1,1\n")
    wide = ColumnSpec(dtype="float32", shape=(5,), limit=3)
    shorter = {"alice": {"x": wide}, "bob": {"x": ColumnSpec(dtype="float32", shape=(4,))}}
    with pytest.raises(UserError, match=r"data: column 'x': bob has float32 \[4\], alice has float32 \[5\], below 3$"):
        joined_columns(shorter)
    with pytest.raises(UserError, match="bob has columns x, label, alice has x, labels"):
        divided(spec, None, 0)
    (tmp_path / "clients" / "alice").mkdir()
    (tmp_path / "clients" / "alice-b.csv").touch()
    with pytest.raises(UserError, match="holds 'alice' twice"):
        divided(spec, None, 0)


def test_texts_are_clients_by_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "texts" / "b").mkdir(parents=True)
    for name in ("a.txt", "b/1.txt", "b/2.txt"):
        (tmp_path / "texts" / name).write_text("word " * 20)
    options = {"sequence_length": 9, "tokenizer": "bytes", "holdout": 0}
    spec = DataSpec(kind="clients", options={"path": str(tmp_path / "texts"), "kind": "text", "options": options})
    sizes = divided(spec, None, 0).sizes
    assert sizes[0] == 11 and np.isclose(sizes[1], 22, atol=1)


def test_both_splits_have_the_types_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    held = int(rows_of_split(40, 0.05, "heldout", "mine")[0])
    path.write_text("x,y\n" + "".join(f"{row + (0.5 if row == held else 0)},{row}\n" for row in range(40)))
    spec = table(path, holdout=0.05)
    train, heldout = load_dataset(spec, "train"), load_dataset(spec, "heldout")
    assert train.columns == heldout.columns and train.columns["x"].dtype == "float32"
    assert heldout.batch([0], ["x"])["x"].tolist() == [held + 0.5] and len(train) == 38


def test_no_columns_in_a_list_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match="option columns: got an empty list"):
        load_dataset(table(file, columns={"pixels": []}), "train")


def test_owners_that_are_nearly_numbers_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("client,x\n--1,0.5\n--2,1.5\n--1,2.5\n")
    assert divided(table(path), PartitionSpec(scheme="natural"), 0).sizes.tolist() == [2, 1]
