"""`python -m tests.budgets` counts the lines of each package of src and testing, and fails where one has more than its
budget.

The budgets are in the pyproject.toml of each distribution. A feature that does not fit pays by removing something. A
budget that is far above its package is lowered: what was removed does not come back unseen.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLACK = 200
"""Lines that a budget may be above its package."""
DISTRIBUTIONS = {"src": (ROOT, "isthmus"), "testing": (ROOT / "testing", "isthmus_testing")}
"""The folder and the package of each, by what it is called."""
MODULES = "modules"
"""The files beside the packages."""


def counted(source: Path) -> dict[str, int]:
    """Return the lines of Python files by package of the one in this folder."""
    found = {MODULES: _lines(source.glob("*.py"))}
    for package in sorted(path.parent for path in source.glob("*/__init__.py")):
        found[package.name] = _lines(package.rglob("*.py"))
    return found


def faults(lines: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """Return a line for each package that does not keep to its budget."""
    found = [f"{name}: it has no package" for name in budgets if name not in lines]
    for name, count in lines.items():
        if name not in budgets:
            found.append(f"{name}: no budget, {count} lines")
        elif count > budgets[name]:
            found.append(f"{name}: {count} lines, at most {budgets[name]}")
        elif count < budgets[name] - SLACK:
            found.append(f"{name}: {count} lines, lower its budget of {budgets[name]}")
    return found


def _lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


if __name__ == "__main__":
    wrong: list[str] = []
    for distribution, (folder, package) in DISTRIBUTIONS.items():
        table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["isthmus"]["budgets"]
        lines = counted(folder / "src" / package)
        print(f"{sum(lines.values())} lines of {distribution}, budget {sum(table.values())}")
        wrong += faults(lines, table)
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))
