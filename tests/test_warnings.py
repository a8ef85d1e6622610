"""Warnings of the package: which line they name, how the command line prints them, and that its end leaves none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from isthmus.data import DataSpec, load_dataset

EARLY = """
import sys
from isthmus.runtime.processes.fork_server import fork_early
fork_early((sys.executable,), {})
"""
SHOWN = """
import sys, warnings
from isthmus.cli.app import main
from isthmus.errors import warn

sys.argv = ["isthmus", "--version"]
try:
    main()
except SystemExit:
    pass
warn("ours")
warnings.warn("another")
"""


def test_a_warning_names_the_callers_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(("the cat sat" * 9).encode("utf-16"))
    with pytest.warns(UserWarning, match="begins as UTF-16 does") as shown:
        spec = DataSpec("text", {"files": str(tmp_path / "a"), "sequence_length": 3, "holdout": 0.0})
        load_dataset(spec, "train").batch(np.arange(1), ["input_ids"])
    assert {one.filename for one in shown} == {__file__}


def test_the_command_line_prints_the_text_alone() -> None:
    """Of a warning of ours; another one has its line, as Python prints it."""
    done = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True)
    first, second, *_ = done.stderr.splitlines()
    assert first == "warning: ours" and second == "<string>:12: UserWarning: another"


def test_a_file_that_a_process_holds_as_long_as_it_lives_is_no_leak(tmp_path: Path) -> None:
    held = "import sys; from pathlib import Path; from isthmus.locking import hold; hold(Path(sys.argv[1]), 'taken')"
    command = [sys.executable, "-W", "always", "-c", held, str(tmp_path / "claim")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_command_that_made_its_fork_server_early_ends_without_a_warning() -> None:
    done = subprocess.run([sys.executable, "-W", "always", "-c", EARLY], capture_output=True, text=True, check=True)
    assert "ResourceWarning" not in done.stderr
