"""Processes that device processes are forked from, kept from test to test: each imports torch for three seconds.

A run's launcher gets one for itself, as new: it has computed nothing. Only how such a process ends with its launcher is
not seen this way: tests of that in `tests/runtime/test_device_processes.py` do without, and all of commands in
processes of their own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

from isthmus.runtime.processes.fork_server import ForkServer

KEPT = 4
"""At most so many that nobody uses: each takes some 200 MB."""

_Key = tuple[tuple[str, ...], str, frozenset[tuple[str, str]]]

_idle: list[tuple[_Key, KeptForkServer]] = []
_lock = threading.Lock()


class KeptForkServer(ForkServer):
    """Does not end with its launcher if all of its children have."""

    def __init__(self, key: _Key, command: Sequence[str], environment: Mapping[str, str], log: int | None) -> None:
        super().__init__(command, environment, log)
        self._key = key

    def end(self) -> None:
        if self.gone or not self.all_ended:
            super().end()
            return
        with _lock:
            _idle.append((self._key, self))
            surplus = _idle.pop(0)[1] if len(_idle) > KEPT else None
        if surplus is not None:
            ForkServer.end(surplus)


def end_all() -> None:
    with _lock:
        idle, _idle[:] = list(_idle), []
    for _, fork_server in idle:
        ForkServer.end(fork_server)


def kept_fork_server(command: Sequence[str], environment: Mapping[str, str], log: int | None) -> ForkServer:
    """In place of `ForkServer`: one that was begun in the same folder with the same environment, or a new one."""
    environment_items = frozenset((k, v) for k, v in environment.items() if k != "PYTEST_CURRENT_TEST")
    key = (tuple(command), os.getcwd(), environment_items)
    with _lock:
        found = next((entry for entry in _idle if entry[0] == key), None)
        if found is not None:
            _idle.remove(found)
    if found is not None and not found[1].gone:
        return found[1]
    return KeptForkServer(key, command, environment, log)
