"""A copy of a process never goes on where it was forked, whenever a signal comes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.interpreters import script

SCRIPT = """
import os, signal, sys
from pathlib import Path
from isthmus.copies import asked
from isthmus.runtime.processes.forked import Forked
from isthmus.runtime.processes.signals import terminable

fork, parent = os.fork, os.getpid()

def interrupted_fork():
    pid = fork()
    if not pid:  # before the copy has done anything
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    return pid

def forked():
    with Forked({"one": lambda _: None}, Path(sys.argv[1])) as copies:
        copies.begin("nowhere")
        os.waitid(os.P_PID, copies.pids()["one"], os.WEXITED | os.WNOWAIT)
        print(copies.ended())

os.fork = interrupted_fork
try:
    with terminable():
        forked() if sys.argv[2] == "forked" else print(asked(lambda: 7, int))
except BaseException as e:
    print(type(e).__name__)
print("the end", os.getpid() == parent)
"""


@pytest.mark.parametrize(
    ("how", "number", "printed"),
    [
        ("forked", "SIGTERM", "{'one': 'its process was killed by SIGTERM'}"),
        ("forked", "SIGINT", "{}"),
        ("asked", "SIGTERM", "InternalError"),
        ("asked", "SIGINT", "7"),
    ],
)
def test_a_signal_that_comes_at_once_takes_no_copy_on(how: str, number: str, printed: str, tmp_path: Path) -> None:
    command = [*script(SCRIPT, tmp_path), str(tmp_path), how, number]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == [printed, "the end True"], done.stderr
