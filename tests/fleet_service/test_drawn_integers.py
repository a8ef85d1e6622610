"""Drawn integers in the frames between a fleet's coordinator and the agents of its devices, both ways. Who submits
a job writes to the coordinator's folder: there are no frames."""

from __future__ import annotations

import contextlib
import math
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from isthmus.data import DataSpec
from isthmus.data.dataset import ColumnSpec
from isthmus.data.description import MOST_SAMPLES, DataDescription, check_description
from isthmus.data.layout import Layout
from isthmus.errors import IsthmusError, PeerError
from isthmus.job import prepare
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import (
    MOST_STAGES,
    DataDescribed,
    DescribeData,
    DevicePresent,
    StartRun,
    StopRun,
    Welcome,
)
from isthmus.runtime.messages.probe import (
    SIZES_BYTES,
    AttentionShape,
    ExpectDial,
    ExpectingDial,
    LinkTimes,
    MatrixProduct,
    MeasuredSpeed,
    MeasureLink,
    MeasureSpeed,
    SpeedSample,
)
from isthmus.runtime.messages.versions import mismatch, versions_here
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service import agent as agents
from isthmus.runtime.service import data_queries, fleet_probe
from isthmus.runtime.service.agent import Agent, Membership
from isthmus.runtime.service.data_queries import FleetDataQueries
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator, _only_fleet
from isthmus.runtime.service.fleet_probe import measured_device, probe_link, speed_question
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.service.speed import TimedWork
from isthmus.wire_types import MOST_BYTES
from tests.drawn_integers import DRAWN, Lies, received
from tests.runtime.jobs import DIGITS, job_of

pytestmark = pytest.mark.thorough

NAMES = ("oslo", "bern")
MOST_CORES = 1024
"""Of a machine."""
ROUNDS = 10
HERE = ("127.0.0.1", 1)
DATA = DataSpec(kind="digits")
DESCRIPTION = DataDescription(
    columns={"x": ColumnSpec(dtype="float32", shape=(8, 8)), "y": ColumnSpec(dtype="int64", limit=10)},
    train=1700,
    heldout=97,
    digests={"train": "a" * 64, "heldout": "b" * 64},
    layout=Layout(runs=((8, 200), (1, 100)), window=3),
)


@pytest.fixture(scope="module")
def asked() -> MeasureSpeed:
    attention = AttentionShape(batch=2, heads=4, key_heads=4, queries=8, keys=8, size=4, value_size=4)
    found = speed_question(prepare(job_of("mlp", {}, DIGITS)))
    return msgspec.structs.replace(found, operators=(MatrixProduct(1, 2, 3, 4), attention))


def answer_of(question: Any, trial: Any) -> Any:
    """As an honest device has it."""
    match question:
        case MeasureSpeed(run=run):
            layers = trial.layers[-1].operators
            figures = (
                SpeedSample(what="layers", precision="fp32", flops=2e9, seconds=1.0, operators=layers),
                SpeedSample(what="products", precision="fp32", flops=4e9, seconds=1.0),
            )
            return MeasuredSpeed(run=run, figures=figures, peak_flops_per_s=8e9, memory_bytes=1 << 33)
        case ExpectDial(run=run):
            return ExpectingDial(run=run, host="10.0.0.2", port=4000)
        case MeasureLink(run=run):
            return LinkTimes(run=run, times=tuple((size, 0.01 + size / 1e8) for size in SIZES_BYTES[:3]))
        case DescribeData(run=run):
            return DataDescribed(run=run, description=DESCRIPTION)
        case _:
            raise AssertionError(question)


class Device:
    """Its connection, at the coordinator: it answers at once, by `answer`."""

    def __init__(self, service: FleetCoordinator, name: str, answer: Callable[[Any], Any]) -> None:
        self.name, self._service = name, service
        self.answer = answer
        self.asked: list[Any] = []

    def put(self, message: AnyMessage) -> None:
        received(message)
        if isinstance(message, Welcome | StartRun | StopRun):
            return
        self.asked.append(message)
        found = self.answer(message)
        _only_fleet(found)
        self._service.answered(self.name, found)

    def close(self, *_: object) -> None: ...


