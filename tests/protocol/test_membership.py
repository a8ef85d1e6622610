"""Who is in a fleet, and what each device works for: rules that hold whatever happens, and in what order."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.protocol.fleet_membership import REMIND_S, REVOKED, FleetMembership
from isthmus.protocol.membership import MEMBERSHIP, FleetMember
from isthmus.protocol.membership_events import (
    AdmitDevice,
    AdmitWorker,
    AskToLeave,
    CloseConnection,
    CutDevice,
    DeviceAnswered,
    DeviceAsked,
    DeviceCalled,
    DeviceConnected,
    DeviceDisconnected,
    DeviceRevoked,
    DrainRequested,
    EndWait,
    FailQuestion,
    FleetEvent,
    FleetInstruction,
    FleetNote,
    FleetTick,
    HoldWorker,
    MemberEvent,
    PeerIdentified,
    PutQuestion,
    RefuseDevice,
    RefuseWorker,
    RunClosed,
    RunExpected,
    RunOpened,
    StartWorker,
    StopWorker,
    TakeAnswer,
    WaitBegan,
    WaitStopped,
    WorkerConnected,
    WorkerFailed,
)
from isthmus.session.program import OutOfPhase

DEVICES = ("bergen", "oslo", "tokyo")
RUNS = ("first", "second", "third")


class World:
    """What a host of the membership could see: connections that are open, revoked ids, who works for what."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.machine = FleetMembership()
        self.now_s = 0.0
        self.ids = {device: f"{device} 0" for device in DEVICES}
        """By the roster; a device that was revoked comes back with another one."""
        self.revoked: set[str] = set()
        self.open: dict[int, tuple[str, str]] = {}
        """Connections that the host has not seen end, by number: the device and its id."""
        self.live: dict[str, int] = {}
        """By device, the connection that was admitted last and not closed since."""
        self.runs: dict[str, bool] = {}
        """That go on, and whether they are long-lived."""
        self.works: dict[str, str] = {}
        """By device, the run that it was started or admitted for, as far as nothing has ended that."""
        self.waits: dict[int, tuple[tuple[str, ...], bool]] = {}
        self.questions: dict[str, str] = {}
        self.numbers = 0

    def next(self) -> int:
        self.numbers += 1
        return self.numbers

    def handle(self, event: FleetEvent) -> list[FleetInstruction]:
        self.now_s += self.draw.choice((0.0, 0.1, 5.0))
        out = self.machine.handle(event, self.now_s)
        for instruction in out:
            self.check(instruction)
        return out

    def check(self, instruction: FleetInstruction) -> None:
        """The rules of each instruction."""
        match instruction:
            case AdmitDevice(device=device, connection=connection):
                assert device not in self.live, "the former connection is closed first"
                assert self.open[connection][1] not in self.revoked
                self.live[device] = connection
            case CloseConnection(connection=connection):
                device, _ = self.open[connection]
                assert self.live.pop(device) == connection
            case CutDevice(id=id):
                self.live = {d: c for d, c in self.live.items() if self.open[c][1] != id}
                self.works.pop(id.split()[0], None)
            case StartWorker(device=device, connection=connection, run=run):
                assert self.live.get(device, connection) == connection and self.open[connection][0] == device
                assert self.ids[device] not in self.revoked, "a revoked device never works"
                assert run in self.runs and self.works.get(device, run) in (run, *self.ended()), "at most one run"
                self.works[device] = run
            case StopWorker(connection=connection):
                assert connection in self.live.values()
            case EndWait(wait=wait, devices=devices):
                wanted, every = self.waits.pop(wait)
                assert set(devices) <= self.live.keys() and (devices == wanted if every else devices)
            case PutQuestion(connection=connection):
                assert connection in self.live.values()
            case TakeAnswer(question=question) | FailQuestion(question=question):
                del self.questions[question]  # once, and no other comes after it
            case _:
                pass

    def ended(self) -> Collection[str]:
        return [run for run in RUNS if run not in self.runs]

    def connect(self, device: str, working: str = "") -> None:
        id = self.ids[device]
        out = self.handle(PeerIdentified(id=id, name=None if id in self.revoked else device))
        assert any(isinstance(i, RefuseDevice) for i in out) == (id in self.revoked)
        if id in self.revoked:
            return
        number = self.next()
        self.open[number] = (device, id)
        self.works.pop(device, None)
        if working:
            self.works[device] = working
        self.handle(DeviceConnected(device=device, id=id, connection=number, working=working))

    def disconnect(self, number: int) -> None:
        device, _ = self.open[number]
        if self.live.get(device) == number:
            del self.live[device]
        self.handle(DeviceDisconnected(device=device, connection=number))
        del self.open[number]

    def worker_connects(self, device: str, run: str) -> None:
        known = device in self.machine.names.values()
        out = self.handle(WorkerConnected(device=device, worker=device, run=run))
        assert len([i for i in out if isinstance(i, AdmitWorker | HoldWorker | RefuseWorker)]) == 1
        if AdmitWorker() in out:
            assert known and self.ids[device] not in self.revoked, "a revoked device never works"
            assert run in self.runs and self.works.get(device, run) in (run, *self.ended()), "at most one run"
            self.works[device] = run
        if HoldWorker() in out:
            assert known and run not in self.runs

    def fails(self, device: str, run: str) -> None:
        number = self.draw.choice([*self.open, self.next()])
        if self.live.get(device) == number and self.works.get(device) == run:
            del self.works[device]
        self.handle(WorkerFailed(device=device, connection=number, run=run, how="ended"))

    def revoke(self, device: str) -> None:
        id = self.ids[device]
        known = id in self.machine.names
        self.revoked.add(id)
        self.handle(DeviceRevoked(device=device, id=id))
        assert device not in self.machine.connected
        assert not known or all(device in self.machine.failed(run) for run in self.runs)

    def step(self) -> None:
        draw = self.draw
        device, run = draw.choice(DEVICES), draw.choice(RUNS)
        match draw.randrange(16):
            case 0 | 1 | 2:
                self.connect(device, draw.choice(("", "", "", run)))
            case 3:
                if self.open:
                    self.disconnect(draw.choice(list(self.open)))
            case 4 if run not in self.runs:
                self.runs[run] = draw.random() < 0.5
                devices = tuple(draw.sample(DEVICES, draw.randint(1, 3)))
                self.handle(RunOpened(run=run, devices=devices, others=DEVICES, long_lived=self.runs[run]))
            case 5 if run in self.runs:
                del self.runs[run]
                self.works = {d: at for d, at in self.works.items() if at != run}
                self.handle(RunClosed(run=run))
            case 6 | 7:
                self.worker_connects(device, run)
            case 8:
                self.fails(device, draw.choice((run, "")))
            case 9:
                assert AskToLeave(device) in self.handle(DrainRequested(device=device))
            case 10 if draw.random() < 0.3:
                self.revoke(device)
            case 11 if self.ids[device] in self.revoked:
                self.ids[device] = f"{device} {self.next()}"
            case 12:
                number, devices = self.next(), tuple(draw.sample(DEVICES, draw.randint(1, 3)))
                self.waits[number] = (devices, draw.random() < 0.5)
                self.handle(WaitBegan(wait=number, devices=devices, every=self.waits[number][1]))
            case 13:
                question = str(self.next())
                self.questions[question] = device
                self.handle(DeviceAsked(question=question, device=device, within_s=60.0))
            case 14 if self.questions:
                question, asked = draw.choice(list(self.questions.items()))
                taken = TakeAnswer(question) in self.handle(DeviceAnswered(question=question, device=device))
                assert taken == (device == asked)
            case 15:
                self.handle(RunExpected(run=run, within_s=10.0))
            case _:
                offered = self.machine.offers(DEVICES, run)
                assert set(offered) <= self.live.keys()
                for other in offered:
                    assert self.works.get(other, "") in ("", *self.ended())
                self.handle(DeviceCalled(device=device, run=run))


