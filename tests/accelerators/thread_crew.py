"""A run whose devices are threads of this process: what a test changes and counts, they change and count."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping
from unittest import mock

from isthmus.runtime.conducting.crew import Call, LocalCrew, NoWork, Work
from isthmus.runtime.device import executor
from isthmus.runtime.device.device import Device, Site
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.reception import Reception


class _Threads(NoWork):
    def __init__(self, crew: ThreadCrew, call: Call, coordinator: tuple[str, int]) -> None:
        self._ended: dict[str, str] = {}
        self.threads = {
            name: threading.Thread(target=self._work, args=(crew, call, coordinator, name), daemon=True)
            for name in call.devices
        }

    def _work(self, crew: ThreadCrew, call: Call, coordinator: tuple[str, int], name: str) -> None:
        try:
            site = Site(device=name, accelerator=crew.accelerators[name])
            Device(coordinator, site, call.run, call.patience_s).work()
        except Exception as e:
            self._ended[name] = str(e)

    def ended(self) -> Mapping[str, str]:
        return dict(self._ended)

    def starting(self, device: str) -> bool:
        return self.threads[device].is_alive()


class ThreadCrew(LocalCrew, frozen=True, kw_only=True):
    """A thread for each device."""

    accelerators: Mapping[str, str]
    """Where each computes."""

    @contextlib.contextmanager
    def at_work(self, call: Call, reception: Reception) -> Generator[Work]:
        listener = Listener(self.host, patience_s=call.patience_s)
        listener.start(reception.greet)
        # How a process of one device is tuned is nothing for this one.
        with mock.patch.object(executor, "tune_process", lambda: None):
            work = _Threads(self, call, (self.host, listener.port))
            try:
                for thread in work.threads.values():
                    thread.start()
                yield work
            finally:
                for thread in work.threads.values():
                    thread.join(20)
                listener.close()
