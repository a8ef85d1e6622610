"""The parts of the suite together are the suite."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import keep_part


@pytest.mark.parametrize("count", [1, 3, 10, 50])
def test_each_file_is_in_one_part(count: int) -> None:
    items: list[Any] = [SimpleNamespace(path=Path(f"test_{n % 23}.py"), n=n) for n in range(60)]
    kept: list[int] = []
    for number in range(1, count + 1):
        part: list[Any] = list(items)
        others = keep_part(f"{number}/{count}", part)
        assert sorted(item.n for item in (*part, *others)) == list(range(60))
        assert not {item.path for item in part} & {item.path for item in others}
        kept += [item.n for item in part]
    assert sorted(kept) == list(range(60))


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "-1/3", ""])
def test_what_is_no_part_is_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"--part: got .*, expected K/N with K from 1 to N"):
        keep_part(part, [])
