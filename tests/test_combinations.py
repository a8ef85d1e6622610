"""What does not go together: each refusal of the table is made somewhere, and each that is made is in the table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from isthmus.combinations import REFUSALS, WITH, refused

SRC = Path(__file__).parents[1] / "src" / "isthmus"


def made() -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of `refused`, by file."""
    for path in sorted(SRC.rglob("*.py")):
        if path.name != "combinations.py" and "refused(" in (text := path.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refused":
                    yield str(path.relative_to(SRC)), node


def test_what_is_refused_is_in_the_table() -> None:
    for path, call in made():
        what, beside = call.args[:2]
        assert isinstance(beside, ast.Constant) and beside.value in WITH, f"{path}:{call.lineno}"
        names = [node.value for node in ast.walk(what) if isinstance(node, ast.Constant)]
        for name in names:
            assert (name, beside.value) in REFUSALS, f"{path}:{call.lineno}: {name}"


def test_every_refusal_says_what_was_got_what_is_expected_and_why() -> None:
    for (what, beside), row in REFUSALS.items():
        text = str(refused(what, beside, "x"))
        assert text.startswith(f"{row.field}: got x {WITH[beside]}, expected {row.expected}: {row.reason}")
        assert text.endswith("(not built yet)") is not row.built
