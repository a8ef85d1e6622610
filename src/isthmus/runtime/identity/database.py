"""A SQLite file (WAL) that only its owner may read, shared by threads and processes.

Whoever is killed at any point leaves it whole.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Generator
from pathlib import Path

from isthmus.errors import UserError
from isthmus.runtime.identity.files import private_folder

_BUSY_S = 10.0


class Database:
    def __init__(self, path: Path, schema: str) -> None:
        """UserError when the file cannot be opened, or others may look into its folder."""
        private_folder(path.parent)
        self._lock = threading.Lock()
        try:
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.executescript(schema)
        except (OSError, sqlite3.Error) as e:
            raise UserError(f"{path}: cannot be opened: {e}") from None

    def close(self) -> None:
        with self._lock:  # a thread that is inside would take the process down
            self._connection.close()

    @contextlib.contextmanager
    def changing(self) -> Generator[sqlite3.Connection]:
        """All or nothing, and one at a time over all processes."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @contextlib.contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        with self._lock:
            yield self._connection
