"""Run the command line: in this process, or in one of its own where it is to be killed."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from PIL import Image

from isthmus.cli import main
from tests.interpreters import processes

COMMAND = [sys.executable, "-m", "isthmus"]
DEVICE_TITLE = "isthmus device "

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


class Done(NamedTuple):
    code: int
    out: str
    err: str


def write_job(folder: Path, *, steps: int = 12, fleet: str = "laptop", planner: str = "even") -> Path:
    path = folder / "job.toml"
    path.write_text(JOB.format(folder=folder / "runs", steps=steps, fleet=fleet, planner=planner))
    return path


def edited(path: Path, *changes: tuple[str, str]) -> Path:
    """The job file with texts replaced; each must be there."""
    text = path.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path.write_text(text)
    return path


def isthmus(*arguments: str | Path, draws: bool = False) -> Done:
    """The command in this process: device processes are real all the same. Pictures that nobody asks for have one
    pixel: to render them takes as long as a short run."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    rendered = draws or "--picture" in arguments
    with (
        contextlib.nullcontext() if rendered else mock.patch("matplotlib.figure.Figure.savefig", _save_pixel),
        mock.patch.object(sys, "argv", ["isthmus", *map(str, arguments)]),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.dict(os.environ, {"NO_COLOR": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as e:
            code = e.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def _save_pixel(figure: object, path: Path, **options: object) -> None:
    Image.new("L", (1, 1)).save(path)


def refused(done: Done, code: int, *words: str) -> None:
    """The command ended with one line that says why."""
    assert done.code == code, done
    assert "Traceback" not in done.err
    (line,) = [x for x in done.err.splitlines() if x.startswith("error:")]
    for word in words:
        assert word in line, line


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """The command in a process group of its own: that of the coordinator alone, as devices have theirs."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    )


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen[str] | None = None, *, within_s: float = 300
) -> None:
    """Wait for something that a command does."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def interrupt(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def devices_of(pid: int) -> dict[str, int]:
    """Device name -> pid, of the device processes that a process has started: they are forked from a child of its."""
    found = processes()
    grandparents = {one: found[process.parent].parent for one, process in found.items() if process.parent in found}
    devices = {one: process.title for one, process in found.items() if process.title.startswith(DEVICE_TITLE)}
    return {title.removeprefix(DEVICE_TITLE): one for one, title in devices.items() if grandparents.get(one) == pid}


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
