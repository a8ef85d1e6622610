"""Who is in a fleet, and what each device works for: rules that hold whatever happens, and in what order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.programs.ports import Asked, Recorder

from isthmus.protocol.fleet_membership import (
    REMIND_S,
    REVOKED,
    FleetMember,
    FleetMembership,
    FleetPort,
    MemberPort,
    Refusal,
)
from isthmus.protocol.run_messages import PeerPath
from isthmus.session.program import OVER

DEVICES = ("bergen", "oslo", "tokyo")
RUNS = ("first", "second", "third")


class World:
    """A host of the membership, and what it could see: connections that are open, revoked ids, who works for what. As
    a port it checks the rule of each call."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.machine = FleetMembership(self)
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

    def later(self) -> FleetMembership:
        """Return the membership, some time later."""
        self.now_s += self.draw.choice((0.0, 0.1, 5.0))
        self.machine.clock(self.now_s)
        return self.machine

    # The port

    def admit(self, device: str, connection: int, idle: str) -> None:
        assert device not in self.live, "the former connection is closed first"
        assert self.open[connection][1] not in self.revoked
        self.live[device] = connection

    def close_connection(self, connection: int) -> None:
        device, _ = self.open[connection]
        assert self.live.pop(device) == connection

    def cut(self, id: str) -> None:
        self.live = {d: c for d, c in self.live.items() if self.open[c][1] != id}
        self.works.pop(id.split()[0], None)

    def start_worker(self, device: str, connection: int, run: str) -> None:
        assert self.live.get(device, connection) == connection and self.open[connection][0] == device
        self.check_work(device, run)

    def stop_worker(self, connection: int, run: str) -> None:
        assert connection in self.live.values()

    def end_wait(self, wait: int, devices: Sequence[str]) -> None:
        wanted, every = self.waits.pop(wait)
        assert set(devices) <= self.live.keys() and (devices == wanted if every else devices)

    def put_question(self, question: str, connection: int) -> None:
        assert connection in self.live.values()

    def fail_question(self, question: str, reason: str) -> None:
        del self.questions[question]  # once, and no answer comes after it

    def note(self, text: str, device: str = "") -> None: ...

    def check_work(self, device: str, run: str) -> None:
        assert self.ids[device] not in self.revoked, "a revoked device never works"
        assert run in self.runs and self.works.get(device, run) in (run, *self.ended()), "at most one run"
        self.works[device] = run

    # What happens

    def ended(self) -> Collection[str]:
        return [run for run in RUNS if run not in self.runs]

    def connect(self, device: str, working: str = "") -> None:
        id = self.ids[device]
        refused = self.later().identify(id, None if id in self.revoked else device)
        assert (refused is not None) == (id in self.revoked)
        if id in self.revoked:
            return
        number = self.next()
        self.open[number] = (device, id)
        self.works.pop(device, None)
        if working:
            self.works[device] = working
        self.later().connect(device, id, number, working=working)

    def disconnect(self, number: int) -> None:
        device, _ = self.open[number]
        if self.live.get(device) == number:
            del self.live[device]
        self.later().disconnect(device, number)
        del self.open[number]

    def worker_connects(self, device: str, run: str) -> None:
        known = device in self.machine.names.values()
        admission = self.later().admit_worker(device, device, run)
        if admission == "admitted":
            assert known
            self.check_work(device, run)
        if admission == "held":
            assert known and run not in self.runs

    def fails(self, device: str, run: str) -> None:
        number = self.draw.choice([*self.open, self.next()])
        if self.live.get(device) == number and self.works.get(device) == run:
            del self.works[device]
        self.later().worker_failed(device, number, run, "ended")

    def revoke(self, device: str) -> None:
        id = self.ids[device]
        known = id in self.machine.names
        self.revoked.add(id)
        self.later().revoke(id)
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
                self.later().open_run(run, devices, DEVICES, long_lived=self.runs[run])
            case 5 if run in self.runs:
                del self.runs[run]
                self.works = {d: at for d, at in self.works.items() if at != run}
                self.later().close_run(run)
            case 6 | 7:
                self.worker_connects(device, run)
            case 8:
                self.fails(device, draw.choice((run, "")))
            case 9:
                self.later().drain(device)
            case 10 if draw.random() < 0.3:
                self.revoke(device)
            case 11 if self.ids[device] in self.revoked:
                self.ids[device] = f"{device} {self.next()}"
            case 12:
                number, devices = self.next(), tuple(draw.sample(DEVICES, draw.randint(1, 3)))
                self.waits[number] = (devices, draw.random() < 0.5)
                self.later().begin_wait(number, devices, every=self.waits[number][1])
            case 13:
                question = str(self.next())
                self.questions[question] = device
                self.later().ask(question, device, 60.0)
            case 14 if self.questions:
                question, asked = draw.choice(list(self.questions.items()))
                taken = self.later().answered(question, device)
                assert taken == (device == asked)
                if taken:
                    del self.questions[question]
            case 15:
                self.later().expect_run(run, 10.0)
            case _:
                offered = self.machine.offers(DEVICES, run)
                assert set(offered) <= self.live.keys()
                for other in offered:
                    assert self.works.get(other, "") in ("", *self.ended())
                self.later().call(device, run)


