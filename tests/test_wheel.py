"""The wheel has all that is in `src/isthmus` and `examples`: commands need no checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_wheel_has_every_file_of_the_package_and_the_examples_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        found = {name for name in packed.namelist() if ".dist-info/" not in name}
        about = {Path(name).name for name in packed.namelist() if ".dist-info/" in name}
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/isthmus", "examples"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    expected = {name.removeprefix("src/") if name.startswith("src/") else f"isthmus/{name}" for name in files}
    assert found == expected
    assert {"METADATA", "entry_points.txt", "LICENSE"} <= about
