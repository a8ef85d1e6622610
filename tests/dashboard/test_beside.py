"""The page beside a run: a process that comes and goes with it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from isthmus.api import page
from isthmus.api.page import page_beside
from isthmus.errors import UserError
from isthmus.listening import listening_socket
from tests.interpreters import processes, script

RUN = """
import sys, time
from pathlib import Path
from isthmus.api import page
page.PORT = 0
with page.page_beside(Path(sys.argv[1]), lambda note: print(note, flush=True)):
    time.sleep(600)
"""


def _runs(address: str) -> list[dict[str, object]]:
    """It listens at once, and answers once it has begun."""
    with urllib.request.urlopen(f"{address}api/runs", timeout=60) as answer:
        found: list[dict[str, object]] = json.loads(answer.read())["runs"]
        return found


@pytest.mark.long
def test_a_page_shows_the_run_and_ends_with_it(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        monkeypatch.setattr(page, "PORT", taken.getsockname()[1])
        notes: list[str] = []
        with page_beside(recorded, notes.append):
            (note,) = notes
            address = note.removeprefix("dashboard: ")
            assert address != f"http://127.0.0.1:{taken.getsockname()[1]}/", "another page is there"
            assert [run["state"] for run in _runs(address)] == ["done"]
        with pytest.raises(urllib.error.URLError):
            _runs(address)


def test_a_run_that_is_killed_takes_its_page_along(recorded: Path, tmp_path: Path) -> None:
    run = subprocess.Popen([*script(RUN, tmp_path), str(recorded)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    try:
        address = run.stdout.readline().strip().removeprefix("dashboard: ")
        assert _runs(address)
    finally:
        run.kill()
        run.communicate()
    with pytest.raises(OSError):
        while True:
            _runs(address)


def test_a_page_that_is_killed_does_not_disturb_the_run(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PORT", 0)
    notes: list[str] = []
    with page_beside(recorded, notes.append):
        for pid, process in processes().items():
            if process.parent == os.getpid() and "isthmus.dashboard" in process.title:
                os.kill(pid, signal.SIGKILL)
    assert len(notes) == 1


def test_no_page_where_none_is_asked_for() -> None:
    with page_beside(None, lambda note: pytest.fail(note)):
        pass


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "uvicorn" else importlib.util.find_spec(name))
    with pytest.raises(UserError, match=r"uvicorn: pip install '.\[dashboard\]'"), page_beside(tmp_path, print):
        pass
