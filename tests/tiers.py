"""`make test` leaves two kinds of tests to `make test-faults`, which sets ISTHMUS_FAULTS.

- `@pytest.mark.long`: a test that takes long, as of many processes, is skipped.
- `@pytest.mark.thorough`: a test that draws examples draws fewer; it asks `THOROUGH`.

`--part 3/10` runs the third tenth of the files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

THOROUGH = bool(os.environ.get("ISTHMUS_FAULTS"))
SKIPPED = pytest.mark.skip(reason="takes long: make test-faults runs it")


def skip_long(items: Sequence[pytest.Item]) -> None:
    if not THOROUGH:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(SKIPPED)


def keep_part(part: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove the files of other parts from `items` and return what was removed. UsageError for what is no part."""
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part: got {part!r}, expected K/N with K from 1 to N, as 3/10")
    files = sorted({item.path for item in items})
    kept = set(files[int(number) - 1 :: int(count)])
    others = [item for item in items if item.path not in kept]
    items[:] = [item for item in items if item.path in kept]
    return others
