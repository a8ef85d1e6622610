"""What benchmarks and examples import exists: no other test starts all of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "benchmarks/*.py", "examples/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
]
OWN = {script.stem: script for script in SCRIPTS} | {script.parent.name: script for script in SCRIPTS}
"""Modules by name: a benchmark imports others of its folder, and a few of a folder beside it or of the tests."""
OWN |= {module.stem: module for module in (ROOT / "tests" / "training").glob("*.py")}
PEERS = {"flwr", "torchft", "torchvision", "diloco", "hivemind", "pfl"}
"""Libraries that a benchmark compares with and installs for itself."""


def imported(script: Path) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            yield node


@pytest.mark.parametrize("folder", sorted({str(script.parent.relative_to(ROOT)) for script in SCRIPTS}))
def test_imported_names_exist(folder: str) -> None:
    missing: list[str] = []
    for script in (ROOT / folder).glob("*.py"):
        for node in imported(script):
            assert node.module is not None
            top = node.module.split(".")[0]
            if top == "isthmus":
                module = importlib.import_module(node.module)
                missing += [f"{script}: {node.module}.{n.name}" for n in node.names if not hasattr(module, n.name)]
            elif top not in OWN and top not in PEERS and importlib.util.find_spec(top) is None:
                missing.append(f"{script}: {node.module}")
    assert not missing, missing
