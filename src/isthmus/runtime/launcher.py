"""Start device processes on this machine, and end them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device process runs: a command in front of it (a namespace, say) and the address it listens on."""

    prefix: tuple[str, ...] = ()
    host: str = "127.0.0.1"


class Launcher:
    """Device processes, by device name. A context manager: on leaving, whatever still runs is ended."""

    def __init__(self, places: Mapping[str, Place], coordinator: str, run: str, patience_s: float, threads: int) -> None:
        """`coordinator` is HOST:PORT as the devices reach it."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        environment = {
            **os.environ, "ISTHMUS_RUN": run, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        }  # fmt: skip
        for device, place in places.items():
            self._processes[device] = subprocess.Popen(
                [
                    *place.prefix, sys.executable, "-m", "isthmus.runtime.device", "--coordinator", coordinator,
                    "--device", device, "--host", place.host, "--patience", str(patience_s),
                ],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment,
            )  # fmt: skip

    def dead(self) -> str | None:
        """A device whose process has ended badly, if there is one."""
        return next((d for d, p in self._processes.items() if p.poll() not in (None, 0)), None)

    def pids(self) -> dict[str, int]:
        return {device: process.pid for device, process in self._processes.items()}

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        _wait(list(self._processes.values()), 5.0, lambda p: p.terminate())
        _wait(list(self._processes.values()), 2.0, lambda p: p.kill())


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], patience_s: float, then: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    """Wait for all together; do `then` to those that outlast the patience."""
    deadline_s = time.monotonic() + patience_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))
        if process.poll() is None:
            then(process)
