"""What pages and examples import, users may import: from a public package, by a name of its `__all__`."""

from __future__ import annotations

import ast
import importlib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.public import PUBLIC_PACKAGES

ROOT = Path(__file__).parents[2]
SNIPPET = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^\s*(?:>>> )?((?:from|import) isthmus.*)$", re.MULTILINE)
OURS = ("isthmus", "isthmus_testing")
PLACES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.ipynb")),
]


def test_there_are_imports() -> None:
    assert sum(1 for path in PLACES for _ in _imports(path)) > 5


@pytest.mark.parametrize(
    "path", [p for p in PLACES if "isthmus" in p.read_text(encoding="utf-8")], ids=lambda p: p.name
)
def test_imports_are_public(path: Path) -> None:
    for package, names in _imports(path):
        assert package in PUBLIC_PACKAGES, f"{path.name}: {package} is no public package"
        exported = importlib.import_module(package).__all__
        assert [name for name in names if name not in exported and f"{package}.{name}" not in PUBLIC_PACKAGES] == []


def _imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Packages of isthmus that Python code of the file imports, and the names from each."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = "\n".join(textwrap.dedent(code) for _, code in SNIPPET.findall(text))
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text)))
    else:  # a snippet need not be a whole program
        nodes = [node for line in IMPORT.findall(text) for node in ast.parse(line).body]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names if alias.name.partition(".")[0] in OURS)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            yield node.module or "", [alias.name for alias in node.names]


def test_the_reference_lists_the_public_packages() -> None:
    page = (ROOT / "docs" / "reference" / "packages.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(isthmus[\w.]*)` \|", page, re.MULTILINE) == list(PUBLIC_PACKAGES)