@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_happens_the_rules_of_a_fleet_hold(seed: int) -> None:
    """No device has two live connections, none that is revoked works, none works for two runs."""
    world = World(seed)
    for _ in range(150):
        world.step()
        assert world.machine.connected == world.live.keys()
        assert not {world.ids[d] for d in world.live} & world.revoked
        assert set(world.machine.names) == {
            m.id for d in DEVICES if (m := world.machine.member(d)) and m.phase != "revoked"
        }


@given(seed=st.integers(0, 2**32 - 1))
def test_every_wait_ends(seed: int) -> None:
    """A question with an answer, its device's connection or its time; a wait when its devices come, or by who waits."""
    world = World(seed)
    for _ in range(80):
        world.step()
    world.now_s += 60.0
    world.handle(FleetTick())
    assert world.questions == {}
    for device in DEVICES:
        if world.ids[device] in world.revoked:
            world.ids[device] = f"{device} {world.next()}"
        world.connect(device)
    assert world.waits == {} and world.machine.awaited == ()


def fleet(*devices: str) -> FleetMembership:
    machine = FleetMembership()
    for number, device in enumerate(devices, 1):
        machine.handle(PeerIdentified(id=device, name=device), 0.0)
        machine.handle(DeviceConnected(device=device, id=device, connection=number), 0.0)
    return machine


