"""Audits while a run works: a share of its steps computed again, by a process of lowest priority on this machine."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

NICE = 19


def audit_command(run: Path, step: int) -> list[str]:
    return ["nice", "-n", f"{NICE}", sys.executable, "-m", "isthmus", "audit", str(run), "--step", f"{step}"]


class BackgroundAudits:
    """A context manager: on leaving, an audit that is at work is ended.

    At each checkpoint it is drawn whether the steps since the one before are audited. No device knows before it has
    reported them. One audit works at a time: those that are drawn meanwhile are left out.
    """

    def __init__(self, run: Path, share: float, note: Callable[[str], None]) -> None:
        """`note` gets what an audit found, in a thread of its own."""
        self._run = run
        self._share = share
        self._note = note
        self._ending = False
        self._process: subprocess.Popen[str] | None = None
        self.working: threading.Thread | None = None
        """Of the newest audit; it ends with it."""

    def __enter__(self) -> BackgroundAudits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending = True
        if self._process is not None and self.working is not None:
            # It removes its temporary folder. No Ctrl-C: who is started in the background inherits that it is ignored.
            self._process.terminate()
            self.working.join()

    def saved(self, step: int) -> None:
        """A checkpoint of the run is there."""
        busy = self.working is not None and self.working.is_alive()
        if busy or secrets.randbelow(1 << 32) >= self._share * (1 << 32):
            return
        self._process = process = subprocess.Popen(
            audit_command(self._run, step),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.working = threading.Thread(target=self._report, args=(process,), name="audit", daemon=True)
        self.working.start()

    def _report(self, process: subprocess.Popen[str]) -> None:
        said, _ = process.communicate()
        for line in () if self._ending else said.splitlines():
            self._note(f"audit: {line.removeprefix('error: ')}")
