"""Heartbeats go to all receivers of the moment, until the event is set."""

from __future__ import annotations

import queue
import threading

from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.transport.message_sender import start_heartbeats


class Received:
    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Heartbeat] = queue.SimpleQueue()

    def put(self, message: Heartbeat) -> None:
        self.messages.put(message)


def test_heartbeats_go_to_the_receivers_of_the_moment() -> None:
    over = threading.Event()
    receivers = {"a": Received()}
    start_heartbeats("run", 0.04, over, lambda: list(receivers.values()))
    try:
        assert receivers["a"].messages.get(timeout=60) == Heartbeat(run="run")
        receivers["b"] = Received()
        assert receivers["b"].messages.get(timeout=60) == Heartbeat(run="run")
    finally:
        over.set()
