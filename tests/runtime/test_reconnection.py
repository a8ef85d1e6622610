"""A connection to a coordinator: made again when it breaks, given up, logged, and closed without anything left."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.errors import PeerError, StepError, UserError
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.transport import reconnection
from isthmus.runtime.transport.reconnection import (
    CoordinatorConnection,
    CoordinatorGone,
    OpenConnection,
    Outage,
    Retry,
    direct,
    reporting,
)
from tests.fleet_service.parties import soon

RUN, LIMIT_S = "run", 60.0
HEARTBEAT = Heartbeat(run=RUN)
Found = AnyMessage | PeerError | None


class Channel:
    """To a coordinator that says this, and then hangs up where `then` says so."""

    other = "coordinator"

    def __init__(self, *said: Found) -> None:
        self.said: queue.SimpleQueue[Found] = queue.SimpleQueue()
        for one in said:
            self.said.put(one)
        self.sent: queue.SimpleQueue[AnyMessage] = queue.SimpleQueue()
        self.closed = threading.Event()

    def send(self, message: AnyMessage, payload: Sequence[memoryview] = ()) -> int:
        self.sent.put(message)
        return 0

    def receive(self, guard: object = None, idle_s: float | None = None) -> Any:
        found = self.said.get(timeout=LIMIT_S)
        if isinstance(found, PeerError):
            raise found
        return None if found is None else (found, [])

    def close(self) -> None:
        self.closed.set()
        self.said.put(None)


class Coordinator:
    """Answers each dial with the next of these; it refuses when there is none left. `connection` is to it."""

    def __init__(self, *answers: Channel | PeerError, retry: Retry | None = None, on_lost: Any = None) -> None:
        self._answers = list(answers)
        self.open: list[Channel] = []
        self.dials = 0
        self.outages: list[Outage] = []
        self.heard: queue.SimpleQueue[AnyMessage] = queue.SimpleQueue()
        self.connection = CoordinatorConnection(
            self._dialled,
            lambda: JoinRun(run=RUN, device=f"dial {self.dials}", host="", port=0),
            run=RUN,
            timeout_s=LIMIT_S,
            retry=retry,
            on_lost=on_lost or self.outages.append,
        )

    def _dialled(self) -> Any:
        assert all(channel.closed.is_set() for channel in self.open), "the connection before is still open"
        self.dials += 1
        answer = self._answers.pop(0) if self._answers else PeerError("coordinator: refuses")
        if isinstance(answer, PeerError):
            raise answer
        self.open.append(answer)
        return direct(answer)  # type: ignore[arg-type]

    def receive(self, connection: OpenConnection[Any]) -> None:
        connection.receive(lambda message, _: self.heard.put(message))

    def serve(self) -> None:
        self.connection.serve(self.receive)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Generator[None]:
    before = set(threading.enumerate())
    yield
    soon(lambda: set(threading.enumerate()) <= before)


def at_once(*waits_s: float, away_s: float = LIMIT_S) -> Retry:
    return Retry(waits_s or (0.0,), away_s, log_s=0.0)


def started(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(LIMIT_S)
    return not thread.is_alive()


def test_each_connection_begins_with_a_message_of_its_own() -> None:
    channels = Channel(HEARTBEAT, None), Channel(PeerError("coordinator: silent")), Channel(HEARTBEAT)
    coordinator = Coordinator(*channels, retry=at_once())
    serving = started(coordinator.serve)
    assert [channel.sent.get(timeout=LIMIT_S) for channel in channels] == [
        JoinRun(run=RUN, device=f"dial {number}", host="", port=0) for number in (1, 2, 3)
    ]
    assert [coordinator.heard.get(timeout=LIMIT_S) for _ in range(2)] == [HEARTBEAT, HEARTBEAT]
    coordinator.connection.close()
    assert ended(serving) and coordinator.dials == 3
    assert [str(outage.error) for outage in coordinator.outages] == [
        "coordinator: closed the connection",
        "coordinator: silent",
    ]


def test_without_another_attempt_the_error_is_raised() -> None:
    for answer, error in ((Channel(None), "closed the connection"), (PeerError("coordinator: away"), "away")):
        coordinator = Coordinator(answer)
        with pytest.raises(PeerError, match=error):
            coordinator.serve()
        assert coordinator.dials == 1 and not coordinator.outages


def test_a_coordinator_that_stays_away_is_given_up() -> None:
    coordinator = Coordinator(Channel(HEARTBEAT, None), retry=at_once(away_s=0.0))
    with pytest.raises(CoordinatorGone, match="closed the connection; it did not come back for 0 s"):
        coordinator.serve()
    assert coordinator.dials == 1


def test_what_ends_no_connection_ends_all() -> None:
    def act(_: object) -> None:
        raise UserError("the job's")

    coordinator = Coordinator(channel := Channel(), retry=at_once())
    with pytest.raises(UserError, match="the job's"):
        coordinator.connection.serve(act)
    assert channel.closed.is_set() and coordinator.dials == 1


def test_an_act_that_returns_is_the_last() -> None:
    coordinator = Coordinator(channel := Channel(), retry=at_once())
    coordinator.connection.serve(lambda _: None)
    assert channel.closed.is_set() and coordinator.dials == 1 and coordinator.connection.current is None


def test_an_outage_is_logged_once_and_with_each_new_reason() -> None:
    away, refused = PeerError("coordinator: away"), PeerError("coordinator: refused")
    answers = (away, away, refused, refused, Channel(HEARTBEAT, refused), refused, Channel(None))
    coordinator = Coordinator(*answers, retry=at_once())
    serving = started(coordinator.serve)
    soon(lambda: len(coordinator.outages) > len(answers))
    coordinator.connection.close()
    assert ended(serving)
    assert [outage.log for outage in coordinator.outages][: len(answers)] == [
        True,
        False,
        True,
        False,
        True,  # a message came since
        False,
        True,
    ]


def test_only_long_outages_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(reconnection, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    logged: list[float] = []

    def on_lost(outage: Outage) -> None:
        now_s[0] += 1.0
        if outage.log:
            logged.append(outage.silent_s)

    coordinator = Coordinator(retry=Retry((0.0,), away_s=30.0), on_lost=on_lost)
    with pytest.raises(CoordinatorGone, match="refuses; it did not come back for 30 s"):
        coordinator.serve()
    assert logged == [3.0, 6.0, 12.0, 24.0]


def test_waits_grow_and_begin_again_after_a_connection_that_lasted() -> None:
    coordinator = Coordinator(*[PeerError("away")] * 5, Channel(HEARTBEAT, None), retry=at_once(0.0, 0.001, 0.002))

    def act(connection: OpenConnection[Any]) -> None:
        time.sleep(0.01)
        coordinator.receive(connection)

    serving = started(lambda: coordinator.connection.serve(act))
    soon(lambda: len(coordinator.outages) > 7)
    coordinator.connection.close()
    assert ended(serving)
    assert [outage.wait_s for outage in coordinator.outages[:8]] == [0, 0.001, 0.002, 0.002, 0.002, 0, 0.001, 0.002]


def test_whoever_says_so_dials_at_once() -> None:
    coordinator = Coordinator(Channel(None), last := Channel(), retry=at_once(3600.0), on_lost=lambda _: True)
    serving = started(coordinator.serve)
    assert last.sent.get(timeout=LIMIT_S)
    coordinator.connection.close()
    assert ended(serving)


def test_what_is_put_without_a_connection_is_dropped() -> None:
    gone, back = Channel(), Channel()
    coordinator = Coordinator(gone, back, retry=at_once(3600.0))
    coordinator.connection.put(HEARTBEAT)
    serving = started(coordinator.serve)
    assert coordinator.connection.connected.wait(LIMIT_S)
    coordinator.connection.put(HEARTBEAT)
    gone.said.put(None)
    soon(lambda: coordinator.outages)
    coordinator.connection.put(HEARTBEAT)
    coordinator.connection.close()
    assert ended(serving)
    assert gone.sent.qsize() == 2 and back.sent.empty()


@pytest.mark.parametrize("when", ["before", "while it dials", "while it waits", "in between"])
def test_close_ends_it_wherever_it_is(when: str) -> None:
    dials, may_dial = threading.Event(), threading.Event()
    coordinator = Coordinator(Channel(), retry=at_once(3600.0))
    connection = coordinator.connection
    if when == "while it waits":
        coordinator._answers.clear()
    elif when == "while it dials":
        dialled = connection._dialled

        def dial() -> Any:
            dials.set()
            assert may_dial.wait(LIMIT_S)
            return dialled()

        connection._dialled = dial
    elif when == "before":
        connection.close()
    serving = started(coordinator.serve)
    if when == "while it dials":
        assert dials.wait(LIMIT_S)
    elif when == "while it waits":
        soon(lambda: coordinator.outages)
    elif when == "in between":
        assert connection.connected.wait(LIMIT_S)
    connection.close()
    may_dial.set()
    assert ended(serving)
    assert all(channel.closed.is_set() for channel in coordinator.open) and connection.current is None
    assert coordinator.dials == (when != "before")


def test_heartbeats_go_over_the_connection_that_is_open() -> None:
    first, second = Channel(), Channel()
    coordinator = Coordinator(first, second, retry=at_once())
    coordinator.connection._timeout_s = 0.04
    serving = started(coordinator.serve)
    for channel in (first, second):
        assert isinstance(channel.sent.get(timeout=LIMIT_S), JoinRun)
        assert channel.sent.get(timeout=LIMIT_S) == HEARTBEAT
        if channel is first:
            channel.said.put(None)
    coordinator.connection.close()
    assert ended(serving)


@pytest.mark.parametrize(
    ("error", "reason", "fault"),
    [
        (UserError("a  key"), "a key", "user"),
        (StepError("linear", "no such\nshape"), "linear: no such shape", "user"),
        (PeerError("device 'b': silent"), "device 'b': silent", "other"),
        (KeyError("x"), "KeyError: 'x'", "device"),
        (MemoryError("none"), "MemoryError: none", "device"),
    ],
)
def test_an_error_is_reported_and_raised(error: Exception, reason: str, fault: Any) -> None:
    reported: list[DeviceFailed] = []
    with pytest.raises(type(error)), reporting(reported.append):
        raise error
    assert reported == [DeviceFailed(reason=reason, fault=fault)]
