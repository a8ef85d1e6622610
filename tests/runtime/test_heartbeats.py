"""Heartbeats go to all receivers of the moment, until the event is set; and how often waiting threads wake up."""

from __future__ import annotations

import queue
import threading

from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.transport.message_sender import SWITCH_S, start_heartbeats, switch_interval_s


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


def test_threads_of_many_connections_do_not_wake_up_more_often_than_those_of_few() -> None:
    assert switch_interval_s(3) == SWITCH_S
    wakes_per_s = [connections / switch_interval_s(connections) for connections in (16, 100, 1000, 10_000)]
    assert max(wakes_per_s) <= 1.01 * wakes_per_s[0]
