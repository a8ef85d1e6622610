"""The output of a cluster's agents in one file, each line after the name of its agent."""

from __future__ import annotations

import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

from isthmus.errors import UserError
from isthmus.runtime.identity.tickets import PREFIX
from isthmus.sanitize import sanitize

LAST_LINES = 20  # lines of an agent that are shown where it fails
MOST_CHARACTERS = 2000
_TICKET = re.compile(PREFIX + r"[\w-]+")


class AgentLog:
    """Any thread may write. A context manager."""

    def __init__(self, path: Path, echo: Callable[[str], None] | None = None) -> None:
        """`echo` is given each line too. UserError if the file cannot be written."""
        self.path = path
        self._echo = echo
        self._lock = threading.Lock()
        self._last: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=LAST_LINES))
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as e:
            raise UserError(f"{path}: cannot be written: {e.strerror or e}") from None

    def write(self, name: str, line: str) -> None:
        line = _TICKET.sub(f"{PREFIX}...", sanitize(line)[:MOST_CHARACTERS])
        with self._lock:
            self._last[name].append(line)
            if not self._file.closed:
                self._file.write(f"{name}: {line}\n")
        if self._echo is not None:
            self._echo(f"{name}: {line}")

    def last(self, name: str) -> list[str]:
        with self._lock:
            return list(self._last[name])

    def __enter__(self) -> AgentLog:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._file.close()
