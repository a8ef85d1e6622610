"""Run the command line in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

COMMAND = [sys.executable, "-m", "isthmus.cli"]

JOB = """
name = "small"
fleet = "{fleet}"
run_dir = "{folder}"
planner = "{planner}"

[model]
name = "gpt"
options = {{vocab_size = 256, sequence_length = 16, width = 16, layers = 2, heads = 2}}

[data]
kind = "text"
options = {{files = "stdlib", sequence_length = 16, max_bytes = 40000}}

[training]
steps = {steps}
batch_size = 8
micro_batches = 4
clip_norm = 1.0
eval_every = 5
eval_samples = 8
save_every = 3
keep_checkpoints = 3

[learning_rate]
schedule = "cosine"
warmup_steps = 3
"""


def write_job(folder: Path, *, steps: int = 12, fleet: str = "laptop", planner: str = "even") -> Path:
    path = folder / "job.toml"
    path.write_text(JOB.format(folder=folder / "runs", steps=steps, fleet=fleet, planner=planner))
    return path


def isthmus(*arguments: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, env=environment
    )


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """In a process group of its own, so that the whole run can be killed at once."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_until(condition: Callable[[], bool], patience_s: float = 90) -> None:
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def kill_all(process: subprocess.Popen[str]) -> None:
    """kill -9 for the whole run: coordinator and devices."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
