"""A process for one run of a sweep, from the sweep's side."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from isthmus.job.sweep import SweepEngine
from isthmus.run_files import LOSSES, ROUND_LINES
from isthmus.runtime.processes.children import HALT_S, how_it_ended
from isthmus.runtime.processes.memory_use import family_bytes


class Task(msgspec.Struct, frozen=True, kw_only=True):
    job: str  # path of its file
    folder: str  # the run's
    overrides: dict[str, object]
    resume: bool
    engine: SweepEngine | None = None  # None: this machine


class SweepProcess:
    """`python -m isthmus.api.sweep_run`, which ends with this process even if that is killed: then its standard input
    closes. It has a session of its own: Ctrl-C reaches it by `interrupt` alone."""

    def __init__(self, task: Task, log: Path) -> None:
        self.task = task
        self.peak_bytes = 0
        self._log = log
        with log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "isthmus.api.sweep_run"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        assert self._process.stdin is not None, "it is a pipe"
        self._stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended: `poll` tells
            self._stdin.write(msgspec.json.encode(task) + b"\n")
            self._stdin.flush()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def memory(self) -> int:
        """Bytes that it and its processes use now."""
        now = family_bytes(self._process.pid)
        self.peak_bytes = max(self.peak_bytes, now)
        return now

    @property
    def trains(self) -> bool:
        """Return whether its first step or round is done: by then it has taken most of its memory."""
        folder = Path(self.task.folder)
        return any(path.is_file() and path.stat().st_size for path in (folder / LOSSES, folder / ROUND_LINES))

    def interrupt(self) -> None:
        """It saves what it has, and ends."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """At once, where it still runs."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(HALT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def reason(self, code: int) -> str:
        """Return why it failed: its last line that says so, or how it ended."""
        with self._log.open("rb") as log:
            log.seek(self._start)
            lines = log.read().decode(errors="replace").splitlines()
        said = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
        return said[-1] if said else how_it_ended(code, self._log)
