"""ARCHITECTURE.md lists every folder of both distributions in one line, and gives every package a layer; its files
exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "isthmus"
TREES = ("src/isthmus", "testing/src/isthmus_testing")
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
WORDS = 10


def listed(root: str) -> dict[str, str]:
    """What the page says of each folder, by its path in the root, in its order."""
    tree = PAGE.partition(f"```\n{root}/\n")[2].partition("```")[0]
    found: dict[str, str] = {}
    package = ""
    for line in tree.splitlines():
        name, text = line.strip().split(maxsplit=1)
        if line.startswith("    "):
            name = package + name
        else:
            package = name
        found[name.rstrip("/")] = text
    return found


@pytest.mark.parametrize("root", TREES)
def test_every_folder_is_listed(root: str) -> None:
    there = sorted(
        path.relative_to(ROOT / root).as_posix()
        for path in (ROOT / root).rglob("*")
        if path.is_dir() and any(file.is_file() and file.suffix != ".pyc" for file in path.iterdir())
    )
    assert list(listed(root)) == there


@pytest.mark.parametrize("root", TREES)
def test_a_folder_takes_one_short_line(root: str) -> None:
    assert {folder: text for folder, text in listed(root).items() if len(text.split()) > WORDS} == {}


def test_every_package_has_a_layer() -> None:
    table = PAGE.partition("| layer |")[2].partition("\n\n")[0]
    packages = {folder for folder in listed("src/isthmus") if "/" not in folder} - {"templates"}
    assert set(re.findall(r"`(\w+)`", table)) == packages


@pytest.mark.parametrize("file", re.findall(r"`((?!src)[\w/]+\.py)`", PAGE))
def test_named_files_exist(file: str) -> None:
    assert (SOURCES / file).is_file()
