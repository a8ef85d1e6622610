"""A folder of images: which files, which labels, how they are distinguished, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.pictures import drawing, everything, load, picture_folder, save

from isthmus.data import ColumnSpec, DataSpec, load_dataset
from isthmus.data import digests as digests_module
from isthmus.data.within import confined_to
from isthmus.errors import StepError, UserError

KIND = "image-folder"


def test_pixels_and_labels_are_those_of_the_files(tmp_path: Path) -> None:
    picture_folder(tmp_path)
    data = load(KIND, tmp_path, holdout=0)
    assert data.columns == {
        "pixel_values": ColumnSpec(dtype="float32", shape=(3, 8, 8)),
        "labels": ColumnSpec(dtype="int64", limit=3),
    }
    found = everything(data)
    assert found["labels"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    expected = np.stack([drawing(i).transpose(2, 0, 1) for i in range(12)]).astype(np.float32) / np.float32(255)
    assert torch.equal(found["pixel_values"], torch.from_numpy(expected))
    assert data.batch([5, 1], ["labels"])["labels"].tolist() == [1, 0]
    assert data.batch([], ["pixel_values"])["pixel_values"].shape == (0, 3, 8, 8)


def test_a_share_is_held_out_and_both_parts_have_every_class_number(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=2, each=10)
    parts = [everything(load(KIND, tmp_path, split, holdout=0.2)) for split in ("train", "heldout")]
    assert [len(part["labels"]) for part in parts] == [16, 4]
    together = torch.cat([part["pixel_values"] for part in parts]).flatten(1).sum(1).sort().values
    assert torch.equal(
        together, everything(load(KIND, tmp_path, holdout=0))["pixel_values"].flatten(1).sum(1).sort()[0]
    )
    with pytest.raises(UserError, match="no held-out samples because holdout is 0"):
        load(KIND, tmp_path, "heldout", holdout=0)


@pytest.mark.parametrize("name", ["validation", "valid", "val", "test"])
def test_train_and_another_folder_are_the_splits(name: str, tmp_path: Path) -> None:
    picture_folder(tmp_path / "train", classes=3, each=2)
    save(tmp_path / name / "class-2" / "x.png", drawing(99))
    assert len(load(KIND, tmp_path)) == 6
    held = everything(load(KIND, tmp_path, "heldout"))
    assert held["labels"].tolist() == [2], "numbered as in train/"
    save(tmp_path / name / "clas-1" / "x.png", drawing(99))
    with pytest.raises(UserError, match=r"unknown class of .*'clas-1': did you mean 'class-1'"):
        load(KIND, tmp_path, "heldout")


def test_several_folders_of_held_out_images_want_a_choice(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        picture_folder(tmp_path / name, classes=2, each=3 if name == "train" else 1)
    assert len(load(KIND, tmp_path)) == 6
    with pytest.raises(UserError, match=r"'heldout_path': missing, expected which of val, test in .* is held out"):
        load(KIND, tmp_path, "heldout")
    assert len(load(KIND, tmp_path, "heldout", heldout_path=str(tmp_path / "test"))) == 2
    with pytest.raises(UserError, match="option 'heldout_path': no folder"):
        load(KIND, tmp_path, heldout_path=str(tmp_path / "nowhere"))
    save(tmp_path / "test" / "class-7" / "x.png", drawing(99))
    with pytest.raises(UserError, match=r"unknown class of .*test 'class-7'"):
        load(KIND, tmp_path)


def test_held_out_images_may_lie_elsewhere(tmp_path: Path) -> None:
    picture_folder(tmp_path / "own", classes=2, each=3)
    picture_folder(tmp_path / "other", classes=1, each=2)
    paths = {"heldout_path": str(tmp_path / "other")}
    assert [len(load(KIND, tmp_path / "own", split, **paths)) for split in ("train", "heldout")] == [6, 2]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("train", "plane"):
        save(tmp_path / name / "1.png", drawing(1))
    assert load(KIND, tmp_path, holdout=0).columns["labels"].limit == 2


def test_a_party_with_some_classes_names_all(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=2)
    names = ["class-9", "class-1", "class-0"]
    data = load(KIND, tmp_path, classes=names, holdout=0)
    assert data.columns["labels"].limit == 3 and everything(data)["labels"].tolist() == [1] * 4 + [2] * 4
    with pytest.raises(UserError, match=r"unknown class of .* 'class-1'"):
        load(KIND, tmp_path, classes=["class-0"])


def test_what_is_no_image_is_passed_over_and_deeper_folders_are_read(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=1, each=2)
    save(tmp_path / "class-0" / "deep" / "er" / "A.JPG", drawing(3))
    (tmp_path / "class-0" / "notes.txt").write_text("no image")
    (tmp_path / "class-0" / ".hidden.png").write_text("no image")
    (tmp_path / ".cache").mkdir()
    os.symlink(tmp_path / "class-0", tmp_path / "class-0" / "loop")
    data = load(KIND, tmp_path, holdout=0)
    assert len(data) == 3 and data.columns["labels"].limit == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "has no folder, expected one per class"),
        (lambda p: (p / "empty").mkdir(), "empty: holds no image"),
        (lambda p: save(p / "1.png", drawing(1)), "has no folder, expected one per class"),
    ],
)
def test_folders_that_are_no_data_set(make, message: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match=message):
        load(KIND, tmp_path)
    with pytest.raises(UserError, match="option 'path': no folder"):
        load(KIND, tmp_path / "nowhere")


def test_the_fingerprint_is_of_bytes_labels_and_settings_not_of_the_place(tmp_path: Path) -> None:
    one, other = picture_folder(tmp_path / "one"), picture_folder(tmp_path / "elsewhere" / "other")
    first = load(KIND, one).fingerprint
    assert first == load(KIND, other).fingerprint != load(KIND, one, "heldout").fingerprint
    assert first != load(KIND, one, mode="L").fingerprint
    assert first != load(KIND, one, transforms=[{"name": "RandomHorizontalFlip"}]).fingerprint
    assert first != load(KIND, one, classes=["class-0", "class-2", "class-1"]).fingerprint
    save(other / "class-1" / "2.png", drawing(77))
    assert first != load(KIND, other).fingerprint


def test_known_digests_are_not_read_again_and_changed_files_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests_module, "WORTH_BYTES", 0)
    monkeypatch.setattr(digests_module, "_RACY_NS", -(10**18))  # nothing is too new to be kept
    files = [save(tmp_path / f"{i}.png", drawing(i)) for i in range(3)]
    opened: list[str] = []

    def spy(path: str | Path):
        opened.append(Path(path).name)
        return open(path, "rb")

    first = digests_module.digests_of(files, spy)
    assert np.array_equal(digests_module.digests_of(files, spy), first) and opened == ["0.png", "1.png", "2.png"]
    save(files[1], drawing(9))
    again = digests_module.digests_of(files, spy)
    assert opened[3:] == ["1.png"] and (again != first).any(axis=1).tolist() == [False, True, False]
    (kept,) = (tmp_path / "cache").rglob("*.msgpack")
    kept.write_bytes(b"damaged")
    assert np.array_equal(digests_module.digests_of(files, spy), again) and len(opened) == 7
    monkeypatch.setattr(digests_module, "_RACY_NS", 10**18)  # everything is too new to be trusted
    kept.unlink()
    digests_module.digests_of(files, spy), digests_module.digests_of(files, spy)
    assert len(opened) == 13


def test_a_damaged_image_is_named_in_one_line(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=1)
    bad = tmp_path / "class-0" / "2.png"
    whole = bad.read_bytes()
    data = load(KIND, tmp_path, holdout=0)
    expected = len(data), data.columns
    for content in (whole[: len(whole) // 2], b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n"):
        bad.write_bytes(content)
        with pytest.raises(
            StepError, match=r"image-folder .*class-0/2.png \(sample 2\): cannot be decoded: "
        ) as caught:
            data.batch([1, 2], ["pixel_values"])
        assert "\n" not in str(caught.value)
        assert data.batch([2], ["labels"])["labels"].tolist() == [0], "labels need no image"
    bad.unlink()
    with pytest.raises(UserError, match=r"cannot read .*2.png: No such file"):
        data.batch([2], ["pixel_values"])
    assert expected == (4, data.columns)


def test_images_of_different_sizes_want_a_transform(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=1)
    save(tmp_path / "class-0" / "9.png", drawing(1, 4, 6))
    data = load(KIND, tmp_path, holdout=0)
    with pytest.raises(StepError, match=r"9.png \(sample 4\): got 4 x 6 pixels \(height x width\), expected 8 x 8"):
        everything(data)
    sized = load(KIND, tmp_path, holdout=0, transforms=[{"name": "Resize", "size": [5, 4]}])
    assert everything(sized)["pixel_values"].shape == (5, 3, 5, 4)


def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path / "c" / "1.png", np.zeros((40, 50), dtype=np.uint8))
    with pytest.raises(StepError, match=r"got 50 x 40 pixels, expected at most 1999 \(max_pixels\)"):
        _ = load(KIND, tmp_path, holdout=0, max_pixels=1999).columns
    assert load(KIND, tmp_path, holdout=0, max_pixels=2000).columns
    with pytest.raises(UserError, match="max_pixels"):
        load(KIND, tmp_path, max_pixels=10**9)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)  # Pillow's own refusal is a line too
    for most, told in ((10**6, 1000), (900, 900)):
        with pytest.raises(StepError, match=rf"1.png \(sample 0\): got over 1000 pixels, expected at most {told} "):
            _ = load(KIND, tmp_path, holdout=0, max_pixels=most).columns


def test_only_files_of_the_own_folder_are_read_even_later(tmp_path: Path) -> None:
    picture_folder(tmp_path / "data" / "set", classes=1)
    save(tmp_path / "outside" / "secret.png", drawing(5))
    with confined_to(tmp_path / "data"):
        data = load_dataset(DataSpec(kind=KIND, options={"path": str(tmp_path / "data/set"), "holdout": 0}), "train")
    assert len(everything(data)["labels"]) == 4
    link = tmp_path / "data" / "set" / "class-0" / "1.png"
    link.unlink()
    link.symlink_to(tmp_path / "outside" / "secret.png")
    for read in (lambda: data.batch([1], ["pixel_values"]), lambda: data.fingerprint):
        with pytest.raises(UserError, match="leads out of this device's data folder"):
            read()  # the confinement is that of the moment when the set was opened
    with confined_to(tmp_path / "data"), pytest.raises(UserError, match="leads out of this device's data folder"):
        load(KIND, tmp_path / "data" / "set")
