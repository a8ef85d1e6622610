"""`make test` draws the same examples every time, and tries again what `make fuzz` has kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HYPOTHESIS, ALONE = "_hypothesis_pytestplugin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
"""The only plugin of these runs: importing all that are installed takes longer than what they do."""
CONFTEST = """
from pathlib import Path
import pytest
from tests import examples

@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    examples.register(config, Path("kept"))
"""

DRAWS = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=60)
@given(st.integers(), st.floats(), st.text(), st.lists(st.integers(0, 10**6)))
def test_draws(number, real, text, numbers):
    print("drew", number, real, ascii(text), numbers)
"""

FAILS = """
from hypothesis import given, strategies as st

@given(st.integers(0, 10**12))
def test_fails_at_large_numbers(number):
    print("drew", number)
    assert number < 100  # of a hundred draws some are more, whatever the seed
"""


def pytest_run(
    folder: Path, *arguments: str, hash_seed: str = "0", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", HYPOTHESIS, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, ALONE: "1"}
        | environment,
    )


def drew(run: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix(".") for line in run.stdout.splitlines() if "drew" in line]


@pytest.mark.long
def test_every_run_draws_the_same_examples_whatever_else_is_imported(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_draws.py").write_text(DRAWS)
    first = pytest_run(tmp_path)
    assert first.returncode == 0 and len(drew(first)) == 20, first.stdout + first.stderr
    (tmp_path / "test_before.py").write_text("NUMBERS = 424_242, 2.718281, 'isthmus'\ndef test_it(): pass")
    assert drew(pytest_run(tmp_path, hash_seed="1")) == drew(first)
    assert drew(pytest_run(tmp_path, CI="true")) == drew(first)
    fresh = drew(pytest_run(tmp_path, "--hypothesis-profile=fuzz"))
    assert len(fresh) == 60 and fresh[:20] != drew(first)


def test_what_a_search_finds_is_kept_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_fails.py").write_text(FAILS)
    assert pytest_run(tmp_path, "--hypothesis-profile=fuzz").returncode == 1
    kept = sorted(p for p in (tmp_path / "kept").rglob("*") if p.is_file())
    assert kept
    again = pytest_run(tmp_path)
    assert again.returncode == 1 and drew(again)[0] == "drew 100"
    assert sorted(p for p in (tmp_path / "kept").rglob("*") if p.is_file()) == kept, "make test writes nothing"
