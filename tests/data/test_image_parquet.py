"""Encoded images in Parquet: bytes or Hugging Face's struct, labels of several kinds, rows as they are asked for."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tests.data.pictures import drawing, everything, load, save

from isthmus.data import DataSpec, load_dataset
from isthmus.data.clients import share_out
from isthmus.data.images import parquet
from isthmus.data.partition import PartitionSpec
from isthmus.data.streams import parquet_shards
from isthmus.data.within import confined_to
from isthmus.errors import StepError, UserError

KIND = "image-parquet"


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(drawing(seed)).save(file, "png")
    return file.getvalue()


def write(path: Path, count: int, *, struct: bool = True, first: int = 0, group: int = 4, **columns: object) -> Path:
    """Rows of images first, first + 1, ... with labels of 0 to 2."""
    images = [png(first + i) for i in range(count)]
    cells = [{"bytes": data, "path": None} for data in images] if struct else images
    labels = columns.pop("label", [i % 3 for i in range(count)])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": cells, "label": labels, **columns}), path, row_group_size=group)
    return path


def expected(seeds: list[int]) -> torch.Tensor:
    images = np.stack([drawing(seed).transpose(2, 0, 1) for seed in seeds]).astype(np.float32)
    return torch.from_numpy(images / np.float32(255))


@pytest.mark.parametrize("struct", [True, False])
def test_rows_are_the_encoded_images(struct: bool, tmp_path: Path) -> None:
    data = load(KIND, write(tmp_path / "a.parquet", 10, struct=struct), holdout=0)
    found = everything(data)
    assert torch.equal(found["pixel_values"], expected(list(range(10))))
    assert found["labels"].tolist() == [i % 3 for i in range(10)] and data.columns["labels"].limit == 3
    assert torch.equal(data.batch([9, 0, 4], ["pixel_values"])["pixel_values"], expected([9, 0, 4]))


def test_files_of_a_folder_follow_each_other_and_its_names_are_the_splits(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", 5)
    write(tmp_path / "data" / "train-00001-of-00002.parquet", 6, first=5)
    write(tmp_path / "data" / "test-00000-of-00001.parquet", 2, first=50)
    assert torch.equal(everything(load(KIND, tmp_path))["pixel_values"], expected(list(range(11))))
    assert torch.equal(everything(load(KIND, tmp_path, "heldout"))["pixel_values"], expected([50, 51]))
    other = write(tmp_path / "data" / "validation-00000-of-00001.parquet", 2, first=60)
    with pytest.raises(UserError, match=r"'heldout_path': missing, expected which of test, validation in .* is held"):
        load(KIND, tmp_path, "heldout")
    other.unlink()
    (tmp_path / "data" / "test-00000-of-00001.parquet").unlink()
    assert [len(load(KIND, tmp_path, split, holdout=0.2)) for split in ("train", "heldout")] == [9, 2]
    assert len(load(KIND, tmp_path / "data" / "train-*.parquet", holdout=0)) == 11
    held = write(tmp_path / "own.parquet", 3, first=70)
    assert torch.equal(
        everything(load(KIND, tmp_path, "heldout", heldout_path=str(held)))["pixel_values"], expected([70, 71, 72])
    )


def test_row_groups_are_kept_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(3):
        write(tmp_path / f"{k}.parquet", 8, first=8 * k)
    monkeypatch.setattr(parquet, "MOST_KEPT_BYTES", 2500)  # about two groups of four
    monkeypatch.setattr(parquet_shards, "MOST_OPEN_FILES", 1)
    table = parquet.Table([tmp_path / f"{k}.parquet" for k in range(3)])
    for row in np.random.default_rng(0).permutation(24):
        found = table.cell("image", int(row))
        assert isinstance(found, dict) and found["bytes"] == png(int(row))
        assert sum(column.nbytes for column in table._kept.values()) <= 2500 and len(table._opened) == 1


def test_labels_may_be_texts_fractions_or_have_declared_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 3, label=["cat", "ant", "cat"])
    data = load(KIND, path, holdout=0)
    assert everything(data)["labels"].tolist() == [1, 0, 1] and data.columns["labels"].limit == 2
    named = load(KIND, path, holdout=0, classes=["dog", "cat", "ant"])
    assert everything(named)["labels"].tolist() == [1, 2, 1] and named.columns["labels"].limit == 3
    with pytest.raises(UserError, match=r"unknown class of .*'ant'"):
        load(KIND, path, classes=["cat", "dog"])
    fractions = load(KIND, write(tmp_path / "b.parquet", 2, label=[0.5, 1.5]), holdout=0)
    assert everything(fractions)["labels"].tolist() == [0.5, 1.5] and fractions.columns["labels"].dtype == "float32"
    for form in (pa.dictionary(pa.int8(), pa.string()), pa.string_view()):
        column = pa.array(["cat", "ant", "cat"]).cast(form)
        other = load(KIND, write(tmp_path / "c.parquet", 3, label=column), holdout=0)
        assert everything(other)["labels"].tolist() == [1, 0, 1] and other.columns["labels"].limit == 2
    numbered = load(KIND, write(tmp_path / "n.parquet", 3), holdout=0, classes=list("abcd"))
    assert numbered.columns["labels"].limit == 4
    views = pa.array([png(0), png(1)], type=pa.binary_view())
    pq.write_table(pa.table({"image": views, "label": [0, 1]}), tmp_path / "v.parquet")
    assert torch.equal(everything(load(KIND, tmp_path / "v.parquet", holdout=0))["pixel_values"], expected([0, 1]))
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list("abcdefg")))
    rows = {"image": [{"bytes": png(1), "path": None}], "label": [3]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "hf.parquet"))
    theirs = load(KIND, tmp_path / "hf.parquet", holdout=0)
    assert theirs.columns["labels"].limit == 7 and torch.equal(everything(theirs)["pixel_values"], expected([1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "img"}, "unknown column of .*'img'"),
        ({"label": "lable"}, "unknown column of .*'lable': did you mean 'label'"),
        ({"image": "label"}, "column 'label': got int64, expected bytes"),
        ({"label": "image"}, "column 'image': got struct<.*, expected numbers or texts"),
        ({"label": "holes"}, "column 'holes': row 2 has no label"),
        ({"label": "below"}, "column 'below': got -1, expected labels from 0 on"),
        ({"label": "beyond"}, r"column 'beyond': got 4611686018427387904, expected labels of 0 to 2147483647"),
        ({"label": "nan"}, "column 'nan': row 2: got nan, expected a finite number"),
        ({"label": "large"}, "column 'large': row 1: got 1e[+]60, expected a finite number"),
        ({"label": "nan", "classes": ["a"]}, "'classes': got 1 names, but .*'nan' holds fractions"),
        ({"classes": ["a", "b"]}, r"got 2, expected labels of 0 to 1 \(option 'classes' has 2 names\)"),
    ],
)
def test_columns_that_do_not_fit(options: dict[str, object], message: str, tmp_path: Path) -> None:
    odd = {"beyond": [0, 2**62, 0], "nan": [0.0, float("nan"), 1.0], "large": [1e60, 0.0, 0.0]}
    path = write(tmp_path / "a.parquet", 3, holes=[1, None, 2], below=[0, -1, 0], **odd)
    with pytest.raises(UserError, match=message):
        load(KIND, path, **options)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_text("no table")
    with pytest.raises(UserError, match=r"cannot read .*no.parquet: "):
        load(KIND, tmp_path / "no.parquet")
    with pytest.raises(UserError, match=r"no file matches .*, expected a file, a glob or a folder"):
        load(KIND, tmp_path / "nowhere" / "*.parquet")
    images = [{"bytes": png(0)}, {"bytes": png(1)[:40]}, {"bytes": None}]
    pq.write_table(pa.table({"image": images, "label": [0, 0, 0]}), tmp_path / "a.parquet")
    data = load(KIND, tmp_path / "a.parquet", holdout=0)
    for sample, reason in ((1, "cannot be decoded"), (2, "holds no image")):
        with pytest.raises(StepError, match=rf"a.parquet row {sample + 1} \(sample {sample}\): {reason}"):
            data.batch([sample], ["pixel_values"])


def test_the_fingerprint_is_of_bytes_and_settings(tmp_path: Path) -> None:
    one, same = write(tmp_path / "a.parquet", 6), write(tmp_path / "b" / "c.parquet", 6)
    first = load(KIND, one).fingerprint
    assert first == load(KIND, same).fingerprint
    assert first not in {load(KIND, one, "heldout").fingerprint, load(KIND, one, mode="L").fingerprint}
    assert first != load(KIND, write(tmp_path / "d.parquet", 6, first=1)).fingerprint


def test_clients_by_labels_and_by_any_column_of_the_table(tmp_path: Path) -> None:
    writers = ["w2", "w1", "w2", "w3", "w1", "w2"]
    data = load(KIND, write(tmp_path / "a.parquet", 6, writer_id=writers), holdout=0)
    clients = share_out(data, PartitionSpec(scheme="natural", column="writer_id"), seed=0)
    assert clients.sizes.tolist() == [2, 3, 1]
    assert torch.equal(clients.load(1)["pixel_values"], expected([0, 2, 5]))
    with pytest.raises(UserError, match="'writer': did you mean 'writer_id'"):
        share_out(data, PartitionSpec(scheme="natural", column="writer"), seed=0)
    spread = share_out(data, PartitionSpec(scheme="dirichlet", clients=2, alpha=0.1), seed=0)
    assert sum(spread.sizes) == 6


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "outside.parquet", 3)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.parquet").symlink_to(tmp_path / "outside.parquet")
    save(tmp_path / "data" / "x.png", drawing(0))
    with confined_to(tmp_path / "data"), pytest.raises(UserError, match="leads out of this device's data folder"):
        load_dataset(DataSpec(kind=KIND, options={"path": str(tmp_path / "data" / "a.parquet")}), "train")
