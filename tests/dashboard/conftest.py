from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.folders import recorded_run


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The folder of a run that was recorded."""
    return recorded_run(tmp_path / "runs" / "recorded")
