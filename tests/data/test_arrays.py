import zipfile

import numpy as np
import pytest
import torch

from isthmus.data import ColumnSpec, Dataset, DataSpec, Split, load_dataset
from isthmus.data import dataset as arrays_module
from isthmus.errors import UserError


def load(kind: str, split: Split = "train", **options: object) -> Dataset:
    return load_dataset(DataSpec(kind=kind, options=options), split)


def everything(data: Dataset) -> dict[str, torch.Tensor]:
    return data.batch(range(len(data)), list(data.columns))


def test_npz_columns_keep_their_rows_together(tmp_path):
    rows = np.arange(20)
    np.savez(tmp_path / "a.npz", x=np.stack([rows, rows * 2], 1).astype(np.float32), y=rows.astype(">i8"))
    parts = [everything(load("npz", s, path=str(tmp_path / "a.npz"), holdout=0.2)) for s in ("train", "heldout")]
    assert [len(part["y"]) for part in parts] == [16, 4]
    both = torch.cat([part["y"] for part in parts])
    assert sorted(both.tolist()) == list(range(20)) and both.dtype == torch.int64
    assert parts[1]["y"].tolist() != [16, 17, 18, 19]  # a file sorted by class gives every class to both
    for part in parts:
        assert torch.equal(part["x"], torch.stack([part["y"], part["y"] * 2], 1).float())
    columns = load("npz", path=str(tmp_path / "a.npz")).columns
    assert columns == {"x": ColumnSpec(dtype="float32", shape=(2,)), "y": ColumnSpec(dtype="int64")}


def test_npz_with_its_own_heldout_file(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(4))
    np.savez(tmp_path / "b.npz", x=np.arange(3))
    options = {"path": str(tmp_path / "a.npz"), "heldout_path": str(tmp_path / "b.npz")}
    train, heldout = load("npz", **options), load("npz", "heldout", **options)
    assert (len(train), len(heldout)) == (4, 3)
    assert train.fingerprint != heldout.fingerprint
    assert train.fingerprint == load("npz", path=str(tmp_path / "a.npz"), holdout=0).fingerprint


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "holds no arrays"),
        ({"x": np.zeros((0, 3))}, "holds no samples"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "columns differ in length: {'x': 3, 'y': 4}"),
        ({"x": np.float32(1)}, "column 'x': got a scalar"),
        ({"x": np.array(["a", "b"])}, "column 'x': got dtype <U1"),
        ({"x": np.zeros(3, complex)}, "column 'x': got dtype complex128"),
        ({"x": np.array([{}], object)}, "Object arrays cannot be loaded"),
    ],
)
def test_npz_that_cannot_be_used(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError) as caught:
        load("npz", path=str(tmp_path / "a.npz"))
    assert message in str(caught.value)


def test_npz_that_is_none(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"is no \.npz archive"):
        load("npz", path=str(tmp_path / "a.npz"))
    with pytest.raises(UserError, match="no file nowhere"):
        load("npz", path="nowhere")


def test_digits():
    train, heldout = load("digits"), load("digits", "heldout")
    assert len(train) + len(heldout) == 1797 and len(heldout) == 180
    assert train.columns == {
        "pixel_values": ColumnSpec(dtype="float32", shape=(1, 8, 8)),
        "labels": ColumnSpec(dtype="int64", limit=10),
    }
    batch = everything(train)
    assert batch["pixel_values"].min() == 0 and batch["pixel_values"].max() == 1
    assert set(everything(heldout)["labels"].tolist()) == set(range(10))
    assert train.fingerprint == load("digits").fingerprint != heldout.fingerprint


def test_digits_in_other_forms():
    plain = load("digits").batch([0, 5], ["pixel_values"])["pixel_values"]
    flat = load("digits", flat=True)
    assert flat.columns["pixel_values"].shape == (64,)
    assert torch.equal(flat.batch([0, 5], ["pixel_values"])["pixel_values"], plain.flatten(1))
    large = load("digits", size=32, channels=3).batch([0, 5], ["pixel_values"])["pixel_values"]
    assert large.shape == (2, 3, 32, 32)
    assert torch.equal(large, torch.nn.functional.interpolate(plain, size=32).expand(2, 3, 32, 32))


def test_only_the_asked_columns_come_and_changes_stay_the_callers():
    data = load("digits")
    batch = data.batch(np.array([3, 1]), ["labels"])
    assert list(batch) == ["labels"]
    batch["labels"].zero_()
    assert data.batch([3, 1], ["labels"])["labels"].tolist() != [0, 0]
    with pytest.raises(IndexError):
        data.batch([-1], ["labels"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 4}, "digits option 'size': Expected `integer` >= 8"),
        ({"channels": 2}, "digits option 'channels': got 2, expected one of: 1, 3"),
        ({"flatt": True}, "unknown digits option 'flatt': did you mean 'flat'"),
    ],
)
def test_bad_digit_options(options, message):
    with pytest.raises(UserError) as caught:
        load("digits", **options)
    assert message in str(caught.value)


def claiming(shape: str) -> bytes:
    """A file of numpy's whose header claims this shape of float64, and that ends after eight bytes."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)


def test_a_header_that_claims_more_than_there_is_is_named_and_costs_no_memory(tmp_path):
    for name, stored, said in (
        ("x.npy", claiming("(1000000000000,)"), "its header claims 8000000000000 bytes, there are 8"),
        ("x.npy", claiming("(3, 99)"), "its header claims 2376 bytes, there are 8"),
        ("x.npy", claiming("(" * 900 + "1" + ")" * 900), "Cannot parse header|claims|too many|nested"),
        ("x.npy", b"text", "magic string"),
    ):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr(name, stored)
        with pytest.raises(UserError, match=rf"cannot read {tmp_path}/a.npz: .*({said})"):
            load("npz", path=str(tmp_path / "a.npz"))


def test_an_archive_that_claims_more_than_it_can_hold_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", claiming("(1,)"))
    written = path.read_bytes()
    at = written.rindex(b"PK\x01\x02") + 24  # the size of the content, in the archive's directory
    path.write_bytes(written[:at] + (1 << 31).to_bytes(4, "little") + written[at + 4 :])
    with pytest.raises(UserError, match=r"a\.npz: x\.npy claims 2147483648 bytes, which \d+ cannot hold"):
        load("npz", path=str(path))


def test_an_archive_whose_arrays_need_more_memory_than_there_is_is_named(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=np.arange(4))

    def too_much(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(arrays_module, "read_npy", too_much)
    with pytest.raises(UserError, match=r"cannot read .*a\.npz: there is not enough memory for its arrays"):
        load("npz", path=str(tmp_path / "a.npz"))


def test_arrays_of_every_order_and_dimension_are_as_numpy_reads_them(tmp_path):
    drawn = np.random.default_rng(0).normal(size=(4, 3, 2))
    given = {"a": drawn, "b": np.asfortranarray(drawn), "c": drawn[:, 0, 0], "d": np.arange(4, dtype=">i2")}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **given)
        found = everything(load("npz", path=str(tmp_path / "a.npz"), holdout=0))
        assert {name: column.tolist() for name, column in found.items()} == {n: v.tolist() for n, v in given.items()}