Joined = Callable[[str, Callable[[Any], Any]], Device]


@pytest.fixture
def service(tmp_path: Path) -> Generator[FleetCoordinator]:
    state = FleetState(tmp_path / "fleet")
    found = FleetCoordinator(state, "127.0.0.1", 0, timeout_s=5.0, log=lambda _: None)
    yield found
    found.close()
    state.close()


@pytest.fixture
def joined(service: FleetCoordinator) -> Generator[Joined]:
    """Connects a device of this name, whose answers are made in this way."""
    with contextlib.ExitStack() as here:

        def join(name: str, answer: Callable[[Any], Any]) -> Device:
            device = Device(service, name, answer)
            line: Any = device
            with service.deciding() as membership:
                membership.identify(name * 2, name)
            present = DevicePresent(run="", versions=versions_here())
            here.enter_context(service.connection(line, line, name, name * 2, present))
            return device

        yield join


def test_a_coordinator_goes_by_what_devices_can_have(
    service: FleetCoordinator, joined: Joined, asked: MeasureSpeed
) -> None:
    """Their answers, by the guard of their connection and the membership to who asked."""
    lies = Lies(11, 4 * ROUNDS)
    honest = lambda question: answer_of(question, asked.trial)  # noqa: E731
    oslo, bern = (joined(name, honest) for name in NAMES)

    def speed() -> Any:
        found = service.ask("oslo", msgspec.structs.replace(asked, run="q"), MeasuredSpeed, 5.0)
        device = measured_device("oslo", "site-0", found, asked, lambda _: None)
        assert math.isfinite(device.flops_per_s) and 0 <= device.memory_bytes <= MOST_BYTES
        return device

    def link() -> Any:
        found = probe_link(service, "oslo", "bern", lambda _: None)
        assert 0 < found.latency_s < math.inf and 0 < found.bandwidth_bytes_per_s < math.inf
        return found

    def data() -> Any:
        found = FleetDataQueries(service, Stop()).describe(["oslo"], DATA, heldout=True)["oslo"]
        if isinstance(found, IsthmusError):
            raise PeerError(str(found))
        assert 1 <= found.train <= MOST_SAMPLES and 1 <= found.heldout <= MOST_SAMPLES
        check_description(found, heldout=True)
        return found

    uses: list[tuple[type, Device, Callable[[], Any]]] = [
        (MeasureSpeed, oslo, speed),
        (ExpectDial, bern, link),
        (MeasureLink, oslo, link),
        (DescribeData, oslo, data),
    ]
    for _ in range(ROUNDS):
        for kind, device, use in uses:
            right = use()
            question = next(q for q in reversed(device.asked) if isinstance(q, kind))

            def take(lie: Any, kind: type = kind, device: Device = device, use: Callable[[], Any] = use) -> None:
                def answer(given: Any) -> Any:
                    return msgspec.structs.replace(lie, run=given.run) if isinstance(given, kind) else honest(given)

                device.answer = answer
                try:
                    use()
                finally:
                    device.answer = honest
                assert not isinstance(lie, LinkTimes) or {size for size, _ in lie.times} <= {*SIZES_BYTES}

            lies.about(honest(question), take, names=device.name)
            assert use() == right, "a lie leaves no trace"
            assert service.present == set(NAMES)
    lies.told()


def test_a_device_of_another_protocol_is_refused_by_name(service: FleetCoordinator, joined: Joined) -> None:
    lies = Lies(12, ROUNDS)
    joined("bern", lambda _: None)

    def take(lie: Any) -> None:
        with service.deciding() as membership:
            membership.identify("oslo", "oslo")
        wrong = mismatch(versions_here(), lie.versions) or ""
        if not wrong:
            assert lie.versions == versions_here()
            return
        with service.deciding() as membership:
            refused = membership.connect("oslo", "oslo", 99, working=lie.working, mismatch=wrong)
        assert service.present == {"bern"} and refused is not None
        raise PeerError(f"oslo: {refused.reason}")

    for _ in range(ROUNDS):
        lies.about(DevicePresent(run="", versions=versions_here()), take, names="oslo")
    assert lies.refused > DRAWN * 3 // 4