def notes(out: Sequence[FleetInstruction]) -> list[str]:
    return [i.text for i in out if isinstance(i, FleetNote)]


def test_a_new_connection_takes_the_place_of_the_old_one() -> None:
    machine = fleet("oslo")
    machine.handle(DeviceAsked(question="q", device="oslo", within_s=60.0), 0.0)
    out = machine.handle(DeviceConnected(device="oslo", id="oslo", connection=7), 1.0)
    assert out[:3] == [
        FailQuestion("q", "device 'oslo': left before it answered"),
        CloseConnection(1),
        AdmitDevice("oslo", 7, ""),
    ]
    assert machine.handle(DeviceDisconnected(device="oslo", connection=1), 2.0) == [], "it is here all the same"
    assert machine.connected == {"oslo"}


def test_other_software_and_other_keys_are_refused() -> None:
    machine = fleet("oslo")
    old = machine.handle(DeviceConnected(device="oslo", id="oslo", connection=2, mismatch="torch '1.9'"), 0.0)
    assert old == [RefuseDevice("version", "torch '1.9'")] and machine.connected == {"oslo"}
    (other,) = machine.handle(DeviceConnected(device="oslo", id="other", connection=3), 0.0)
    assert isinstance(other, RefuseDevice) and other.about == "membership"
    (stranger,) = machine.handle(PeerIdentified(id="stranger", name=None), 0.0)
    assert isinstance(stranger, RefuseDevice) and "stranger is not in this fleet" in stranger.reason


def test_a_name_goes_to_another_key_only_after_the_first_is_out() -> None:
    machine = fleet("oslo")
    out = machine.handle(PeerIdentified(id="new", name="oslo"), 0.0)
    assert CutDevice("oslo") in out and machine.connected == frozenset() and machine.names == {"new": "oslo"}
    (refused,) = machine.handle(DeviceConnected(device="oslo", id="oslo", connection=2), 0.0)
    assert isinstance(refused, RefuseDevice)
    assert AdmitDevice("oslo", 3, "") in machine.handle(DeviceConnected(device="oslo", id="new", connection=3), 0.0)


def test_a_process_that_ended_is_told_to_its_run_until_the_device_is_called_again() -> None:
    machine = fleet("oslo", "tokyo")
    called = machine.handle(RunOpened(run="run", devices=("oslo",), others=("tokyo",)), 0.0)
    assert called == [StartWorker("oslo", 1, "run")] and machine.offers(("oslo", "tokyo"), "run") == ["tokyo"]
    assert AdmitWorker() in machine.handle(WorkerConnected(device="oslo", worker="oslo", run="run"), 0.0)
    machine.handle(WorkerFailed(device="oslo", connection=1, run="other", how="killed"), 0.0)
    assert machine.at_work("oslo", "run") and machine.failed("run") == {}
    machine.handle(WorkerFailed(device="oslo", connection=1, run="run", how="killed"), 0.0)
    assert machine.failed("run") == {"oslo": "killed"} and machine.offers(("oslo",), "run") == ["oslo"]
    assert machine.handle(DeviceCalled(device="oslo", run="run"), 0.0) == [StartWorker("oslo", 1, "run")]
    assert machine.failed("run") == {}
    assert machine.handle(RunClosed(run="run"), 0.0) == [StopWorker(1, "run"), StopWorker(2, "run")]
    assert not machine.at_work("oslo", "run") and machine.failed("run") == {}


