"""The wheel has all that is in `src/isthmus` and `examples`: commands need no checkout. What only tests and benchmarks
need has a wheel of its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("folder", "sources", "about"),
    [
        (".", ("src/isthmus", "examples"), {"METADATA", "entry_points.txt", "LICENSE"}),
        ("testing", ("src/isthmus_testing",), {"METADATA"}),
    ],
)
def test_the_wheel_has_every_file_of_the_package_and_the_examples_and_nothing_else(
    folder: str, sources: tuple[str, ...], about: set[str], tmp_path: Path
) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT / folder, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        found = {name for name in packed.namelist() if ".dist-info/" not in name}
        described = {Path(name).name for name in packed.namelist() if ".dist-info/" in name}
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *sources]
    files = subprocess.run(listed, cwd=ROOT / folder, check=True, capture_output=True, text=True).stdout.splitlines()
    expected = {name.removeprefix("src/") if name.startswith("src/") else f"isthmus/{name}" for name in files}
    assert found == expected
    assert about <= described


def test_both_distributions_are_of_one_version() -> None:
    """Tests import modules of Isthmus that may change without a note."""
    ours, testing = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (".", "testing")
    )
    assert testing["version"] == ours["version"]
    assert testing["dependencies"] == [f"isthmus[train]=={ours['version']}"]
