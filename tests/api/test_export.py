"""Exports to places that cannot take them."""

from __future__ import annotations

import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.api.export import export_model
from isthmus.errors import UserError
from tests.generation.runs import finished_run


@contextmanager
def small_files(most_bytes: int) -> Generator[None]:
    """No file may be larger, as on a disk that is full: the system refuses both with an error of the same kind."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_export_to_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run, module = finished_run(tmp_path / "run")
    out = tmp_path / "out"
    with small_files(4096), pytest.raises(UserError, match=rf"^export: {out}: cannot be written: [^\n]+$"):
        export_model(run, out)
    assert not out.exists()
    export_model(run, out)  # the same command, once there is room
    assert (out / "model.safetensors").stat().st_size > 4 * sum(p.numel() for p in module.parameters()) // 2
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError, match=r"file/out: cannot be written: Not a directory"):
        export_model(run, tmp_path / "file" / "out")
