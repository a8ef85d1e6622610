"""A process whose threads train ends as it says, in a real interpreter: torch aborts one that leaves them running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import threading
import torch
from isthmus.runtime.processes.signals import ComputeThreads

begun = threading.Event()

def train():
    weight = torch.randn(200, 200)
    while True:
        try:
            weight = (weight @ weight).clamp(-1, 1)
            begun.set()
        except Exception:
            pass

threads = ComputeThreads()
thread = threads.start(train, "train")
begun.wait()
threads.end()
print(thread.is_alive())
"""


def test_a_thread_that_trains_is_ended_before_the_interpreter() -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
