"""Programs in place of those of a cluster, which note how they were called."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_NOTE = """\
#!{python}
import json, os, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + chr(10))
{body}
"""


class StandIns:
    """Found before all other programs of their names."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, python: str) -> None:
        self._folder, self._python = folder / "programs", python
        self._folder.mkdir()
        patch.setenv("PATH", f"{self._folder}:{os.environ['PATH']}")

    def write(self, name: str, body: str = "") -> None:
        """`body` is Python."""
        path = self._folder / name
        path.write_text(_NOTE.format(python=self._python, calls=str(self._folder / f"{name}.calls"), body=body))
        path.chmod(0o755)

    def say(self, name: str, out: str = "", error: str = "", code: int = 0) -> None:
        """It prints these, and ends with this code."""
        self.write(name, f"sys.stdout.write({out!r})\nsys.stderr.write({error!r})\nsys.exit({code})")

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call."""
        path = self._folder / f"{name}.calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
