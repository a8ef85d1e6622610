"""The files in examples/deploy name commands and options that exist, and are what their readers take."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from isthmus.cli.app import commands

DEPLOY = Path(__file__).parents[1] / "examples" / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_their_options_exist(path: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    used = re.findall(r"isthmus (join|serve|ticket|drain|devices|submit)\b([^\n`<]*)", text)
    assert used or path.suffix == ".md"
    for command, rest in used:
        known = {option for parameter in commands()[command].params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known, (command, rest)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_units_are_units() -> None:
    units = [path for path in FILES if path.suffix == ".service"]
    told = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=30).stderr
    mine = [line for line in told.splitlines() if "isthmus" in line and "/opt/isthmus/bin/isthmus" not in line]
    assert len(units) == 2 and not mine, mine
