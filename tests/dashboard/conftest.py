"""A real run of six devices, recorded: home-1 is killed in step 17, and the run goes on without it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The run's folder."""
    folder = tmp_path / "runs" / "recorded"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(Path(__file__).parent / "recorded.zip") as kept:
        kept.extractall(folder)
    return folder