@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_happens_the_rules_of_a_fleet_hold(seed: int) -> None:
    """No device has two live connections, none that is revoked works, none works for two runs."""
    world = World(seed)
    for _ in range(150):
        world.step()
        assert world.machine.connected == world.live.keys()
        assert not {world.ids[d] for d in world.live} & world.revoked
        assert set(world.machine.names) == {m.id for d in DEVICES if (m := world.machine.member(d)) and not m.over}


@given(seed=st.integers(0, 2**32 - 1))
def test_every_wait_ends(seed: int) -> None:
    """A question with an answer, its device's connection or its time; a wait when its devices come, or by who waits."""
    world = World(seed)
    for _ in range(80):
        world.step()
    world.now_s += 60.0
    world.later().tick()
    assert world.questions == {}
    for device in DEVICES:
        if world.ids[device] in world.revoked:
            world.ids[device] = f"{device} {world.next()}"
        world.connect(device)
    assert world.waits == {} and world.machine.awaited == ()


class Fleet:
    """A membership at time 0, and what it asks. The devices are here, each on the connection of its number."""

    def __init__(self, *devices: str) -> None:
        self.port = Recorder(FleetPort)
        self.machine = FleetMembership(self.port.port)
        for number, device in enumerate(devices, 1):
            self.machine.identify(device, device)
            self.machine.connect(device, device, number)
        self.port.took()

    def at(self, now_s: float) -> FleetMembership:
        self.machine.clock(now_s)
        return self.machine

    def took(self) -> list[Asked]:
        return self.port.took()

    def notes(self) -> list[object]:
        """Return the lines among what was asked since the last call."""
        return [text for what, text, *_ in self.port.took() if what == "note"]


def test_a_new_connection_takes_the_place_of_the_old_one() -> None:
    fleet = Fleet("oslo")
    machine = fleet.machine
    machine.ask("q", "oslo", 60.0)
    assert fleet.took() == [("put_question", "q", 1)]
    assert fleet.at(1.0).connect("oslo", "oslo", 7) is None
    assert fleet.took() == [
        ("fail_question", "q", "device 'oslo': left before it answered"),
        ("close_connection", 1),
        ("admit", "oslo", 7, ""),
        ("note", "oslo is here", "oslo"),
    ]
    fleet.at(2.0).disconnect("oslo", 1)
    assert fleet.took() == [], "it is here all the same"
    assert machine.connected == {"oslo"}


def test_other_software_and_other_keys_are_refused() -> None:
    fleet = Fleet("oslo")
    machine = fleet.machine
    assert machine.connect("oslo", "oslo", 2, mismatch="torch '1.9'") == Refusal("version", "torch '1.9'")
    assert machine.connected == {"oslo"}
    other = machine.connect("oslo", "other", 3)
    assert other is not None and other.about == "membership"
    stranger = machine.identify("stranger", None)
    assert stranger is not None and "stranger is not in this fleet" in stranger.reason
    assert fleet.took() == []


