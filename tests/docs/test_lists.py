"""Pages that list planners, algorithms and codecs list each of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from isthmus.cost.compression import ratio_planner_names
from isthmus.federated.algorithms import algorithm_names
from isthmus.federated.robust import Aggregation
from isthmus.planners import planner_names
from isthmus.plans.packing import CODECS

DOCS = Path(__file__).parents[2] / "docs"
LISTS = {
    "planners.md": [*planner_names(), *ratio_planner_names()],
    "compression.md": [*CODECS, *ratio_planner_names()],
    "federated.md": algorithm_names(),
    "correctness.md": [*algorithm_names(), *get_args(get_type_hints(Aggregation)["rule"])],
}


@pytest.mark.parametrize("page", LISTS)
def test_a_page_names_all(page: str) -> None:
    quoted = re.findall(r"`([^`\n]+)`", (DOCS / page).read_text(encoding="utf-8"))
    named = {word for text in quoted for word in text.split()}
    missing = sorted(set(LISTS[page]) - named)
    assert not missing, f"docs/{page} does not name {missing}"


def test_every_page_of_a_planner_is_linked_and_in_the_menu() -> None:
    listed, menu = (path.read_text(encoding="utf-8") for path in (DOCS / "planners.md", DOCS.parent / "mkdocs.yml"))
    for page in sorted(path.name for path in (DOCS / "planners").glob("*.md")):
        assert f"(planners/{page})" in listed
        assert f"- planners/{page}\n" in menu


OURS = {"dev", "docs", "browser"}
"""Extras of those who change Isthmus."""


def test_the_table_of_extras_names_each() -> None:
    page = (DOCS / "start/install.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == {
        *project["optional-dependencies"]
    } - OURS
