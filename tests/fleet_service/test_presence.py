"""The host of a fleet's membership: a line that cannot be written of a device changes nothing for the fleet."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path
from typing import cast

import pytest

from isthmus.runtime.coordinator.backend import RunRequest
from isthmus.runtime.identity.roster import Roster
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import DevicePresent, StartRun, StopRun, Welcome
from isthmus.runtime.messages.versions import versions_here
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.presence import Presence
from isthmus.runtime.transport.channel import Channel
from isthmus.runtime.transport.lanes import SendLane

PATIENCE_S = 60.0


PRESENT = DevicePresent(run="", versions=versions_here())


class Lane:
    """What was sent to a device."""

    def __init__(self) -> None:
        self.sent: list[type[AnyMessage]] = []
        self.closed = False

    def put(self, message: AnyMessage) -> None:
        self.sent.append(type(message))

    def close(self, flush_s: float) -> None:
        self.closed = True


@pytest.fixture
def roster(tmp_path: Path) -> Generator[Roster]:
    found = Roster(tmp_path)
    yield found
    found.close()


def connect(presence: Presence, lane: Lane) -> int:
    with presence.deciding() as membership:
        membership.identify("key", "oslo")
    number = presence.connected(cast("SendLane", lane), cast("Channel", lane), "oslo", PRESENT)
    with presence.deciding() as membership:
        membership.connect("oslo", "key", number)
    return number


def call(tmp_path: Path) -> RunRequest:
    return RunRequest(run="run", devices=("oslo",), timeout_s=1.0, threads=1, logs=tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("I/O operation on closed file")])
def test_a_log_that_cannot_be_written_loses_no_instruction(error: Exception, roster: Roster, tmp_path: Path) -> None:
    tried: list[str] = []

    def full(text: str) -> None:
        tried.append(text)
        raise error

    presence, lane = Presence(roster, full, timeout_s=1.0, cut=lambda _: None), Lane()
    with presence.run(call(tmp_path), long_lived=True):
        number = connect(presence, lane)
        assert lane.sent == [Welcome, StartRun] and presence.at_work("oslo", "run")
    assert lane.sent[-1] is StopRun and presence.wait(("oslo",), Stop(), every=True) == ["oslo"]
    presence.disconnected("oslo", number)
    assert lane.closed and presence.names == frozenset()
    assert tried == ["oslo is here", "oslo has left"]


def test_a_slow_log_holds_nobody_up(roster: Roster) -> None:
    """While one line is written, others can ask who is here, and a wait ends."""
    writes, go_on = threading.Event(), threading.Event()

    def slow(text: str) -> None:
        if text == "oslo is here":
            writes.set()
            assert go_on.wait(PATIENCE_S)

    presence = Presence(roster, slow, timeout_s=1.0, cut=lambda _: None)
    connecting = threading.Thread(target=connect, args=(presence, Lane()))
    connecting.start()
    assert writes.wait(PATIENCE_S)
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.extend(presence.wait(("oslo",), Stop(), every=True)), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert found == ["oslo"]
    go_on.set()
    connecting.join()
