"""docs/dependencies.md has every dependency, with its extra."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip("` ") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    listed = {library: extra for libraries, _, extra in rows for library in libraries.split(", ")}
    for extra, libraries in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for library in libraries:
            name = re.split(r"[^\w-]", library)[0]
            found = [where for text, where in listed.items() if text.split(" (")[0] == name]
            assert found == [extra], (name, extra)
