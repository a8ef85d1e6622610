"""A package that grows beyond its budget is named, and so is a budget that is far above its package."""

from __future__ import annotations

import pytest

from .budgets import DISTRIBUTIONS, SLACK, counted, faults


def test_what_does_not_keep_to_its_budget_is_named() -> None:
    assert faults({"a": 10, "b": 10, "c": 10}, {"a": 10, "b": 10 + SLACK, "c": 12}) == []
    assert faults({"a": 11}, {"a": 10}) == ["a: 11 lines, at most 10"]
    assert faults({"a": 10}, {"a": 11 + SLACK}) == [f"a: 10 lines, lower its budget of {11 + SLACK}"]
    assert faults({"a": 1, "new": 5}, {"a": 1, "old": 5}) == ["old: it has no package", "new: no budget, 5 lines"]


@pytest.mark.parametrize(
    ("distribution", "packages"), [("src", {"api", "modules", "runtime", "session"}), ("testing", {"lab", "modules"})]
)
def test_each_line_of_src_is_counted_once(distribution: str, packages: set[str]) -> None:
    folder, package = DISTRIBUTIONS[distribution]
    assert packages <= counted(folder / "src" / package).keys()
