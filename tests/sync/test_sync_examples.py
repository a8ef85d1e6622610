"""The examples show a change of three lines, and docs/sync.md shows the same; `test_sync_torchrun.py` runs them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from tests.sync.torchrun import ROOT

EXAMPLES = ROOT / "examples" / "torchrun"


def changes() -> list[str]:
    """Lines that the two scripts do not share, after their docstrings, each behind its sign."""
    theirs, ours = ((EXAMPLES / name).read_text().partition('"""\n\n')[2] for name in ("ddp.py", "synced.py"))
    return changed(difflib.ndiff(theirs.splitlines(), ours.splitlines()))


def changed(lines: Iterable[str]) -> list[str]:
    return [f"{line[0]}{line[1:].strip()}" for line in lines if line[:1] in {"+", "-"} and line[1:].strip()]


def test_three_lines_are_changed() -> None:
    assert sum(line.startswith("+") for line in changes()) == 3, changes()


def test_the_page_shows_this_change() -> None:
    page = (ROOT / "docs" / "sync.md").read_text(encoding="utf-8")
    block = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)[0]  # others are of Trainers
    assert sorted(changed(block.splitlines())) == sorted(changes())
    script = (EXAMPLES / "synced.py").read_text()
    kept = [line.strip() for line in block.splitlines() if line.startswith(" ") and line.strip() != "..."]
    assert kept and all(f"{line}\n" in script for line in kept)
