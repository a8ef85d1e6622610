"""Every test that a page names exists, and tests/reported_faults.md names one for each fault."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "reported_faults.md"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), FAULTS]
NUMBERS = 47
NAME = re.compile(r"(?P<file>(?:tests/)?(?:\w+/)*test_\w+\.py)|(?P<of>::)?\b(?P<test>test_\w+)(?P<more>\.\.\.)?")


@functools.cache
def known() -> dict[str, list[str]]:
    """Tests by file."""
    return {
        str(path.relative_to(ROOT)): re.findall(
            r"^ *(?:async )?def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }


def named(text: str) -> Iterator[tuple[str, bool]]:
    """Names of files and tests, and whether they are there. `::test_x` is of the file that was named last."""
    files: list[str] = []
    for found in NAME.finditer(text):
        if file := found["file"]:
            files = [path for path in known() if path == file or path.endswith(f"/{file}")]
            yield file, bool(files)
        else:
            name, among = found["test"], files if found["of"] else list(known())
            tests = [test for path in among for test in known()[path]]
            yield name, any(test.startswith(name) for test in tests) if found["more"] else name in tests


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert [name for name, there in named(page.read_text(encoding="utf-8")) if not there] == []


def test_every_fault_has_a_test() -> None:
    parts = re.split(r"^## (\d+)\. ", FAULTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    tested = {int(number) for number, text in zip(parts[1::2], parts[2::2], strict=True) if any(named(text))}
    assert tested == set(range(1, NUMBERS + 1))


def test_what_does_not_exist_is_found() -> None:
    text = "tests/docs/test_named_tests.py::test_named, ::test_what_a_page..., test_layers.py::test_gone, test_gone.py"
    assert [name for name, there in named(text) if not there] == ["test_named", "test_gone", "test_gone.py"]
    assert len(list(named(text))) == 6