def test_a_device_at_work_for_a_run_that_yields_is_called_away_from_it() -> None:
    machine = fleet("oslo", "tokyo")
    machine.handle(RunOpened(run="run", devices=("oslo",), others=("tokyo",)), 0.0)
    assert machine.offers(("oslo", "tokyo"), run="") == ["tokyo"], "without work"
    assert machine.handle(RunOpened(run="audit", devices=("oslo", "tokyo"), yields=True), 0.0) == [
        StartWorker("tokyo", 2, "audit")
    ]
    assert machine.offers(("oslo", "tokyo"), run="") == []
    assert machine.offers(("oslo", "tokyo"), "run") == ["tokyo"]
    assert machine.handle(DeviceCalled(device="tokyo", run="run"), 0.0) == [StartWorker("tokyo", 2, "run")]
    assert not machine.at_work("tokyo", "audit")
    assert machine.handle(DeviceCalled(device="tokyo", run="audit"), 0.0) == []


def test_a_device_that_drains_is_not_called_to_its_run_again() -> None:
    machine = fleet("oslo")
    machine.handle(RunOpened(run="run", devices=("oslo",)), 0.0)
    assert machine.handle(DrainRequested(device="oslo"), 0.0) == [AskToLeave("oslo")]
    assert machine.handle(DeviceCalled(device="oslo", run="run"), 0.0) == []
    assert machine.offers(("oslo",), "run") == []
    machine.handle(RunClosed(run="run"), 0.0)
    assert machine.handle(RunOpened(run="next", devices=("oslo",)), 0.0) == [StartWorker("oslo", 1, "next")]


@pytest.mark.parametrize("long_lived", [False, True])
@pytest.mark.parametrize("ends", ["disconnected", "replaced", "failed"])
def test_a_drained_device_stays_out_of_its_run_after_its_connection_or_its_process_ended(
    ends: str, long_lived: bool
) -> None:
    machine = fleet("oslo")
    machine.handle(RunOpened(run="run", devices=("oslo",), long_lived=long_lived), 0.0)
    machine.handle(WorkerConnected(device="oslo", worker="oslo", run="run"), 0.0)
    machine.handle(DrainRequested(device="oslo"), 0.0)
    out: list[FleetInstruction] = []
    if ends == "failed":
        out += machine.handle(WorkerFailed(device="oslo", connection=1, run="run", how="killed"), 0.0)
    if ends == "disconnected":
        out += machine.handle(DeviceDisconnected(device="oslo", connection=1), 0.0)
    if ends != "failed":
        out += machine.handle(DeviceConnected(device="oslo", id="oslo", connection=2), 0.0)
    assert not machine.at_work("oslo", "run") and machine.offers(("oslo",), "run") == []
    assert machine.leaves("oslo", "run"), "nor is it waited for"
    out += machine.handle(DeviceCalled(device="oslo", run="run"), 0.0)
    assert not any(isinstance(instruction, StartWorker) for instruction in out)
    machine.handle(RunClosed(run="run"), 0.0)
    machine.handle(RunOpened(run="run", devices=()), 0.0)
    assert machine.offers(("oslo",), "run") == ["oslo"], "the wish ended with the run"


def test_a_revoked_device_has_ended_for_its_run_and_is_refused_for_good() -> None:
    machine = fleet("oslo")
    machine.handle(RunOpened(run="run", devices=("oslo",)), 0.0)
    out = machine.handle(DeviceRevoked(device="oslo", id="oslo"), 0.0)
    assert CutDevice("oslo") in out and notes(out) == [f"oslo is out: {REVOKED}"]
    assert machine.failed("run") == {"oslo": REVOKED} and machine.names == {}
    assert machine.handle(DeviceCalled(device="oslo", run="run"), 0.0) == []
    assert machine.failed("run") == {"oslo": REVOKED}
    assert [type(i) for i in machine.handle(PeerIdentified(id="oslo", name="oslo"), 0.0)] == [RefuseDevice]
    assert machine.handle(WorkerConnected(device="oslo", worker="oslo", run="run"), 0.0) == [RefuseWorker()]


