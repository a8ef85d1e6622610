"""Heartbeats: a party with nothing else to say sends them, so that the other side does not take it for lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from isthmus.runtime.messages.run import Heartbeat

PER_TIMEOUT = 4
"""Heartbeats in the time after which a silent party is lost."""


class HeartbeatReceiver(Protocol):
    """`SendLane` and `MessageSender` are."""

    def put(self, message: Heartbeat, /) -> None: ...


def start_heartbeats(
    run: str, timeout_s: float, over: threading.Event, receivers: Callable[[], Iterable[HeartbeatReceiver]]
) -> None:
    """Send heartbeats of the run to `receivers()` until `over` is set, from a thread: a callback or a slow disk may
    hold up the caller for long. `receivers` is called in that thread."""
    heartbeat = Heartbeat(run=run)

    def send() -> None:
        while not over.wait(timeout_s / PER_TIMEOUT):
            for sender in receivers():
                sender.put(heartbeat)

    threading.Thread(target=send, name="heartbeat", daemon=True).start()