def test_a_name_goes_to_another_key_only_after_the_first_is_out() -> None:
    fleet = Fleet("oslo")
    machine = fleet.machine
    assert machine.identify("new", "oslo") is None
    assert ("cut", "oslo") in fleet.took()
    assert machine.connected == frozenset() and machine.names == {"new": "oslo"}
    assert isinstance(machine.connect("oslo", "oslo", 2), Refusal)
    assert fleet.took() == []
    assert machine.connect("oslo", "new", 3) is None
    assert ("admit", "oslo", 3, "") in fleet.took()


def test_a_process_that_ended_is_told_to_its_run_until_the_device_is_called_again() -> None:
    fleet = Fleet("oslo", "tokyo")
    machine = fleet.machine
    machine.open_run("run", ("oslo",), ("tokyo",))
    assert fleet.took() == [("start_worker", "oslo", 1, "run")]
    assert machine.offers(("oslo", "tokyo"), "run") == ["tokyo"]
    assert machine.admit_worker("oslo", "oslo", "run") == "admitted"
    machine.worker_failed("oslo", 1, "other", "killed")
    assert machine.at_work("oslo", "run") and machine.failed("run") == {}
    machine.worker_failed("oslo", 1, "run", "killed")
    assert machine.failed("run") == {"oslo": "killed"} and machine.offers(("oslo",), "run") == ["oslo"]
    machine.call("oslo", "run")
    assert fleet.took() == [("start_worker", "oslo", 1, "run")]
    assert machine.failed("run") == {}
    machine.close_run("run")
    assert fleet.took() == [("stop_worker", 1, "run"), ("stop_worker", 2, "run")]
    assert not machine.at_work("oslo", "run") and machine.failed("run") == {}


def test_a_device_at_work_for_a_run_that_yields_is_called_away_from_it() -> None:
    fleet = Fleet("oslo", "tokyo")
    machine = fleet.machine
    machine.open_run("run", ("oslo",), ("tokyo",))
    assert machine.offers(("oslo", "tokyo"), run="") == ["tokyo"], "without work"
    fleet.took()
    machine.open_run("audit", ("oslo", "tokyo"), yields=True)
    assert fleet.took() == [("start_worker", "tokyo", 2, "audit")]
    assert machine.offers(("oslo", "tokyo"), run="") == []
    assert machine.offers(("oslo", "tokyo"), "run") == ["tokyo"]
    machine.call("tokyo", "run")
    assert fleet.took() == [("start_worker", "tokyo", 2, "run")]
    assert not machine.at_work("tokyo", "audit")
    machine.call("tokyo", "audit")
    assert fleet.took() == []


def test_a_device_that_drains_is_not_called_to_its_run_again() -> None:
    fleet = Fleet("oslo")
    machine = fleet.machine
    machine.open_run("run", ("oslo",))
    fleet.took()
    machine.drain("oslo")
    machine.call("oslo", "run")
    assert fleet.took() == []
    assert machine.offers(("oslo",), "run") == []
    machine.close_run("run")
    fleet.took()
    machine.open_run("next", ("oslo",))
    assert fleet.took() == [("start_worker", "oslo", 1, "next")]


def test_the_run_that_a_device_works_for_hears_once_that_it_is_to_leave() -> None:
    machine = Fleet("oslo", "tokyo").machine
    machine.open_run("one", ("oslo",))
    machine.open_run("other", ("tokyo",))
    for device in ("oslo", "bergen"):
        machine.drain(device)
    assert machine.take_leaving("other") == []
    assert machine.take_leaving("one") == ["oslo"] and machine.take_leaving("one") == []


@pytest.mark.parametrize("long_lived", [False, True])
@pytest.mark.parametrize("ends", ["disconnected", "replaced", "failed"])
def test_a_drained_device_stays_out_of_its_run_after_its_connection_or_its_process_ended(
    ends: str, long_lived: bool
) -> None:
    fleet = Fleet("oslo")
    machine = fleet.machine
    machine.open_run("run", ("oslo",), long_lived=long_lived)
    machine.admit_worker("oslo", "oslo", "run")
    machine.drain("oslo")
    fleet.took()
    if ends == "failed":
        machine.worker_failed("oslo", 1, "run", "killed")
    if ends == "disconnected":
        machine.disconnect("oslo", 1)
    if ends != "failed":
        machine.connect("oslo", "oslo", 2)
    assert not machine.at_work("oslo", "run") and machine.offers(("oslo",), "run") == []
    assert machine.leaves("oslo", "run"), "nor is it waited for"
    machine.call("oslo", "run")
    assert not any(what == "start_worker" for what, *_ in fleet.took())
    machine.close_run("run")
    machine.open_run("run", ())
    assert machine.offers(("oslo",), "run") == ["oslo"], "the wish ended with the run"