def test_a_worker_of_a_run_that_is_expected_waits_for_it() -> None:
    machine = fleet("oslo")
    asks = WorkerConnected(device="oslo", worker="oslo", run="run")
    assert machine.handle(asks, 0.0) == [RefuseWorker()]
    machine.handle(RunExpected(run="run", within_s=10.0), 0.0)
    assert machine.handle(asks, 9.9) == [HoldWorker()]
    assert machine.handle(asks, 10.0) == [RefuseWorker()]
    machine.handle(RunOpened(run="run", devices=()), 10.0)
    assert machine.handle(asks, 10.0) == [AdmitWorker()]
    assert machine.handle(WorkerConnected(device="oslo", worker="tokyo", run="run"), 10.0) == [RefuseWorker()]


def test_a_long_lived_run_calls_its_devices_whenever_they_connect() -> None:
    machine = fleet("bergen")
    out = machine.handle(RunOpened(run="run", devices=("oslo", "tokyo"), long_lived=True), 0.0)
    assert notes(out) == ["bergen waits: the run is for oslo, tokyo"]
    machine.handle(PeerIdentified(id="oslo", name="oslo"), 0.0)
    for number in (4, 5):
        out = machine.handle(DeviceConnected(device="oslo", id="oslo", connection=number), 0.0)
        assert out[-1] == StartWorker("oslo", number, "run")
    out = machine.handle(DeviceConnected(device="bergen", id="bergen", connection=6), 0.0)
    assert AdmitDevice("bergen", 6, "the run is for oslo, tokyo") in out


def test_who_is_awaited_is_said_now_and_then() -> None:
    machine = fleet("oslo")
    wait = WaitBegan(wait=1, devices=("oslo", "tokyo", "eve"), every=True, revoked=frozenset({"eve"}))
    eve = "eve (it was revoked: a new key and a ticket bring it back)"
    assert notes(machine.handle(wait, 0.0)) == [f"waiting for tokyo, {eve} to join (1 here)"]
    assert machine.handle(FleetTick(revoked=frozenset({"eve"})), REMIND_S - 1) == []
    assert machine.awaited == ("tokyo", eve) and machine.missing == {"tokyo", "eve"}
    assert notes(machine.handle(FleetTick(), REMIND_S)) == ["waiting for tokyo, eve to join (1 here), for 30 s"]
    assert machine.handle(WaitStopped(wait=1), REMIND_S) == [] and machine.awaited == ()
    any_of = WaitBegan(wait=2, devices=("tokyo", "oslo"), every=False)
    assert machine.handle(any_of, 0.0) == [EndWait(2, ("oslo",))]


def test_a_question_ends_in_time() -> None:
    machine = fleet("oslo")
    asked = DeviceAsked(question="q", device="oslo", within_s=0.5)
    assert machine.handle(asked, 0.0) == [PutQuestion("q", 1)]
    assert machine.handle(DeviceAnswered(question="q", device="tokyo"), 0.1) == []
    assert machine.handle(FleetTick(), 0.5) == [FailQuestion("q", "device 'oslo': did not answer for 0.5 s")]
    assert machine.handle(DeviceAnswered(question="q", device="oslo"), 0.6) == []
    gone = DeviceAsked(question="p", device="tokyo", within_s=0.5)
    assert machine.handle(gone, 1.0) == [FailQuestion("p", "device 'tokyo': left before it answered")]


EVENTS: tuple[MemberEvent, ...] = (
    DeviceConnected(device="oslo", id="oslo", connection=2),
    DeviceDisconnected(device="oslo", connection=1),
    DeviceCalled(device="oslo", run="run"),
    WorkerConnected(device="oslo", worker="oslo", run="run"),
    WorkerFailed(device="oslo", connection=1, run="run", how="killed"),
    DrainRequested(device="oslo"),
    RunClosed(run="run"),
    DeviceRevoked(device="oslo", id="oslo"),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_what_a_member_does_not_expect_is_late_or_in_its_table(event: MemberEvent) -> None:
    """In every phase that a device comes to, after every other event."""
    connected = DeviceConnected(device="oslo", id="oslo", connection=1)
    for path in [(), (0,), (1,), (2,), (2, 3), (2, 5)]:
        member = FleetMember("oslo", "oslo")
        if path:
            member.handle(connected)
        for at in path:
            if at:
                member.handle(EVENTS[at])
        before, dropped = member.phase, member.stale
        try:
            member.handle(event)
        except OutOfPhase:
            pytest.fail(f"{event} in phase {before}")
        late = member.stale > dropped
        assert late or type(event) in MEMBERSHIP.table[before], (before, event)
        assert not late or member.phase == before
