"""The parts of the suite together are the suite, and commits take turns."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import PARTS, keep_part, part_of_commit, represented_by


@pytest.mark.parametrize("count", [1, 3, 10, 80])
def test_each_test_is_in_one_part(count: int) -> None:
    items: list[Any] = [SimpleNamespace(nodeid=f"test_{n % 23}.py::test_{n}", n=n) for n in range(60)]
    kept: list[int] = []
    for number in range(1, count + 1):
        part: list[Any] = list(items)
        others: list[Any] = keep_part(f"{number}/{count}", part)
        assert sorted(item.n for item in (*part, *others)) == list(range(60))
        assert len(part) in (60 // count, 60 // count + 1)
        assert [item.n for item in part] == sorted(item.n for item in part), "their order stays"
        kept += [item.n for item in part]
    assert sorted(kept) == list(range(60))


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "-1/3", ""])
def test_what_is_no_part_is_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"--part: got .*, expected K/N with K from 1 to N"):
        keep_part(part, [])


def _git(folder: Path, *words: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *author, *words], cwd=folder, capture_output=True, check=True)


def test_commits_take_turns(tmp_path: Path) -> None:
    _git(tmp_path, "init", "here")
    here, shallow = tmp_path / "here", tmp_path / "shallow"
    numbers: list[int] = []
    for _ in range(PARTS + 1):
        _git(here, "commit", "--allow-empty", "--message", "one")
        part = part_of_commit(here)
        assert part == part_of_commit(here)
        numbers.append(int(part.removesuffix(f"/{PARTS}")))
    assert set(numbers) == set(range(1, PARTS + 1))
    assert all(later == before % PARTS + 1 for before, later in itertools.pairwise(numbers))
    _git(tmp_path, "clone", "--depth", "1", here.as_uri(), "shallow")
    part = part_of_commit(shallow)
    assert part == part_of_commit(shallow) and 1 <= int(part.removesuffix(f"/{PARTS}")) <= PARTS


def test_all_cases_are_long_but_those_that_are_kept() -> None:
    found = represented_by({"a": 1, "b": 2}, "b") + represented_by([(1, "x"), (2, "y")], (1, "x"))
    assert [(tuple(case.values), bool(case.marks)) for case in found] == [
        (("a",), True),
        (("b",), False),
        ((1, "x"), False),
        ((2, "y"), True),
    ]
    with pytest.raises(AssertionError, match="'c'"):
        represented_by(["a", "b"], "c")
