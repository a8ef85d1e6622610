"""Sending from any thread: small messages at once, large ones without holding up the sender, heartbeats while there is
nothing else to say."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.transport.channel import MessageChannel
from isthmus.training.layout import TensorHeader, header_of, pack

SWITCH_S = 0.0002  # how long one thread keeps others from running Python: the usual 5 ms are longer than a small round
FEW_CONNECTIONS = 16  # more of them share the processor, so each of their threads waits longer
LARGE_BYTES = 1 << 20
"""From here on a message is sent in a thread of its own. A thread costs as much as a small message."""


def switch_interval_s(connections: int) -> float:
    """`SWITCH_S` for few connections. Each thread that waits to run Python wakes up once in this time: a thousand that
    woke up every 0.2 ms would leave no time for anything else."""
    return SWITCH_S * max(1.0, connections / FEW_CONNECTIONS)


class MessageSender:
    """A channel's way out. Messages leave in the order in which they are put."""

    def __init__(self, channel: MessageChannel, on_error: Callable[[PeerError], None]) -> None:
        """`on_error` receives the error of a message that could not be sent, in the sending thread."""
        self._channel = channel
        self._on_error = on_error
        self._sending = threading.Lock()

    def put(self, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        """Tensors are sent from where they are: large ones must not change until `flush`."""
        payload = [pack(t) for t in tensors]
        self._sending.acquire()
        if sum(p.nbytes for p in payload) < LARGE_BYTES:
            self._send(message, payload)
        else:
            threading.Thread(target=self._send, args=(message, payload), name="post", daemon=True).start()

    def _send(self, message: AnyMessage, payload: Sequence[memoryview]) -> None:
        """The caller holds the lock."""
        try:
            self._channel.send(message, payload)
        except PeerError as e:
            self._on_error(e)
        finally:
            self._sending.release()

    def close(self, flush_s: float = 0.0) -> None:
        """Wait for what was put, but no longer than this. Nothing ends: a message that is put later is sent too."""
        if self._sending.acquire(timeout=flush_s):
            self._sending.release()

    def flush(self) -> None:
        """Until everything that was put has left, or failed."""
        with self._sending:
            pass


def headers_of(tensors: Mapping[str, Tensor]) -> tuple[TensorHeader, ...]:
    """The headers of a message that carries the mapping's tensors, in its order."""
    return tuple(header_of(name, t) for name, t in tensors.items())


PER_TIMEOUT = 4  # heartbeats in the time after which a silent party is lost


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


Act = Callable[[], object]


class Outbox:
    """Things to do in the order in which they were put, by whichever thread comes by.

    A thread that decides under a lock puts what may take long, lets go of the lock, and then works it off. No other
    thread has to wake up for that, which would take as long as a small round.
    """

    def __init__(self) -> None:
        self._waiting: deque[Act] = deque()
        self._working = threading.Lock()

    def put(self, act: Act) -> None:
        """Never waits. Any thread, and under any lock."""
        self._waiting.append(act)

    def work(self) -> None:
        """Do what waits. Returns at once where another thread is at it, which then does this too."""
        while self._waiting and self._working.acquire(blocking=False):
            self._work()

    def finish(self) -> None:
        """Do what waits, and wait for another thread that is at it."""
        self._working.acquire()
        self._work()

    def _work(self) -> None:
        """The caller has the lock."""
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._working.release()
