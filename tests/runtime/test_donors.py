"""A change of plan in which the state goes from device to device, over processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.cost import PlanLayout, build_replicas
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Fleet, Link, Links, Route
from isthmus.job import prepare
from isthmus.plans import Plan
from isthmus.protocol import Item
from isthmus.protocol.run_messages import GiveState, OpenItem
from isthmus.runtime.coordinator.backend import DevicesAtWork, LocalBackend, RunRequest
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.transport.acceptor import Acceptor
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.trace import Span

from .commands import devices_of
from .jobs import DIGITS, fleet_of, job_of, plain_run

MOST_STEPS, AT, MOST_BYTES = 5000, 3, 1 << 20
LINK_BYTES_PER_S = 1.2e6  # half of the state takes five seconds to the device that gets it


class _Asked:
    """The devices at work, of which two are to leave once."""

    def __init__(self, session: DevicesAtWork, leaving: set[str]) -> None:
        self._session = session
        self._leaving = leaving

    def leaving(self) -> Collection[str]:
        found = frozenset(self._leaving)
        self._leaving.clear()
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)


class _Backend(LocalBackend, frozen=True, kw_only=True):
    leaving: set[str]

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[DevicesAtWork]:
        with LocalBackend.at_work(self, call, acceptor) as session:
            yield _Asked(session, self.leaving)  # pyright: ignore[reportReturnType]


class _Coordinator:
    """What it orders, and the bytes of its connections between the first order to give state and the next item."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[str, GiveState]] = []
        self.state_bytes = 0
        self._channels: list[SocketChannel] = []
        self._before = 0
        made, order, opened = SocketChannel.__init__, CoordinatorHost.order, CoordinatorHost.open_item

        def init(channel: SocketChannel, *given: Any, **named: Any) -> None:
            made(channel, *given, **named)
            self._channels.append(channel)

        def ordered(host: CoordinatorHost, device: str, body: Any) -> None:
            if isinstance(body, GiveState):
                if not self.given:
                    self._before = self._moved()
                    threading.Timer(2.5, _kill).start()
                self.given.append((device, body))
            order(host, device, body)

        def open_item(host: CoordinatorHost, opening: OpenItem) -> None:
            if self.given and not self.state_bytes:
                self.state_bytes = self._moved() - self._before
            opened(host, opening)

        monkeypatch.setattr(SocketChannel, "__init__", init)
        monkeypatch.setattr(CoordinatorHost, "order", ordered)
        monkeypatch.setattr(CoordinatorHost, "open_item", open_item)

    def _moved(self) -> int:
        return sum(channel.sent_bytes + channel.received_bytes for channel in self._channels)


def _kill() -> None:
    os.kill(devices_of(os.getpid())["d0"], signal.SIGKILL)


def test_a_donor_is_killed_in_the_middle_and_another_one_gives_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas leave, and a third device gets their state, half of it from each."""
    made = StageAssignments.__init__
    monkeypatch.setattr(
        StageAssignments, "__init__", lambda self, *given, **named: made(self, *given, **{**named, "repeats": False})
    )
    coordinator = _Coordinator(monkeypatch)
    job = job_of("mlp", {"layers": 5, "width": 512}, DIGITS, steps=MOST_STEPS)
    job = msgspec.structs.replace(job, runtime=msgspec.structs.replace(job.runtime, emulate=True))
    prepared, leaving = prepare(job), set[str]()
    state_bytes = 12 * sum(p.numel() for p in prepared.build().parameters())
    assert state_bytes > 10 * MOST_BYTES
    fast = Link(1e-4, 1e9)
    links = Links(default=Link(1e-4, LINK_BYTES_PER_S), devices=(Route("d0", "d1", fast), Route("d1", "d0", fast)))
    fleet = msgspec.structs.replace(fleet_of(3), links=links)

    def replan(left: Fleet) -> Plan:
        names = [name for name in left.names if name != "d2"] or ["d2"]
        each = prepared.job.micro_batches // len(names)
        return build_replicas(prepared.problem(left), [PlanLayout((d,), (), each) for d in names], planner="test")

    losses, stopped = dict[int, float | None](), list[int]()

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "train":
            losses[item.step] = loss
            if item.step == AT and not coordinator.given:
                leaving.update(("d0", "d1"))
            if coordinator.state_bytes and not stopped:
                stopped.append(item.step)
                os.kill(os.getpid(), signal.SIGINT)

    options = RunOptions(replan=replan, backend=_Backend(leaving=leaving))
    first = replan(fleet.subset(["d0", "d1"]))
    outcome = run_plan(prepared, first, fleet, tmp_path, options, Watcher(advanced=advanced))
    assert outcome.outcome == "interrupted", outcome.reason
    *_, (donor, rest) = coordinator.given
    assert [name for name, _ in coordinator.given[:2]] == ["d0", "d1"] and donor == "d1"
    whole = frozenset[str]().union(*(order.receivers["d2"] for _, order in coordinator.given if order.epoch == 1))
    assert rest.epoch > 1 and rest.receivers["d2"] < whole, "what was here already is not sent again"
    assert coordinator.state_bytes < MOST_BYTES, "state does not pass through the coordinator"
    made_steps = msgspec.structs.replace(job.training, steps=len(losses))
    _, expected = plain_run(msgspec.structs.replace(job, training=made_steps), prepared)
    assert [losses[step] for step in range(len(losses))] == pytest.approx(expected, rel=1e-5)
