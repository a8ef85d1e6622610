"""A class name means one thing: it is given once in the package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import isthmus

SOURCE = Path(isthmus.__file__).parent
TEMPLATES = SOURCE / "templates"


def test_public_class_names_are_given_once() -> None:
    found = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        if TEMPLATES not in path.parents  # files for users, of which each is a program of its own
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert sorted(name for name, count in found.items() if count > 1) == []