class Line:
    """An agent's way out."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def put(self, message: AnyMessage) -> None:
        received(message)
        self.sent.append(message)


def test_an_agent_does_what_a_coordinator_can_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: MeasureSpeed
) -> None:
    """Nothing of it ends the agent, whose processes are of stand-ins here."""
    lies = Lies(13, 4 * ROUNDS)
    begun: list[tuple[int, int]] = []

    class Processes:
        def __init__(self, *_: object, threads: int, **__: object) -> None:
            self.threads = threads

        def start(self, device: str, place: ProcessPlace, stages: int, *, role: str) -> None:
            begun.append((self.threads, stages))

        def running(self, device: str) -> bool:
            return True

        def end(self, *, halted: bool = True) -> None: ...

    def child(command: list[str], *, input: str, env: dict[str, str], **_: object) -> Any:
        wanted = msgspec.json.decode(input, type=MeasureSpeed)
        assert env["OMP_NUM_THREADS"] == str(wanted.threads) and 1 <= wanted.threads <= MOST_CORES
        figure = SpeedSample(what="products", precision="fp32", flops=1e9, seconds=1.0)
        found = TimedWork(figures=(figure,), peak_flops_per_s=1e9, memory_bytes=1 << 33)
        return subprocess.CompletedProcess(command, 0, msgspec.json.encode(found).decode(), "")

    times = [(size, 0.01 + size / 1e8) for size in SIZES_BYTES[:3]]
    monkeypatch.setattr(agents, "DeviceProcesses", Processes)
    monkeypatch.setattr(agents, "local_address", lambda *_: "127.0.0.1")
    monkeypatch.setattr(Agent, "_beside", lambda self, act: act())
    monkeypatch.setattr(fleet_probe.subprocess, "run", child)
    monkeypatch.setattr(fleet_probe, "time_loads", lambda route, dialer: (times, False))
    monkeypatch.setattr(data_queries, "described_at", lambda *_, **__: DESCRIPTION)
    agent = Agent(
        tmp_path, Membership("oslo", (HERE,)), ProcessPlace(ranks=2, local_ranks=2), timeout_s=5.0, log=lambda _: None
    )
    line = Line()
    way: Any = SimpleNamespace(sender=line, start_heartbeats=lambda _: None)

    def take(message: Any) -> None:
        try:
            agents._only_coordinator(message)
        except PeerError as e:
            raise PeerError(f"coordinator: {e}") from None
        agent._end_work()  # a call to the run that it works for changes nothing
        agent._follow(message, way)

    orders: list[Any] = [
        StartRun(run="r", timeout_s=5.0, threads=2, stages=3),
        MeasureLink(run="q", host="10.0.0.2", port=4000, id="bern"),
        msgspec.structs.replace(asked, run="q"),
        DescribeData(run="q", data=DataSpec(kind="npz", options={"path": "all.npz", "holdout": 3}), heldout=True),
    ]
    for number in range(ROUNDS):
        for right in orders:
            order = msgspec.structs.replace(right, run=f"{right.run}{number}")
            answers = len(line.sent)
            lies.about(order, take, names="coordinator: ", keep=("index",))
            del line.sent[answers:]
            take(StopRun(run=order.run))
            take(order)
            assert [m.run for m in line.sent[answers:]] == [order.run] * (not isinstance(order, StartRun))
            if isinstance(order, StartRun):
                assert begun[-1] == (2, 3), "as an agent that nobody lied to"
            elif not isinstance(order, DescribeData):
                assert not line.sent[-1].failure
    assert all(1 <= threads <= MOST_CORES and 1 <= stages <= MOST_STAGES for threads, stages in begun)
    lies.told()
