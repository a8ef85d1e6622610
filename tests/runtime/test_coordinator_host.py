"""The coordinator's driver with devices that behave, devices that do not, and unknown_peers."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from isthmus.accelerators.copies import Fill
from isthmus.errors import PeerError, UserError
from isthmus.programs.pipeline import Pipeline
from isthmus.protocol import Item, RunSpec, StateLayout
from isthmus.protocol.adaptation import PlanFigures
from isthmus.protocol.run_messages import DeviceFailed, DeviceReady, DeviceReport, Halt, ItemReported, OpenItem
from isthmus.protocol.run_ports import EpochStart, PlanRequest
from isthmus.protocol.step_failures import MemoryPeak
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.coordinator.run import Watcher
from isthmus.runtime.coordinator.run_callbacks import Address, FaultKind, Outcome
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import Assignment, Peer
from isthmus.runtime.messages.run import (
    Credit,
    Heartbeat,
    Hello,
    JoinRun,
    ToCoordinator,
    ToDevice,
)
from isthmus.runtime.transport.channel import PREFIX, SocketChannel, dial, frame, in_host_memory
from isthmus.runtime.transport.listener import Listener
from isthmus.session.session import BROKEN, CLOSED, EXIT_S, GRACE_S, FailureDetector, Loss
from isthmus.trace import Span
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader, header_of, pack

from .wire import assignment

RUN = "secret"
SPEC = RunSpec(steps=3, micro_batches=2, micro_batch_size=1, save_every=2)
STATE = {"w": torch.arange(6.0).reshape(2, 3)}


class NotedScript:
    """Notes what it is told."""

    def __init__(self, slow_s: float = 0.0) -> None:
        """`slow_s`: how long it takes to hear of the second loss."""
        self.losses: list[float | None] = []
        self.saved_by: list[tuple[int, str]] = []
        self.commits: list[int] = []
        self.watcher, self.fingerprints = Watcher(), SimpleNamespace(add=lambda device, found: None)
        self.slow_s = slow_s

    def assignments(self, addresses: Mapping[str, Address]) -> Mapping[str, Assignment]:
        return {device: assignment(device, run=RUN) for device in addresses}

    def weights(self, device: str, own: frozenset[str]) -> Mapping[str, Tensor]:
        return STATE

    def elsewhere(self, values: Mapping[str, Tensor]) -> tuple[tuple[()], None]:
        return (), None

    @property
    def now(self) -> NotedScript:
        """Itself: what is asked of a run's plans and of the one in force is asked here."""
        return self

    plans = now

    def make(self, request: PlanRequest) -> tuple[StateLayout, PlanFigures | None]:
        raise UserError("no plan")

    def begin(self, start: EpochStart, layout: StateLayout) -> None:
        pass

    def peers(self, device: str, others: Collection[str], addresses: Mapping[str, Address]) -> tuple[Peer, ...]:
        return tuple(Peer(device=other, host="127.0.0.1", port=addresses[other].port) for other in sorted(others))

    def opened(self, item: Item) -> None:
        pass

    def weights_read(self, item: Item, weights: Mapping[str, Tensor]) -> None:
        pass

    def check_parts(self, tensors: Sequence[TensorHeader]) -> None:
        pass

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        return {}

    def is_known(self, device: str) -> bool:
        return True

    def emulated(self, link: tuple[str, str]) -> float | None:
        return None

    def updates(self) -> tuple[frozenset[str], EngineConfig]:
        return frozenset(), EngineConfig()

    def fault(self, kind: FaultKind, worker: str, reason: str = "") -> None:
        pass

    def check_state(self, device: str, tensors: Sequence[TensorHeader]) -> None:
        if [(t.name, t.shape) for t in tensors] != [("w", (2, 3))]:
            raise PeerError("saved what is not of its stage")

    def placed(self, item: Item) -> Item:
        return item

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "train":
            self.losses.append(loss)
            time.sleep(self.slow_s if len(self.losses) == 2 else 0.0)

    def land(self, device: str, tensors: Sequence[TensorHeader], fill: Fill) -> list[Tensor]:
        return in_host_memory(cast(Any, SimpleNamespace(tensors=tensors)), fill)

    def saved(self, item: Item, device: str, landed: list[Tensor], peak: MemoryPeak | None) -> None:
        assert torch.equal(landed[0], STATE["w"])
        self.saved_by.append((item.step, device))

    def commit(self, item: Item, *, finite: bool) -> None:
        assert finite
        self.commits.append(item.step)


