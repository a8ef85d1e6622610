"""Devices in threads of this process, which outlive their coordinator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from isthmus.runtime.coordinator.backend import DevicesAtWork, LocalBackend, RunRequest
from isthmus.runtime.device.device import DeviceWorker
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.transport.acceptor import Acceptor
from isthmus.runtime.transport.listener import Listener


class Crash(Exception):
    """The coordinator ends at once."""


class _Working(DevicesAtWork):
    def starting(self, device: str) -> bool:
        return True


class Crew(LocalBackend, frozen=True, kw_only=True):
    port: int
    """That of every coordinator."""
    threads: list[threading.Thread]

    @property
    def survives_coordinator(self) -> bool:
        return True

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[DevicesAtWork]:
        listener = Listener(self.host, self.port, timeout_s=call.timeout_s)
        listener.start(acceptor.on_connection)

        def work(device: str) -> None:
            DeviceWorker((self.host, self.port), Endpoint(device=device), call.run, call.timeout_s).work()

        for device in call.devices:
            self.threads.append(threading.Thread(target=work, args=(device,), daemon=True))
            self.threads[-1].start()
        try:
            yield _Working()
            for thread in self.threads:
                thread.join(60)
                assert not thread.is_alive()
        finally:
            listener.close()
