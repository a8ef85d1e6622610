"""`make test` leaves two kinds of tests to `make test-long`, which sets ISTHMUS_FAULTS.

- `@pytest.mark.long`: a test that takes long, as of many processes, is skipped.
- `@pytest.mark.thorough`: a test that draws examples draws fewer; it asks `THOROUGH`.

`--part 3/12` runs every twelfth test, beginning with the third. `python -m tests.tiers` prints the part that CI runs
for the commit that is checked out.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("ISTHMUS_FAULTS"))
SKIPPED = pytest.mark.skip(reason="takes long: make test-long runs it")
PARTS = 16
"""CI runs one of so many for each commit."""


def skip_long(items: Sequence[pytest.Item]) -> None:
    if not THOROUGH:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(SKIPPED)


def represented_by(cases: Iterable[Any], *kept: object) -> list[Any]:
    """Return the cases of a test as parameters, all long but those that `make test` keeps."""
    found = list(cases)
    assert all(one in found for one in kept), f"{kept}: not among {found}"
    values = (case if isinstance(case, tuple) else (case,) for case in found)
    return [
        pytest.param(*v, marks=() if case in kept else pytest.mark.long) for case, v in zip(found, values, strict=True)
    ]


def keep_part(part: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove the tests of other parts from `items` and return what was removed. UsageError for what is no part."""
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part: got {part!r}, expected K/N with K from 1 to N, as 3/12")
    chosen = {item.nodeid for item in sorted(items, key=lambda item: item.nodeid)[int(number) - 1 :: int(count)]}
    others = [item for item in items if item.nodeid not in chosen]
    items[:] = [item for item in items if item.nodeid in chosen]
    return others


def part_of_commit(folder: Path) -> str:
    """Return the part for the commit of a checkout: commits take turns. In a shallow clone, which does not know how
    many commits came before, its hash draws the part."""
    shallow = _git(folder, "rev-parse", "--is-shallow-repository") == "true"
    number = int(_git(folder, "rev-parse", "HEAD"), 16) if shallow else int(_git(folder, "rev-list", "--count", "HEAD"))
    return f"{number % PARTS + 1}/{PARTS}"


def _git(folder: Path, *words: str) -> str:
    """Of a checkout that may belong to another user."""
    command = ["git", "-c", "safe.directory=*", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    print(part_of_commit(Path(__file__).parent))
