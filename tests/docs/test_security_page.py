"""docs/security.md: every threat has a defence, and a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADING = ["asset", "threat", "defence", "test"]


def threats() -> list[list[str]]:
    """The cells of every row of the page's tables of threats."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    tables = page.partition("\n## Threats\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in tables.splitlines() if line[:2] == "| "
    ]
    return [row for row in rows if row != HEADING]


def test_every_row_is_whole() -> None:
    assert threats()
    assert [row for row in threats() if len(row) != len(HEADING) or not all(row)] == []


def test_every_row_names_a_test_that_exists() -> None:
    for *_, cell in threats():
        named = re.findall(r"`([\w/]+\.py)`((?:[:,] `test_\w+`)*)", cell)
        assert named, cell
        for file, functions in named:
            path = ROOT / file if "/" in file else ROOT / "tests" / "fleet_service" / file
            assert path.is_file(), file
            assert functions, f"{file}: which test?"
            for function in re.findall(r"test_\w+", functions):
                assert f"\ndef {function}(" in path.read_text(encoding="utf-8"), (file, function)
