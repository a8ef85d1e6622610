"""A run whose devices are threads of this process: what a test changes and counts, they change and count."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping
from unittest import mock

from isthmus.runtime.coordinator.backend import DevicesAtWork, LocalBackend, RunRequest
from isthmus.runtime.device import stage_runner
from isthmus.runtime.device.device import DeviceWorker
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.transport.acceptor import Acceptor
from isthmus.runtime.transport.listener import Listener


class _Threads(DevicesAtWork):
    def __init__(self, backend: ThreadCrew, call: RunRequest, coordinator: tuple[str, int]) -> None:
        self._ended: dict[str, str] = {}
        self.threads = {
            name: threading.Thread(target=self._work, args=(backend, call, coordinator, name), daemon=True)
            for name in call.devices
        }

    def _work(self, backend: ThreadCrew, call: RunRequest, coordinator: tuple[str, int], name: str) -> None:
        try:
            site = Endpoint(device=name, accelerator=backend.accelerators[name])
            DeviceWorker(coordinator, site, call.run, call.timeout_s).work()
        except Exception as e:
            self._ended[name] = str(e)

    def ended(self) -> Mapping[str, str]:
        return dict(self._ended)

    def starting(self, device: str) -> bool:
        return self.threads[device].is_alive()


class ThreadCrew(LocalBackend, frozen=True, kw_only=True):
    """A thread for each device."""

    accelerators: Mapping[str, str]
    """Where each computes."""

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[DevicesAtWork]:
        listener = Listener(self.host, timeout_s=call.timeout_s)
        listener.start(acceptor.on_connection)
        # How a process of one device is tuned is nothing for this one.
        with mock.patch.object(stage_runner, "tune_process", lambda: None):
            work = _Threads(self, call, (self.host, listener.port))
            try:
                if not call.stop.requested:  # a device that nobody admits any more tries for as long as its timeout
                    for thread in work.threads.values():
                        thread.start()
                yield work
            finally:
                for thread in work.threads.values():
                    if thread.ident is not None:
                        thread.join(60)
                listener.close()
