"""The host of a fleet's membership: a line that cannot be written of a device changes nothing for the fleet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import cast

import pytest

from isthmus.runtime.coordinator.backend import RunRequest
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import DevicePresent, StartRun, StopRun, Welcome
from isthmus.runtime.messages.versions import versions_here
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.transport.acceptor import Acceptor
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


Opened = Callable[[Callable[[str], None]], FleetCoordinator]


@pytest.fixture
def opened(tmp_path: Path) -> Generator[Opened]:
    """A coordinator with this log, which does not listen."""
    state = FleetState(tmp_path / "fleet")
    with contextlib.ExitStack() as stack:
        stack.callback(state.close)
        yield lambda log: stack.enter_context(FleetCoordinator(state, "127.0.0.1", 0, timeout_s=1.0, log=log))


def connected(service: FleetCoordinator, lane: Lane) -> contextlib.AbstractContextManager[object]:
    """While inside, oslo is connected."""
    with service.deciding() as membership:
        membership.identify("key", "oslo")
    return service.connection(cast("SendLane", lane), cast("Channel", lane), "oslo", "key", PRESENT)


def call(tmp_path: Path) -> RunRequest:
    return RunRequest(run="run", devices=("oslo",), timeout_s=1.0, threads=1, logs=tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("I/O operation on closed file")])
def test_a_log_that_cannot_be_written_loses_no_instruction(error: Exception, opened: Opened, tmp_path: Path) -> None:
    tried: list[str] = []

    def full(text: str) -> None:
        tried.append(text)
        raise error

    service, lane, here = opened(full), Lane(), contextlib.ExitStack()
    acceptor = Acceptor("run", ("oslo",), on_message=lambda _: None, guard=lambda *_: None, timeout_s=1.0)
    with service.long_lived_run(call(tmp_path), acceptor):
        here.enter_context(connected(service, lane))
        with service.deciding() as membership:
            assert lane.sent == [Welcome, StartRun] and membership.at_work("oslo", "run")
    assert lane.sent[-1] is StopRun and service.wait_for(("oslo",), Stop()) == ["oslo"]
    here.close()
    assert lane.closed and service.present == frozenset()
    assert tried == ["oslo is here", "oslo has left"]


def test_a_slow_log_holds_nobody_up(opened: Opened) -> None:
    """While one line is written, others can ask who is here, and a wait ends."""
    writes, go_on = threading.Event(), threading.Event()

    def slow(text: str) -> None:
        if text == "oslo is here":
            writes.set()
            assert go_on.wait(PATIENCE_S)

    service, here = opened(slow), contextlib.ExitStack()
    connecting = threading.Thread(target=lambda: here.enter_context(connected(service, Lane())))
    connecting.start()
    assert writes.wait(PATIENCE_S)
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.extend(service.wait_for(("oslo",), Stop())), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert found == ["oslo"]
    go_on.set()
    connecting.join()
    here.close()
