"""A SQLite file (WAL) that only its owner may read, shared by threads and processes.

A process that is killed at any point leaves it intact.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Generator
from pathlib import Path

from isthmus.errors import UserError
from isthmus.runtime.identity.files import private_folder

_BUSY_S = 10.0


_FLEET = "CREATE TABLE IF NOT EXISTS fleet (fingerprint BLOB NOT NULL);"
_PASSING = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR)


_REMEDY = "put back a copy of it, or move it away and lose what it held"


class StoreError(UserError):
    """The file cannot be read or written now. `passes`: it may be another time, as when a disk is full."""

    def __init__(self, path: Path, error: sqlite3.Error) -> None:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # what is above says more of it
        self.passes = code in _PASSING
        remedies = {
            sqlite3.SQLITE_FULL: "make room on that disk",
            sqlite3.SQLITE_BUSY: "another process holds it",
            sqlite3.SQLITE_ERROR: "was it made by another version of isthmus? --state chooses another folder",
            sqlite3.SQLITE_CANTOPEN: _REMEDY,
            sqlite3.SQLITE_CORRUPT: _REMEDY,
            sqlite3.SQLITE_NOTADB: _REMEDY,
        }
        super().__init__(f"{path}: {error}{': ' if code in remedies else ''}{remedies.get(code, '')}")


def _make(path: Path) -> None:
    """Never empty, so that an empty one is known to be damaged. OSError, sqlite3.Error."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    new.touch(mode=0o600)
    try:
        with contextlib.closing(sqlite3.connect(new)) as database:
            database.execute("VACUUM")  # writes the header
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.link(new, path)
    finally:
        new.unlink()


class Database:
    def __init__(self, path: Path, schema: str, fleet: bytes = b"") -> None:
        """`fleet`, if not empty, is the fingerprint of the authority that it belongs to from now on. UserError when the
        file cannot be opened, is damaged or another fleet's, or others may look into its folder."""
        private_folder(path.parent)
        self._path = path
        self._lock = threading.Lock()
        try:
            if not path.exists():
                _make(path)
            if path.is_file() and not path.stat().st_size:
                raise UserError(f"{path}: is empty: {_REMEDY}")
            self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            tables = {name for (name,) in self._connection.execute("SELECT name FROM sqlite_master")}
            if tables and "fleet" not in tables:
                raise UserError(f"{path}: is not of isthmus, or of another version: {_REMEDY}")
            self._connection.executescript(schema + _FLEET)
            (damage,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        except OSError as e:
            raise UserError(f"{path}: cannot be opened: {e.strerror or e}") from None
        except sqlite3.Error as e:
            raise StoreError(path, e) from None
        if damage != "ok":
            raise UserError(f"{path}: is damaged ({' '.join(str(damage).split())}): {_REMEDY}")
        if fleet:
            self._belong(fleet)

    def _belong(self, fleet: bytes) -> None:
        with self.changing() as database:
            database.execute("INSERT INTO fleet SELECT ? WHERE NOT EXISTS (SELECT 1 FROM fleet)", (fleet,))
            (found,) = database.execute("SELECT fingerprint FROM fleet").fetchone()
        if found != fleet:
            self.close()
            raise UserError(f"{self._path}: is of another fleet than the authority.pem beside it: {_REMEDY}")

    def close(self) -> None:
        with self._lock:  # a thread that is inside would take the process down
            self._connection.close()

    @contextlib.contextmanager
    def changing(self) -> Generator[sqlite3.Connection]:
        """All or nothing, and one at a time over all processes. StoreError."""
        with self._lock, self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has ended it
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """StoreError."""
        with self._lock, self._explained():
            yield self._connection

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as e:
            raise StoreError(self._path, e) from None