def test_a_revoked_device_has_ended_for_its_run_and_is_refused_for_good() -> None:
    fleet = Fleet("oslo")
    machine = fleet.machine
    machine.open_run("run", ("oslo",))
    fleet.took()
    machine.revoke("oslo")
    assert fleet.took() == [("note", f"oslo is out: {REVOKED}", "oslo"), ("cut", "oslo")]
    assert machine.failed("run") == {"oslo": REVOKED} and machine.names == {}
    machine.call("oslo", "run")
    assert machine.failed("run") == {"oslo": REVOKED}
    assert isinstance(machine.identify("oslo", "oslo"), Refusal)
    assert machine.admit_worker("oslo", "oslo", "run") == "refused"
    assert fleet.took() == []


def test_a_worker_of_a_run_that_is_expected_waits_for_it() -> None:
    fleet = Fleet("oslo")
    assert fleet.machine.admit_worker("oslo", "oslo", "run") == "refused"
    fleet.machine.expect_run("run", 10.0)
    assert fleet.at(9.9).admit_worker("oslo", "oslo", "run") == "held"
    assert fleet.at(10.0).admit_worker("oslo", "oslo", "run") == "refused"
    fleet.machine.open_run("run", ())
    assert fleet.machine.admit_worker("oslo", "oslo", "run") == "admitted"
    assert fleet.machine.admit_worker("oslo", "tokyo", "run") == "refused"
    assert fleet.took() == []


def test_idle_devices_are_of_the_kind_of_all_that_are_named() -> None:
    fleet = Fleet("bergen", "oslo", "tokyo")
    machine = fleet.machine
    kinds = {"bergen": "a", "oslo": "b", "tokyo": "a", "rome": "c"}
    assert machine.idle((), kinds) == ["bergen", "oslo", "tokyo"]
    assert machine.idle(("bergen",), kinds) == ["bergen", "tokyo"]
    assert machine.idle(("bergen", "oslo"), kinds) == [], "none is of two kinds"
    assert machine.idle(("rome",), kinds) == machine.idle(("unknown",), kinds) == []
    machine.open_run("run", ("tokyo",))
    assert machine.idle(("bergen",), kinds) == ["bergen"]


def test_a_lost_device_returns_if_it_is_here_or_is_brought_back() -> None:
    machine = Fleet("oslo").machine
    machine.brought_back = machine.in_queue = frozenset({"oslo", "tokyo"})
    machine.open_run("run", ("oslo",))
    assert machine.queued == {"tokyo"}
    assert [machine.returns(device, "run") for device in DEVICES] == [False, True, True]
    machine.disconnect("oslo", 1)
    machine.brought_back = frozenset()
    assert machine.queued == {"oslo", "tokyo"} and not any(machine.returns(device, "run") for device in DEVICES)
    machine.connect("oslo", "oslo", 2, working="run")
    assert machine.returns("oslo", "run")
    machine.drain("oslo")
    assert not machine.returns("oslo", "run")


def test_links_are_those_of_devices_at_work_for_a_run_that_goes_on() -> None:
    machine = Fleet("oslo").machine
    path = PeerPath(device="tokyo", relayed=False, latency_s=0.1)
    machine.linked("tokyo", "run", (path,))
    machine.linked("oslo", "run", (path,))
    assert machine.links == {} and not machine.works("oslo")
    machine.open_run("run", ("oslo",))
    assert machine.links == {"oslo": (path,)} and machine.works("oslo")
    machine.open_run("other", ())
    machine.linked("oslo", "other", (path,))
    assert machine.links == {}
    machine.close_run("run")
    assert not machine.works("oslo")


