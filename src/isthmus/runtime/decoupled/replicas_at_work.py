"""A run's replicas as the merger sees them: devices that train alone, and pipelines, which threads of this process
coordinate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from isthmus.errors import FleetTooSmall, Interrupted, PeerError
from isthmus.runtime.coordinator.backend import DevicesAtWork
from isthmus.runtime.decoupled.groups import Groups
from isthmus.runtime.processes.signals import ComputeThreads, Stop
from isthmus.session.failures import reason_and_fault

END_S = 10.0  # for a pipeline to end its run by itself


class ReplicasAtWork(DevicesAtWork):
    """A pipeline works while its thread runs, and could work if one of its devices is free. A context manager: on
    leaving, pipelines that still run are stopped."""

    def __init__(
        self, devices: DevicesAtWork, groups: Groups, begin: Callable[[str], Callable[[], None]], stop: Stop
    ) -> None:
        """`begin` returns what the thread of a pipeline is to do. `stop` ends what pipelines wait for."""
        self._devices, self._begin, self._stop = devices, begin, stop
        self._groups = {name: devices for name, devices in groups.items() if len(devices) > 1}
        self._alone = groups.keys() - self._groups.keys()
        self._threads = ComputeThreads()
        self._running: dict[str, threading.Thread] = {}
        self._ended: dict[str, str] = {}
        self._over: set[str] = set()  # pipelines that cannot work, however often they are called

    def ended(self) -> Mapping[str, str]:
        return {**self._devices.ended(), **self._ended}

    def starting(self, device: str) -> bool:
        return self._runs(device) if device in self._groups else self._devices.starting(device)

    def offers(self) -> Collection[str]:
        free = frozenset(self._devices.offers())
        waiting = (name for name in self._groups.keys() - self._over if not self._runs(name))
        return (free & self._alone) | {name for name in waiting if free.intersection(self._groups[name])}

    def leaving(self) -> Collection[str]:
        return self._devices.leaving()

    def call(self, device: str) -> None:
        if device not in self._groups:
            self._devices.call(device)
        elif not self._runs(device):
            self._ended.pop(device, None)
            act = partial(self._serve, device, self._begin(device))
            self._running[device] = self._threads.start(act, f"replica {device}")

    def _runs(self, pipeline: str) -> bool:
        return pipeline in self._running and self._running[pipeline].is_alive()

    def _serve(self, pipeline: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Interrupted:
            pass  # the merger has ended the run
        except Exception as e:  # the merger decides what follows
            if not isinstance(e, PeerError | FleetTooSmall):
                self._over.add(pipeline)
            self._ended[pipeline] = reason_and_fault(e)[0]

    def __enter__(self) -> ReplicasAtWork:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.request()
        until_s = time.monotonic() + END_S
        for thread in self._running.values():
            thread.join(max(0.0, until_s - time.monotonic()))
        self._threads.end()
