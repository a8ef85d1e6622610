"""Documents, lines and saved files of a run's folder: whole after a process was killed, refused once damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from isthmus.errors import UserError
from isthmus.run_files import LinesFile, keep_job, newest_whole, read_json, write_json


class Point(msgspec.Struct, frozen=True):
    step: int


class Refused(UserError):
    pass


def test_a_document_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    assert read_json(path, Point) is None
    write_json(path, Point(1))
    assert path.read_bytes() == b'{\n "step": 1\n}'
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(Path, "write_bytes", side_effect=full), pytest.raises(OSError, match="No space left"):
        write_json(path, Point(2))
    assert read_json(path, Point) == Point(1) and list(tmp_path.iterdir()) == [path]


def test_what_a_resumed_run_changes_is_said(tmp_path: Path) -> None:
    noted: list[str] = []
    keep_job(tmp_path, {"name": "a", "training": {"rate": 0.1, "epochs": 1}}, noted.append)
    keep_job(tmp_path, {"name": "a", "training": {"rate": 0.1, "epochs": 1}}, noted.append)
    assert noted == []
    keep_job(tmp_path, {"name": "a", "training": {"rate": 0.2, "decay": "cosine"}}, noted.append)
    changed = [
        "training.rate was 0.1, is now 0.2",
        "training.epochs was 1, is now not set",
        "training.decay was not set, is now 'cosine'",
    ]
    assert noted == [f"resumed with another job: {text}" for text in changed]


def test_of_a_list_the_entry_that_changed_is_said(tmp_path: Path) -> None:
    noted: list[str] = []
    adam = {"name": "adamw", "lr": 0.1, "betas": [0.9, 0.99]}
    keep_job(tmp_path, {"optimizer": [{"name": "sgd"}, adam]}, noted.append)
    keep_job(tmp_path, {"optimizer": [{"name": "sgd"}, adam | {"lr": 0.2, "betas": [0.9, 0.95]}]}, noted.append)
    keep_job(tmp_path, {"optimizer": [{"name": "sgd"}]}, noted.append)
    assert noted[:2] == [
        "resumed with another job: optimizer.1.lr was 0.1, is now 0.2",
        "resumed with another job: optimizer.1.betas.1 was 0.99, is now 0.95",
    ]
    assert noted[2].startswith("resumed with another job: optimizer was [{") and len(noted) == 3


@pytest.mark.parametrize("damaged", [b"", b"\xff", b'{"step": "x"}', b"[]", b'{"step": 1'])
def test_a_damaged_document_is_refused_with_its_path_and_the_remedy(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "job.json").write_bytes(damaged)
    with pytest.raises(UserError, match=r"/job.json: cannot be read: .*: start again$"):
        read_json(tmp_path / "job.json", Point, ": start again")


def test_a_document_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{tmp_path}: cannot be read: Is a directory$"):
        read_json(tmp_path, Point)


def test_lines_are_added_and_those_to_be_made_again_forgotten(tmp_path: Path) -> None:
    file, said = LinesFile(tmp_path / "losses.jsonl", Point, "losses"), list[str]()
    assert file.lines() == []
    for step in range(4):
        file.add(Point(step))
    with (tmp_path / "losses.jsonl").open("ab") as half:
        half.write(b'{"ste')
    file.keep_if(lambda point: point.step < 2, said.append)
    assert said == [f"{tmp_path}/losses.jsonl: line 5 is the last one and is not whole: passed over"]
    assert file.lines(said.append) == [Point(0), Point(1)] and len(said) == 1


def test_lines_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    gone = LinesFile(tmp_path / "gone" / "losses.jsonl", Point, "losses")
    for write in (lambda: gone.add(Point(1)), lambda: gone.keep_if(lambda _: True)):
        with pytest.raises(UserError, match=r"^losses .*/gone/losses.jsonl: cannot be written: No such file"):
            write()


def _number(path: Path) -> int:
    """As a reader of saved files: `d` is damaged, `o` of another run."""
    if path.name.startswith("d"):
        raise Refused(f"{path.name}: damaged")
    if path.name.startswith("o"):
        raise UserError(f"{path.name}: another run's")
    return int(path.name)


def test_the_newest_whole_file_is_taken_and_each_newer_one_has_its_reason() -> None:
    said: list[str] = []
    assert newest_whole([], _number, said.append) is None
    assert newest_whole(map(Path, ("d4", "d3", "2", "1")), _number, said.append, Refused) == 2
    assert said == ["d4: damaged", "d3: damaged"]


def test_where_no_file_is_whole_the_newest_says_why() -> None:
    said: list[str] = []
    with pytest.raises(Refused, match=r"^d4: damaged$"):
        newest_whole(map(Path, ("d4", "d3")), _number, said.append, Refused)
    with pytest.raises(UserError, match=r"^o4: another run's$"):
        newest_whole(map(Path, ("o4", "3")), _number, said.append, Refused)
    assert newest_whole(map(Path, ("o4", "3")), _number, said.append) == 3