class FakeDevice:
    """A device that reports every item as soon as it is opened. `answer` may do otherwise."""

    def __init__(
        self, port: int, name: str, answer: Callable[[FakeDevice, Item], None] | None = None, timeout_s: float = 5.0
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.channel: SocketChannel = dial("127.0.0.1", port, "coordinator", 5.0)
        self.answer = answer or FakeDevice.report
        self.ended: Halt | Exception | None = None
        self.send(JoinRun(run=RUN, device=name, host="127.0.0.1", port=1))
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def end(self) -> Halt | Exception | None:
        """How the device ended, once it has: the run's own end may be known before a device has read of it."""
        self._thread.join(60)
        return self.ended

    def send(self, message: AnyMessage, tensors: Mapping[str, Tensor] = {}) -> None:
        self.channel.send(message, [pack(t) for t in tensors.values()])

    def say(self, body: DeviceReport, tensors: Mapping[str, Tensor] = {}) -> None:
        headers = tuple(header_of(name, t) for name, t in tensors.items())
        self.send(ToCoordinator(run=RUN, body=body, tensors=headers), tensors)

    def report(self, item: Item) -> None:
        state = STATE if item.kind == "save" else {}
        loss = (2.0 * item.step, 2.0) if item.kind == "train" and self.name == "b" else (None, None)
        self.say(ItemReported(item=item.index, loss=loss[0], count=loss[1]), state)

    def _live(self) -> None:
        try:
            while (received := self.channel.receive(idle_s=self.timeout_s)) is not None:
                message = received[0]
                if received[1]:
                    self.say(DeviceReady())
                elif isinstance(message, ToDevice) and isinstance(message.body, OpenItem):
                    self.answer(self, message.body.item)
                elif isinstance(message, ToDevice) and isinstance(message.body, Halt):
                    self.ended = message.body
                    break
        except PeerError as e:
            self.ended = e
        self.channel.close()


class Conducted:
    """a coordinator at work in a thread."""

    def __init__(self, timeout_s: float = 5.0, slow_s: float = 0.0) -> None:
        self.callbacks = NotedScript(slow_s)
        machine = Pipeline(("a", "b"), SPEC, timeout_s=timeout_s)
        self.host = CoordinatorHost(machine, RUN, self.callbacks, timeout_s=timeout_s)
        listener = Listener("127.0.0.1", timeout_s=timeout_s)
        listener.start(self.host.acceptor.on_connection)
        self.port = listener.port
        self._outcome: list[Outcome] = []
        self._thread = threading.Thread(target=lambda: self._outcome.append(self.host.coordinate()), daemon=True)
        self._thread.start()

    def wait_for(self, device: str) -> None:
        """Until it has joined: what others say in its name may overtake it before."""
        deadline_s = time.monotonic() + 20
        while True:
            with contextlib.suppress(KeyError):
                self.host.acceptor.channel(device)
                return
            assert time.monotonic() < deadline_s, f"{device} did not join"
            time.sleep(0.01)

    def outcome(self) -> Outcome:
        self._thread.join(60)
        assert self._outcome, "the coordinator has not ended"
        return self._outcome[0]


@pytest.fixture
def conducted(soon_sure: None) -> Conducted:
    return Conducted()


def test_a_run(conducted: Conducted) -> None:
    devices = [FakeDevice(conducted.port, name) for name in "ab"]
    assert conducted.outcome().outcome == "done"
    callbacks = conducted.callbacks
    assert callbacks.losses == [0.0, 1.0, 2.0]
    assert sorted(callbacks.saved_by) == [(2, "a"), (2, "b"), (3, "a"), (3, "b")] and callbacks.commits == [2, 3]
    assert all(isinstance(device.end(), Halt) for device in devices)
    late = JoinRun(run=RUN, device="a", host="127.0.0.1", port=1)
    _unknown_peer(conducted.port, b"".join(frame(late, [])))


def _unknown_peer(port: int, payload: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.settimeout(5)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(payload)
            with contextlib.suppress(OSError):  # it may have been shut out by now
                connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b"", "an unknown peer is told nothing"


def test_unknown_peers_change_nothing(conducted: Conducted) -> None:
    draw = random.Random(0)
    silent = socket.create_connection(("127.0.0.1", conducted.port), timeout=60)
    first = FakeDevice(conducted.port, "a")
    conducted.wait_for("a")

    def join(run: str, device: str) -> JoinRun:
        return JoinRun(run=run, device=device, host="127.0.0.1", port=1)

    for message in (join("guessed", "b"), join(RUN, "c"), join(RUN, "a"), Hello(run=RUN, stage=0), Heartbeat(run=RUN)):
        _unknown_peer(conducted.port, b"".join(frame(message, [])))
    (good,) = frame(join(RUN, "b"), [])
    _unknown_peer(conducted.port, bytes(good[:4]) + b"\x07" + bytes(good[5:]))  # another version
    _unknown_peer(conducted.port, bytes(good[: PREFIX.size + 3]))  # half a frame
    _unknown_peer(conducted.port, PREFIX.pack(b"ISTH", 1, 1 << 31, 1 << 62))  # a frame beyond any memory
    for size in (0, 1, 20, 5000):
        _unknown_peer(conducted.port, draw.randbytes(size))
    FakeDevice(conducted.port, "b")
    assert conducted.outcome().outcome == "done"
    assert isinstance(first.end(), Halt), "its connection was not taken over"
    silent.close()


def _misbehaves(device: FakeDevice, item: Item, how: str) -> None:
    if item.step < 1:
        device.report(item)
        return
    match how:
        case "another run":
            device.send(Heartbeat(run="other"))
        case "not for a coordinator":
            device.send(Credit(run=RUN, size_bytes=1))
        case "an item that is not open":
            device.say(ItemReported(item=99))
        case "an item twice":
            device.report(item)
            device.report(item)
        case "tensors with a step":
            device.say(ItemReported(item=item.index), STATE)
        case "garbage":
            device.channel.send_chunk(memoryview(b"no frame, surely not: " * 3))
        case "it closes":
            device.channel.close()
        case "user":
            device.say(DeviceFailed(reason="data: no file there", fault="user"))
        case _:
            device.say(DeviceFailed(reason="RuntimeError: out of memory", fault="device"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("another run", "sent a frame of another run"),
        ("not for a coordinator", "sent Credit to the coordinator"),
        ("an item that is not open", "reported item 99"),
        ("an item twice", "reported item"),
        ("tensors with a step", "sent ItemReported with tensors"),
        ("garbage", "expected a frame that starts with"),
        ("it closes", "was lost: its connection closed"),
        ("user", "data: no file there"),
        ("device", "out of memory"),
    ],
)
def test_a_device_that_misbehaves_is_named(conducted: Conducted, how: str, words: str) -> None:
    good = FakeDevice(conducted.port, "a")
    FakeDevice(conducted.port, "b", lambda device, item: _misbehaves(device, item, how))
    outcome = conducted.outcome()
    assert outcome.outcome == ("failed" if how.startswith("user") else "lost")
    assert type(outcome.failure) is (UserError if how == "user" else PeerError)
    text = str(outcome.failure)
    assert text.startswith("device 'b'") and text.count("device 'b'") == 1 and words in text
    assert outcome.reason == text
    assert good.end() is not None, "halted, or cut off in the middle of a report"


def test_a_checkpoint_of_another_shape_is_refused(conducted: Conducted) -> None:
    def answer(device: FakeDevice, item: Item) -> None:
        if item.kind != "save":
            device.report(item)
            return
        wrong = {"w": torch.zeros(200, 300)}
        device.say(ItemReported(item=item.index), wrong)

    FakeDevice(conducted.port, "a")
    FakeDevice(conducted.port, "b", answer)
    assert "device 'b' was lost: saved what is not of its stage" in str(conducted.outcome().failure)
    assert conducted.callbacks.commits == []


def _beat(device: FakeDevice) -> FakeDevice:
    def beat() -> None:
        while device.ended is None:
            device.send(Heartbeat(run=RUN))
            time.sleep(0.2)

    threading.Thread(target=beat, daemon=True).start()
    return device


@pytest.mark.usefixtures("soon_sure")
def test_who_does_not_join_or_falls_silent_is_lost() -> None:
    alone = Conducted(timeout_s=1.0)
    _beat(FakeDevice(alone.port, "a"))
    assert str(alone.outcome().failure) == "device 'b' was lost: it did not join within 1 s"

    silent = Conducted(timeout_s=1.0)
    _beat(FakeDevice(silent.port, "a"))
    FakeDevice(silent.port, "b", lambda device, item: None)
    assert str(silent.outcome().failure) == "device 'b' was lost: silent for 1 s"


def test_a_slow_hook_does_not_look_like_a_dead_coordinator() -> None:
    slow = Conducted(timeout_s=1.0, slow_s=1.5)
    devices = [_beat(FakeDevice(slow.port, name, timeout_s=1.0)) for name in "ab"]
    assert slow.outcome().outcome == "done"
    assert all(isinstance(device.end(), Halt) for device in devices)


class TestLosses:
    """When one device fails, its neighbours notice too."""

    def test_nothing_has_happened(self) -> None:
        assert FailureDetector().decide(0.0, {}) is None

    def test_a_device_that_says_what_went_wrong_is_believed_at_once(self) -> None:
        losses = FailureDetector()
        losses.accused("b", "device 'a': closed the link")
        losses.reported("a", "no data", of_job=True)
        assert losses.decide(0.0, {}) == Loss("a", "no data", "job")

    def test_the_one_that_vanished_is_to_blame_not_the_one_that_noticed(self) -> None:
        losses = FailureDetector()
        losses.accused("b", "device 'a': closed the link")
        assert losses.decide(10.0, {}) is None
        losses.disconnected("b", "its connection closed")
        losses.disconnected("a", "its connection closed")
        assert losses.decide(10.0 + GRACE_S / 2, {}) is None
        loss = losses.decide(10.0 + GRACE_S, {})
        assert (
            loss is not None
            and loss.device == "a"
            and str(loss.failure) == "device 'a' was lost: its connection closed"
        )

    def test_how_a_process_ended_says_more_than_that_its_connection_closed(self) -> None:
        losses = FailureDetector()
        ended = {"a": "its process was killed by SIGKILL", "b": "its process ended with code 4"}
        losses.accused("b", "device 'a': closed the link")
        losses.disconnected("a", "its connection closed")
        losses.decide(0.0, ended)
        loss = losses.decide(GRACE_S, ended)
        assert loss is not None and loss.device == "a" and "SIGKILL" in loss.reason

    def test_where_nobody_accuses_the_exit_of_a_process_that_was_cut_off_is_the_reason_at_once(self) -> None:
        losses = FailureDetector(grace_s=0.0)
        losses.disconnected("a", CLOSED)
        assert losses.decide(0.0, {}, {"a"}) is None
        loss = losses.decide(0.1, {"a": "its process was killed by SIGKILL"})
        assert loss is not None and loss.device == "a" and "SIGKILL" in loss.reason

    def test_a_process_that_ended_may_have_said_why(self) -> None:
        losses, ended = FailureDetector(grace_s=0.0), {"a": "its process ended with code 4"}
        assert losses.decide(0.0, ended) is None and losses.decide(GRACE_S / 2, ended) is None
        loss = losses.decide(GRACE_S, ended)
        assert loss is not None and loss.device == "a" and "code 4" in loss.reason

    @pytest.mark.parametrize("heard", [["closed", "ended"], ["ended", "closed"]])
    def test_the_cause_is_the_same_whichever_was_heard_first(self, heard: list[str]) -> None:
        """On a machine that is busy an agent may tell of the exit after the grace: its process is known to run."""
        losses, ended, running = FailureDetector(), dict[str, str](), {"a"}
        for now_s, what in zip((0.0, 3 * GRACE_S), heard, strict=True):
            if what == "closed":
                losses.disconnected("a", CLOSED)
            else:
                ended, running = {"a": "its process was killed by SIGKILL"}, set[str]()
            verdict = losses.decide(now_s, ended, running)
        loss = verdict or losses.decide(6 * GRACE_S, ended, running)
        assert (
            loss is not None
            and loss.device == "a"
            and str(loss.failure) == "device 'a' was lost: its process was killed by SIGKILL"
        )

    @pytest.mark.parametrize("reason", [CLOSED, f"{BROKEN}: Connection reset by peer"])
    def test_a_process_that_runs_on_without_its_connection_is_lost_in_the_end(self, reason: str) -> None:
        losses = FailureDetector()
        losses.disconnected("a", reason)
        assert losses.decide(0.0, {}, {"a"}) is None and losses.decide(EXIT_S - 0.1, {}, {"a"}) is None
        loss = losses.decide(EXIT_S, {}, {"a"})
        assert loss is not None and loss.device == "a" and str(loss.failure) == f"device 'a' was lost: {reason}"

    def test_a_broken_link_between_two_that_live(self) -> None:
        losses = FailureDetector()
        losses.accused("b", "device 'a': stalled for 60 s")
        losses.decide(0.0, {})
        loss = losses.decide(GRACE_S, {})
        assert (
            loss is not None and loss.device == "b" and str(loss.failure) == "device 'b': device 'a': stalled for 60 s"
        )
