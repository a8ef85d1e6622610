"""A file is replaced whole, or stays as it was."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isthmus.atomic_write import atomic_path, atomic_write


def test_an_error_leaves_the_previous_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state"
    atomic_write(path, b"old")
    with pytest.raises(ZeroDivisionError), atomic_path(path) as new:
        new.write_bytes(b"half of the new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_read_is_never_a_part(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "state"
    contents = [bytes([n]) * 50_000 for n in range(8)]
    atomic_write(path, contents[0])

    def write(data: bytes) -> None:
        for _ in range(10):
            atomic_write(path, data, durable=durable)

    writers = [threading.Thread(target=write, args=(data,)) for data in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in contents
    for writer in writers:
        writer.join()
    assert list(tmp_path.iterdir()) == [path]


def test_modes_are_the_umask_s_or_private_also_of_safetensors(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    atomic_write(tmp_path / "written", b"")
    atomic_write(tmp_path / "private", b"", private=True)
    with atomic_path(tmp_path / "tensors") as new:
        save_file({"x": torch.zeros(1)}, new)
    modes = {
        name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("plain", "written", "private", "tensors")
    }
    assert modes["written"] == modes["tensors"] == modes["plain"]
    assert modes["private"] == 0o600


def test_errors_of_the_file_system_are_raised(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        atomic_write(tmp_path / "folder", b"")
    with pytest.raises(OSError):
        atomic_write(tmp_path / "missing" / "file", b"")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
