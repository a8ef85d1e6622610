"""A link in a device's data folder leads nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
from tests.runtime.wire import assignment

from isthmus.data import DataSpec, load_dataset
from isthmus.data.within import check_pattern_within, check_within, confined_to, open_file
from isthmus.errors import UserError
from isthmus.runtime.device.stage_data import stage_data
from isthmus.runtime.identity.blinded_digests import ONE_OWNER

OUTSIDE = "leads out of this device's data folder"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder, entered by a link, and files beside it."""
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "secret.txt").write_text("secret " * 50)
    (tmp_path / "outside" / "deep" / "secret.txt").write_text("secret " * 50)
    (tmp_path / "outside" / "data-more").mkdir()
    np.savez(tmp_path / "outside" / "secret.npz", x=np.ones((9, 2)), labels=np.zeros(9))
    real = tmp_path / "real-data"
    (real / "texts").mkdir(parents=True)
    (real / "texts" / "a.txt").write_text("within " * 50)
    (tmp_path / "data").symlink_to(real)
    monkeypatch.chdir(tmp_path / "data")
    return tmp_path / "data"


def text(files: object) -> DataSpec:
    return DataSpec(kind="text", options={"files": files, "sequence_length": 8, "holdout": 0})


def read(spec: DataSpec) -> int:
    told = assignment("d0")
    columns = msgspec.structs.replace(told.train, columns=("labels",))
    given = msgspec.structs.replace(told, data=spec, train=columns, evaluates=False)
    with mock.patch("isthmus.runtime.device.stage_data._check_holding"):  # how many samples there are is not asked here
        return len(stage_data(given, ONE_OWNER, foreign=True)["train"])


def linked(folder: Path, name: str, to: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(to)


@pytest.mark.parametrize(
    ("name", "to", "files"),
    [
        ("link.txt", "../outside/secret.txt", "link.txt"),
        ("texts/link.txt", "../../outside/secret.txt", "texts/*.txt"),
        ("texts/deep", "../../outside", "texts/**/*.txt"),
        ("texts/deep", "../../outside", "texts/deep/deep/secret.txt"),
        ("link.txt", "texts/../../outside/secret.txt", ["texts/a.txt", "link.txt"]),
        ("gone.txt", "../outside/not-there.txt", "gone.txt"),
    ],
)
def test_a_link_does_not_lead_out(name: str, to: str, files: object, folder: Path) -> None:
    linked(folder, name, to)
    with pytest.raises(UserError, match=OUTSIDE):
        read(text(files))


def test_an_absolute_link_and_a_link_to_a_link_do_not_either(folder: Path) -> None:
    linked(folder, "one.txt", str(folder.parent / "outside" / "secret.txt"))
    linked(folder, "two.txt", "one.txt")
    for name in ("one.txt", "two.txt"):
        with pytest.raises(UserError, match=OUTSIDE):
            read(text(name))


def test_a_folder_whose_name_begins_alike_is_another(folder: Path) -> None:
    (folder.parent / "real-data-more").mkdir()
    (folder.parent / "real-data-more" / "x.txt").write_text("secret " * 50)
    linked(folder, "x.txt", "../real-data-more/x.txt")
    with pytest.raises(UserError, match=OUTSIDE):
        read(text("x.txt"))


@pytest.mark.parametrize("files", ["texts/a.txt", "b.txt", "within/*.txt", "round/texts/a.txt", "./texts/a.txt"])
def test_links_within_the_folder_are_the_owners_business(files: str, folder: Path) -> None:
    linked(folder, "b.txt", "texts/a.txt")
    linked(folder, "within", "texts")
    linked(folder, "round", str(folder))  # by the link to the folder itself
    assert read(text(files)) == (50 * len("within ") - 1) // 8


def test_other_kinds_are_confined_too(folder: Path) -> None:
    linked(folder, "x.npz", "../outside/secret.npz")
    linked(folder, "pairs.jsonl", "../outside/secret.txt")
    linked(folder, "texts/tokenizer/vocabulary", "../../../outside/secret.txt")
    for spec in (
        DataSpec(kind="npz", options={"path": "x.npz"}),
        DataSpec(kind="npz", options={"path": "texts/a.txt", "heldout_path": "x.npz"}),
        DataSpec(kind="pairs", options={"path": "pairs.jsonl"}),
        DataSpec(kind="text", options={"files": "texts/a.txt", "tokenizer": "texts/tokenizer"}),
        DataSpec(kind="disk", options={"path": "texts"}),
        DataSpec(kind="unheard-of", options={"where": {"deep": ["x.npz"]}}),
    ):
        with pytest.raises(UserError, match=OUTSIDE):
            read(spec)


def test_pythons_library_may_be_read_from_any_folder(folder: Path) -> None:
    options = {"files": "stdlib", "sequence_length": 64, "max_bytes": 5000, "holdout": 0}
    assert read(DataSpec(kind="text", options=options)) > 0


def test_what_is_put_under_a_name_after_it_was_looked_at_is_not_read(folder: Path) -> None:
    swaps: list[Callable[[], None]] = [
        lambda: (folder / "texts" / "a.txt").unlink(),
        lambda: linked(folder, "texts/a.txt", "../../outside/secret.txt"),
    ]
    with confined_to(folder):
        check_pattern_within("texts/*.txt")
        dataset = load_dataset(text("texts/a.txt"), "train")
        for swap in swaps:
            swap()
        with pytest.raises(UserError, match=OUTSIDE):
            len(dataset)


def test_a_directory_is_refused_for_a_link_anywhere_below_it(folder: Path) -> None:
    linked(folder, "sets/one/part.arrow", "../../../outside/secret.npz")
    linked(folder, "sets/loop", "..")
    with confined_to(folder):
        check_within("texts")
        for name in ("sets", "sets/one"):
            with pytest.raises(UserError, match=OUTSIDE):
                check_within(name)


def test_nothing_is_confined_elsewhere(folder: Path) -> None:
    linked(folder, "link.txt", "../outside/secret.txt")
    with confined_to(folder), confined_to(folder.parent), open_file("link.txt") as file:
        assert file.read(6) == b"secret"
    with open_file("link.txt") as file:
        assert file.read(6) == b"secret"
    check_within(os.fspath(folder / "link.txt"))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for pipe in (tmp_path / "outside", own / "inside"):
        os.mkfifo(pipe)
        with confined_to(own), pytest.raises(UserError, match=r"leads out of|is no file"):
            open_file(pipe)
    with pytest.raises(UserError, match="is no file"):
        open_file(own / "inside")
    with pytest.raises(IsADirectoryError):
        open_file(own)
