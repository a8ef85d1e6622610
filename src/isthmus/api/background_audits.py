"""Audits while a run works: a share of its steps computed again, on idle devices of its fleet or on this machine."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from isthmus.api.audit import Audited
from isthmus.errors import Interrupted, IsthmusError
from isthmus.runtime.processes.signals import Stop

NICE = 19
AuditElsewhere = Callable[[int, Callable[[str], None], Stop], Audited]
"""Audits a step, with a function for notes, until it is to stop. Raises IsthmusError where that cannot be."""


def audit_command(run: Path, step: int) -> list[str]:
    return ["nice", "-n", f"{NICE}", sys.executable, "-m", "isthmus", "audit", str(run), "--step", f"{step}"]


class BackgroundAudits:
    """A context manager: on leaving, an audit that is at work is ended.

    At each checkpoint it is drawn whether the steps since the one before are audited. No device knows before it has
    reported them. One audit works at a time: those that are drawn meanwhile are left out.
    """

    def __init__(
        self, run: Path, share: float, note: Callable[[str], None], elsewhere: AuditElsewhere | None = None
    ) -> None:
        """`note` gets what an audit found, in a thread of its own. Where an audit `elsewhere` cannot be, or finds
        something, a process of lowest priority audits here: an idle device may be the one that computes wrong."""
        self._run = run
        self._share = share
        self._note = note
        self._elsewhere = elsewhere
        self._stop = Stop()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.working: threading.Thread | None = None  # the thread of the newest audit; it ends with it

    def __enter__(self) -> BackgroundAudits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._starting:
            self._stop.request()
            if self._process is not None:
                # It removes its temporary folder. No Ctrl-C: who is started in the background inherits that it is
                # ignored.
                self._process.terminate()
        if self.working is not None:
            self.working.join()

    def saved(self, step: int) -> None:
        busy = self.working is not None and self.working.is_alive()
        if busy or secrets.randbelow(1 << 32) >= self._share * (1 << 32):
            return
        self.working = threading.Thread(target=self._audit, args=(step,), name="audit", daemon=True)
        self.working.start()

    def _audit(self, step: int) -> None:
        if not self._holds_elsewhere(step):
            self._audit_here(step)

    def _holds_elsewhere(self, step: int) -> bool:
        if self._elsewhere is None:
            return False
        try:
            found = self._elsewhere(step, self._tell, self._stop)
        except Interrupted:
            return False
        except IsthmusError as e:
            self._tell(f"{e}: on this machine")
            return False
        for line in found.lines():
            self._tell(line)
        return found.holds

    def _audit_here(self, step: int) -> None:
        with self._starting:
            if self._stop.requested:
                return
            self._process = process = subprocess.Popen(
                audit_command(self._run, step),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        said, _ = process.communicate()
        for line in said.splitlines():
            self._tell(line)

    def _tell(self, line: str) -> None:
        if not self._stop.requested:
            self._note(f"audit: {line.removeprefix('error: ').removeprefix('audit: ')}")
