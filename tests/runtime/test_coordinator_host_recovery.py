"""The coordinator's driver when a device goes away: whom it stops, what it fetches, who may come back."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from typing import TypeVar

import pytest
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.programs.pipeline import Pipeline
from isthmus.protocol import RunSpec, StateHolding, StateLayout
from isthmus.protocol.adaptation import PlanFigures
from isthmus.protocol.run_messages import (
    Body,
    DeviceOrder,
    DeviceReady,
    DeviceReport,
    GiveState,
    Halt,
    Inventory,
    ItemReported,
    OpenItem,
    Pause,
    PlaceWeights,
    RunOrder,
)
from isthmus.protocol.run_ports import PlanRequest
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.runtime.messages.run import (
    Heartbeat,
    JoinRun,
    ToCoordinator,
    ToDevice,
)
from isthmus.runtime.transport.channel import dial
from isthmus.runtime.transport.listener import Listener
from isthmus.training.layout import header_of, pack

from .test_coordinator_host import RUN, STATE, NotedScript

ALL = frozenset({"w"})
SPEC = RunSpec(steps=6, micro_batches=1, micro_batch_size=1)


class Planning(NotedScript):
    """Plans for whoever is there: the last one has the weight."""

    def make(self, request: PlanRequest) -> tuple[StateLayout, PlanFigures | None]:
        return _layout(*request.devices), None


def _layout(*devices: str) -> StateLayout:
    return StateLayout(parts={d: ALL if d == devices[-1] else frozenset() for d in devices})


BodyT = TypeVar("BodyT", bound=Body)


class Device:
    """Follows orders by hand: `said` is what the coordinator told it last, in order."""

    def __init__(self, port: int, name: str, holdings: tuple[StateHolding, ...] = (), stops_at: int = 99) -> None:
        """It reports no item of the step `stops_at`, or a later one."""
        self.name = name
        self.holdings = holdings
        self.said: queue.SimpleQueue[DeviceOrder | RunOrder] = queue.SimpleQueue()
        self.stops_at = stops_at
        self.channel = dial("127.0.0.1", port, "coordinator", 5.0)
        self.channel.send(JoinRun(run=RUN, device=name, host="127.0.0.1", port=1))
        for act in (self._live, self._beat):
            threading.Thread(target=act, daemon=True).start()

    def _beat(self) -> None:
        with contextlib.suppress(PeerError):
            while True:
                self.channel.send(Heartbeat(run=RUN))
                time.sleep(1.0)

    def _live(self) -> None:
        with contextlib.suppress(PeerError):  # a test may close the channel in the middle of a report
            self._follow()

    def _follow(self) -> None:
        while (received := self.channel.receive(idle_s=10)) is not None:
            if not isinstance(received[0], ToDevice):
                continue
            message = received[0].body
            self.said.put(message)
            if isinstance(message, PlaceWeights):
                self.say(DeviceReady(epoch=message.epoch))
            elif isinstance(message, OpenItem):
                self._work(message)
            elif isinstance(message, Pause):
                self.say(Inventory(epoch=message.epoch, holdings=self.holdings))
            elif isinstance(message, Halt):
                return

    def _work(self, message: OpenItem) -> None:
        item = message.item
        if item.step >= self.stops_at:
            return
        self.say(ItemReported(epoch=message.epoch, item=item.index), STATE if item.kind == "save" else {})

    def say(self, body: DeviceReport, tensors: Mapping[str, Tensor] = {}) -> None:
        headers = tuple(header_of(n, t) for n, t in tensors.items())
        self.channel.send(ToCoordinator(run=RUN, body=body, tensors=headers), [pack(t) for t in tensors.values()])

    def hears(self, kind: type[BodyT]) -> BodyT:
        """The next message of this kind."""
        deadline_s = time.monotonic() + 10
        while True:
            message = self.said.get(timeout=max(0.1, deadline_s - time.monotonic()))
            if isinstance(message, kind):
                return message


def _conducted(*devices: str) -> tuple[CoordinatorHost, int, list[Outcome]]:
    machine = Pipeline(devices, SPEC, timeout_s=5.0, layout=_layout(*devices))
    host = CoordinatorHost(machine, RUN, Planning(), timeout_s=5.0, others=("c",))
    listener = Listener("127.0.0.1", timeout_s=5.0)
    listener.start(host.acceptor.on_connection)
    found: list[Outcome] = []
    threading.Thread(target=lambda: found.append(host.coordinate()), daemon=True).start()
    return host, listener.port, found


def _reached(host: CoordinatorHost, items: int) -> None:
    deadline_s = time.monotonic() + 10
    while host.session.statistics().finished < items:
        assert time.monotonic() < deadline_s, "nothing goes on"
        time.sleep(0.01)


def _ended(found: list[Outcome]) -> Outcome:
    deadline_s = time.monotonic() + 20
    while not found:
        assert time.monotonic() < deadline_s, "the coordinator has not ended"
        time.sleep(0.02)
    return found[0]


@pytest.mark.usefixtures("soon_sure")
def test_those_left_are_stopped_and_give_what_the_newcomer_needs() -> None:
    host, port, found = _conducted("a", "b")
    a = Device(port, "a", (StateHolding(epoch=0, step=3, parts=ALL),), stops_at=3)
    b = Device(port, "b", stops_at=3)
    _reached(host, 3)
    c = Device(port, "c")
    a.stops_at = 99
    b.channel.close()
    assert a.hears(Pause).epoch == 1
    given = a.hears(GiveState)
    assert (given.step, given.receivers) == (3, {"c": ALL})
    placed = c.hears(PlaceWeights)
    assert (placed.epoch, placed.donors) == (1, {"a": ALL})
    opened = c.hears(OpenItem)
    assert (opened.item.step, opened.epoch) == (3, 1)
    outcome = _ended(found)
    assert outcome.outcome == "done", outcome.reason
    (recovery,) = outcome.recoveries
    assert "'b' was lost: its connection closed" in recovery.reason
    assert (recovery.step, recovery.redone, recovery.from_checkpoint) == (3, 0, False)


@pytest.mark.usefixtures("soon_sure")
def test_what_is_said_of_an_older_epoch_changes_nothing_and_who_was_lost_may_come_back() -> None:
    host, port, found = _conducted("a", "b")
    a, b = Device(port, "a", stops_at=2), Device(port, "b", stops_at=2)
    _reached(host, 2)
    b.channel.close()
    a.hears(Pause)
    a.stops_at = 99
    a.say(ItemReported(epoch=0, item=2))
    a.say(ItemReported(epoch=0, item=77))
    a.channel.send(Heartbeat(run=RUN))
    again = Device(port, "b", holdings=(StateHolding(epoch=0, step=99, parts=ALL),))
    a.hears(PlaceWeights)
    outcome = _ended(found)
    assert outcome.outcome == "done", outcome.reason
    assert outcome.recoveries[0].step == 0 and outcome.recoveries[0].from_checkpoint
    assert outcome.recoveries[0].redone == 2
    again.channel.close()


@pytest.mark.usefixtures("soon_sure")
def test_a_run_that_nobody_is_left_for_says_so() -> None:
    _, port, found = _conducted("a")
    a = Device(port, "a", stops_at=1)
    a.hears(OpenItem)
    a.channel.close()
    assert _ended(found).outcome == "lost"
    assert "no other device is left" in str(found[0].failure)