def test_a_long_lived_run_calls_its_devices_whenever_they_connect() -> None:
    fleet = Fleet("bergen")
    machine = fleet.machine
    machine.open_run("run", ("oslo", "tokyo"), long_lived=True)
    assert fleet.took() == [("note", "bergen waits: the run is for oslo, tokyo", "")]
    machine.identify("oslo", "oslo")
    for number in (4, 5):
        machine.connect("oslo", "oslo", number)
        assert fleet.took()[-1] == ("start_worker", "oslo", number, "run")
    machine.connect("bergen", "bergen", 6)
    assert ("admit", "bergen", 6, "the run is for oslo, tokyo") in fleet.took()


def test_who_is_awaited_is_said_now_and_then() -> None:
    fleet = Fleet("oslo")
    machine = fleet.machine
    revoked = frozenset({"eve"})
    eve = "eve (it was revoked: a new key and a ticket bring it back)"
    machine.begin_wait(1, ("oslo", "tokyo", "eve"), every=True, revoked=revoked)
    assert fleet.notes() == [f"waiting for tokyo, {eve} to join (1 of 3 are here)"]
    fleet.at(REMIND_S - 1).tick(revoked)
    assert fleet.took() == []
    assert machine.awaited == ("tokyo", eve)
    fleet.at(REMIND_S).tick()
    assert fleet.notes() == ["waiting for tokyo, eve to join (1 of 3 are here), for 30 s"]
    machine.stop_wait(1)
    assert fleet.took() == [] and machine.awaited == ()
    fleet.at(0.0).begin_wait(2, ("tokyo", "oslo"), every=False)
    assert fleet.took() == [("end_wait", 2, ("oslo",))]


def test_a_question_ends_in_time() -> None:
    fleet = Fleet("oslo")
    fleet.machine.ask("q", "oslo", 0.5)
    assert fleet.took() == [("put_question", "q", 1)]
    assert not fleet.at(0.1).answered("q", "tokyo")
    fleet.at(0.5).tick()
    assert fleet.took() == [("fail_question", "q", "device 'oslo': did not answer for 0.5 s")]
    assert not fleet.at(0.6).answered("q", "oslo")
    fleet.at(1.0).ask("p", "tokyo", 0.5)
    assert fleet.took() == [("fail_question", "p", "device 'tokyo': left before it answered")]


CALLS: tuple[tuple[str, Callable[[FleetMember], None]], ...] = (
    ("connect", lambda member: member.connect(1, "")),
    ("connect", lambda member: member.connect(2, "run")),
    ("disconnect", lambda member: member.disconnect(1)),
    ("call", lambda member: member.call("run")),
    ("call", lambda member: member.call("other")),
    ("admit_worker", lambda member: member.admit_worker("run")),
    ("worker_failed", lambda member: member.worker_failed(1, "run")),
    ("drain", lambda member: member.drain()),
    ("close_run", lambda member: member.close_run("run")),
    ("revoke", lambda member: member.revoke()),
)
ENDS = {"disconnect": "absent", "worker_failed": "idle", "drain": "draining", "close_run": "idle"}
FOLLOWING = {
    "absent": {"call": "absent", "admit_worker": "absent", "drain": "absent", "close_run": "absent"},
    "idle": {"disconnect": "absent", "call": "called", "admit_worker": "working", "drain": "idle"},
    "called": {**ENDS, "call": "called", "admit_worker": "working"},
    "working": {**ENDS, "call": "called working", "admit_worker": "working"},
    "draining": {**ENDS, "connect": "draining", "call": "called draining", "admit_worker": "draining"},
}
"""The phases that may follow, by phase and call, besides `ALWAYS`. What is in neither is late."""
ALWAYS = {"connect": "idle working", "revoke": OVER}


@pytest.mark.parametrize("connected", [False, True])
def test_a_call_is_late_or_leads_to_a_phase_that_may_follow(connected: bool) -> None:
    """All walks of three calls."""
    for walk in itertools.product(CALLS, repeat=3):
        port = Recorder(MemberPort)
        member = FleetMember(port.port, "oslo", "oslo")
        if connected:
            member.connect(1, "")
        for name, call in walk:
            before, dropped = member.phase, member.stale
            call(member)
            if member.stale > dropped or before == OVER:
                assert member.phase == before and port.took() == []
            else:
                expected = f"{FOLLOWING[before].get(name, '')} {ALWAYS.get(name, '')}".split()
                assert member.phase in expected, (before, name)
                port.took()
