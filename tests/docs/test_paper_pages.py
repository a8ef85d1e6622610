"""docs/papers: every figure and table of a paper has a row, and modules, links and commands that a page names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "docs" / "papers"
CONTENTS = {
    "sky-computing": (11, 0),
    "fusionllm": (11, 6),
    "parrot": (11, 5),
    "dt-fm": (7, 2),
    "dreamddp": (16, 2),
}
"""How many figures and tables each paper has."""
TABLES = {
    "Where it is in the code": ["part of the paper", "module"],
    "Results": ["paper", "the paper's result", "here", "command"],
}


def section(paper: str, title: str) -> str:
    text = (PAPERS / f"{paper}.md").read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(paper: str, title: str) -> list[list[str]]:
    """The cells of the section's table, without its heading."""
    lines = [line for line in section(paper, title).splitlines() if line.startswith("|")]
    heading, _, *found = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert heading == TABLES[title]
    return found


def numbers(paper: str, kind: str) -> set[int]:
    """Of the rows that name this kind: `Figure 3`, `Figures 1-4`, `Tables 2, 3`."""
    found: set[int] = set()
    for first, *_ in rows(paper, "Results"):
        if named := re.match(rf"{kind}s? ([\d, -]+)", first):
            for part in named[1].split(","):
                ends = [int(end) for end in part.split("-")]
                found |= set(range(ends[0], ends[-1] + 1))
    return found


def test_every_paper_has_a_page() -> None:
    assert {page.stem for page in PAPERS.glob("*.md")} == {"index", *CONTENTS}


@pytest.mark.parametrize("paper", CONTENTS)
def test_the_method_takes_ten_sentences(paper: str) -> None:
    steps = re.findall(r"^(\d+)\. ", section(paper, "The method"), re.MULTILINE)
    assert [int(step) for step in steps] == list(range(1, 11))


@pytest.mark.parametrize("paper", CONTENTS)
def test_every_figure_and_table_has_a_row(paper: str) -> None:
    figures, tables = CONTENTS[paper]
    assert numbers(paper, "Figure") == set(range(1, figures + 1))
    assert numbers(paper, "Table") == set(range(1, tables + 1))


@pytest.mark.parametrize("title", TABLES)
@pytest.mark.parametrize("paper", CONTENTS)
def test_rows_are_whole(paper: str, title: str) -> None:
    for cells in rows(paper, title):
        assert len(cells) == len(TABLES[title]) and all(cells), cells


@pytest.mark.parametrize("paper", CONTENTS)
def test_named_modules_exist(paper: str) -> None:
    for part, modules in rows(paper, "Where it is in the code"):
        named = re.findall(r"`([^`]+)`", modules)
        assert named, part
        places = (ROOT / "src" / "isthmus", ROOT / "testing" / "src")
        assert [name for name in named if not any((place / name).is_file() for place in places)] == [], part


@pytest.mark.parametrize("paper", CONTENTS)
def test_links_lead_somewhere(paper: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)", (PAPERS / f"{paper}.md").read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert local
    assert [target for target in local if not (PAPERS / target).exists()] == []


@pytest.mark.parametrize("paper", CONTENTS)
def test_commands_name_scripts_and_their_options(paper: str) -> None:
    commands = [c for *_, command in rows(paper, "Results") for c in re.findall(r"`(python [^`]+)`", command)]
    assert commands
    for _, callbacks, *rest in map(shlex.split, commands):
        text = (ROOT / callbacks).read_text(encoding="utf-8")
        assert [word for word in rest if word.startswith("--") and f'"{word}"' not in text] == [], callbacks
