"""Logs the lines that agents print into files of a shared file system, as they come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

LOOK_S = 0.5


class LogFiles:
    """A thread that reads the files from their beginnings, also those that are made later."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        self._log = log
        self._files: list[_LogFile] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="log files", daemon=True)
        self._thread.start()

    def follow(self, name: str, path: Path) -> None:
        self._files.append(_LogFile(name, path))

    def close(self) -> None:
        """After the lines that are there. Again is no error."""
        self._stopped.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._give(self._files)
        self._give(self._files)

    def _give(self, files: Collection[_LogFile]) -> None:
        for file in tuple(files):
            for line in file.lines():
                self._log(file.name, line)


class _LogFile:
    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path
        self._read_bytes = 0

    def lines(self) -> list[str]:
        """Those that are whole and were not given before."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:  # not made yet
            return []
        self._read_bytes += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()
