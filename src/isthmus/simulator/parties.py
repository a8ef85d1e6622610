"""Simulated devices of any program: processes that start, die, fall silent and go on, and the links between them.

Modelled links: a queue that drains at the link's bandwidth, then a delay line of its latency.

    now ─► wait until the link is free ─► bytes / bandwidth ─► latency ─► arrived
           (first come, first served)     the link is busy     overlaps with later messages

One per directed pair of devices. The runtime's emulated links follow the same two formulas:
free = max(free, now) + bytes / bandwidth, and arrival = free + latency.

Links that leave a site with a limited uplink share it: a message has left when both its link and the uplink have
passed its last byte.

    uplink   ├─ a ─┤├─ b ─┤      both leave the site at once, each over its own link
    link a   ├─── a ───┤
    link b   ├───── b ────┤      the uplink was later
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from isthmus.fleet import Fleet, Link
from isthmus.plans.plan import device_of
from isthmus.protocol.compute_lane import ComputeLane
from isthmus.session.session import SOON_S, TICK_S, Observation, Session
from isthmus.simulator.clock import Jitter, VirtualClock
from isthmus.simulator.options import NOT_AT_WORK, Effects, Fault, SimulationOptions


class Transmission(NamedTuple):
    """The times at which a message's first and last bytes leave and arrive."""

    start_s: float
    sent_s: float
    arrival_start_s: float
    arrived_s: float


class Uplink:
    """The capacity that all links out of a site share. A message gets the time that earlier messages left free.

    (Rejected: a plain queue. A message that waits for its own slow link would hold up all other links.)
    """

    def __init__(self, bandwidth_bytes_per_s: float) -> None:
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._busy: list[tuple[float, float]] = []  # start and end, by start, apart from each other

    def occupy(self, now_s: float, start_s: float, size_bytes: float) -> float:
        """Return when the last byte has passed, if the first may pass at `start_s`. `now_s` never goes back."""
        left_s = size_bytes / self._bandwidth_bytes_per_s
        before = [span for span in self._busy if now_s < span[1] <= start_s]
        later = [span for span in self._busy if span[1] > start_s]
        first_s, end_s = start_s, start_s
        while later and later[0][0] < end_s + left_s:
            busy_start_s, busy_end_s = later.pop(0)
            left_s -= max(0.0, busy_start_s - end_s)
            first_s, end_s = min(first_s, busy_start_s), busy_end_s
        end_s += left_s
        self._busy = [*before, (first_s, end_s), *later]
        return end_s


class Wire:
    """One direction between two devices.

    `message_s` is the time that a message occupies the link besides its bytes. `factor` multiplies each duration.
    Messages arrive in the order in which they were sent, whatever the factors.
    """

    def __init__(
        self,
        link: Link,
        message_s: float = 0.0,
        factor: Callable[[], float] = lambda: 1.0,
        uplink: Uplink | None = None,
    ) -> None:
        self._link = link
        self._message_s = message_s
        self._factor = factor
        self._uplink = uplink
        self._free_s = 0.0
        self._last_arrival_s = 0.0

    def send(self, now_s: float, size_bytes: int) -> Transmission:
        start = max(self._free_s, now_s)
        self._free_s = start + (self._message_s + self._bytes_s(start, size_bytes)) * self._factor()
        if self._uplink:
            self._free_s = max(self._free_s, self._uplink.occupy(now_s, start, size_bytes))
        trace = self._link.trace
        latency = trace.latency_at(self._free_s) if trace else self._link.latency_s
        self._last_arrival_s = max(self._last_arrival_s, self._free_s + latency * self._factor())
        return Transmission(start, self._free_s, self._last_arrival_s - (self._free_s - start), self._last_arrival_s)

    def _bytes_s(self, start_s: float, size_bytes: int) -> float:
        if self._link.trace is not None:
            return self._link.trace.sent_s(start_s, size_bytes) - start_s
        return size_bytes / self._link.bandwidth_bytes_per_s


class Network:
    """The wires of a fleet, made when first used."""

    def __init__(self, fleet: Fleet, message_s: float, factor: Callable[[], float]) -> None:
        self._fleet = fleet
        self._message_s = message_s
        self._factor = factor
        self._wires: dict[tuple[str, str], Wire] = {}
        self._uplinks: dict[str, Uplink] = {}

    def send(self, now_s: float, source: str, target: str, size_bytes: int) -> Transmission:
        """Put a message of so many bytes on the link between two devices. UserError when the fleet has none."""
        wire = self._wires.get((source, target))
        if wire is None:
            uplink = self._uplink(source, target)
            wire = Wire(self._fleet.link(source, target), self._message_s, self._factor, uplink)
            self._wires[source, target] = wire
        return wire.send(now_s, size_bytes)

    def _uplink(self, source: str, target: str) -> Uplink | None:
        site = self._fleet.uplink(source, target)
        if site is None or site.uplink_bytes_per_s is None:
            return None
        return self._uplinks.setdefault(site.region, Uplink(site.uplink_bytes_per_s))


Act = Callable[[], None]
WorkerT = TypeVar("WorkerT", bound="PartyWorker")


class PartyWorker(Protocol):
    """A worker of a device, as its coordinator knows it."""

    @property
    def name(self) -> str: ...


class Party(Generic[WorkerT]):
    """A device that runs. It is made anew when its process starts again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lane = ComputeLane()
        self.workers: dict[str, WorkerT] = {}
        self.died_s = math.inf
        self.waiting: list[Act] | None = None  # actions that follow once it goes on, while it is silent


class Parties(Generic[WorkerT]):
    """Time, devices and faults. A subclass has what one program's workers do. No decision is made here."""

    def __init__(self, options: SimulationOptions) -> None:
        self.clock = VirtualClock(options.seed)
        self.devices: dict[str, Party[WorkerT]] = {}  # those that run
        self.setting_up = False  # whether connecting and starting take time: before a run's first item they take none
        self._options = options
        self._factor = Jitter(options.jitter, options.seed)
        self.effects = Effects(options.faults)
        self._slow: dict[str, float] = {}
        self._cuts: dict[frozenset[str], float] = {}  # seconds until which nothing passes between two devices, by pair

    # What a program's world says

    def noticed(self, device: Party[WorkerT], after_s: Callable[[str], float], how: str) -> None:
        """Devices that have links to this one find them broken, each after so long."""

    def blame(self, name: str, other: str) -> None:
        """A device has heard nothing from another one for too long."""

    def reaches(self, worker_id: str) -> bool:
        """Whether the links of a worker's device to the coordinator are whole."""
        return True

    def dials(self, worker_id: str) -> bool:
        """Whether a worker that is not connected tries again."""
        return self.worker(worker_id) is not None

    def latency_s(self, source: str, target: str) -> float:
        """Seconds until one device notices what happens at the end of another one's link."""
        return 0.0

    def is_at_work(self, name: str) -> bool:
        """Whether a fault of the device changes anything now."""
        return name in self.devices

    # Time

    def later(self, seconds: float, lane: object, act: Act) -> None:
        self.clock.at(self.clock.now_s + seconds, str(lane) if not isinstance(lane, tuple) else lane, act)

    def on(self, device: Party[WorkerT], act: Act) -> None:
        """Now, or when the device goes on; never if it is gone."""
        if self.devices.get(device.name) is not device:
            return
        if device.waiting is not None:
            device.waiting.append(partial(self.on, device, act))
        else:
            act()

    def slow(self, device: str, factor: float) -> None:
        self._slow[device] = factor

    def slowed(self, device: str) -> float:
        """Computing on the device, which begins now, takes so many times longer."""
        if (factor := self._slow.get(device)) is None:
            return 1.0
        self.effects.met("slow", device)
        return factor

    # What goes wrong

    def kill(self, name: str) -> Party[WorkerT] | None:
        """The device's process dies; returns what it was. Its neighbours notice."""
        device = self.devices.pop(name, None)
        if device is not None:
            device.died_s = self.clock.now_s
            self.noticed(device, lambda other: self.latency_s(other, name), "closed the connection")
        return device

    def silence(self, device: Party[WorkerT]) -> None:
        """The device does nothing from now on; after a while its neighbours give up."""
        device.waiting = []
        waiting = device.waiting

        def noticed() -> None:
            if device.waiting is waiting:
                self.noticed(device, lambda other: 0.0, f"is silent for {self._options.recovery.timeout_s:g} s")

        self.later(self._options.recovery.timeout_s, ("silent", device.name), noticed)

    def wake(self, device: Party[WorkerT]) -> None:
        waiting, device.waiting = device.waiting, None
        for act in waiting or ():
            act()

    def cut(self, one: str, other: str, lasts_s: float) -> None:
        """Nothing passes between two devices for so long."""
        now_s, timeout_s = self.clock.now_s, self._options.recovery.timeout_s
        self._cuts[frozenset((one, other))] = max(self._cut_until_s(one, other), now_s + lasts_s)
        if lasts_s < timeout_s:
            return
        for a, b in ((one, other), (other, one)):
            self.later(timeout_s, ("cut", a), partial(self.blame, a, b))

    def _cut_until_s(self, one: str, other: str) -> float:
        return self._cuts.get(frozenset((one, other)), 0.0) if self._cuts else 0.0

    def cut_until_s(self, one: str, other: str) -> float:
        """Until when nothing passes between two devices, one of which would send now; 0 if their link is whole."""
        until_s = self._cut_until_s(one, other)
        if until_s > self.clock.now_s:
            self.effects.met("link", one, other)
        return until_s

    def worker(self, worker_id: str) -> WorkerT | None:
        """If its device runs."""
        device = self.devices.get(device_of(worker_id))
        return device.workers.get(worker_id) if device is not None else None


class LinkedParties(Parties[WorkerT]):
    """Devices that send each other messages over the links of a fleet."""

    def __init__(self, fleet: Fleet, options: SimulationOptions) -> None:
        super().__init__(options)
        self._fleet = fleet
        self._network = Network(fleet, options.overheads.message_s, self._factor)

    def latency_s(self, source: str, target: str) -> float:
        return self._fleet.link(source, target).latency_s

    def bandwidth(self, source: str, target: str) -> float:
        return self._fleet.link(source, target).bandwidth_bytes_per_s


class Hearing(Protocol[WorkerT]):
    """The coordinator hears of devices."""

    def made(self, worker_id: str, device: Party[WorkerT]) -> WorkerT:
        """Return a worker of a process that has started."""
        ...

    def arrived(self, worker: WorkerT) -> None:
        """It is connected."""

    def disconnected(self, device: str, reason: str) -> None: ...


class ControlSession(NamedTuple, Generic[WorkerT]):
    """A connection; a worker that connects again has another one."""

    number: int
    worker: WorkerT
    device: Party[WorkerT]


class Connections(Generic[WorkerT]):
    def __init__(self, world: Parties[WorkerT], options: SimulationOptions, hearing: Hearing[WorkerT]) -> None:
        self._world = world
        self._options = options
        self._hearing = hearing
        self._factor = Jitter(options.jitter, options.seed + 1)
        self._numbers = itertools.count(1)
        self._arrivals: dict[tuple[str, int], float] = {}
        self._released: set[str] = set()  # devices that do not come back
        self.open: dict[str, ControlSession[WorkerT]] = {}  # open sessions by worker id
        self.answered = True  # whether the coordinator is there
        self.over = False

    def latency_s(self) -> float:
        """Seconds that a message takes; 0 before the first item."""
        return self._options.control_latency_s if self._world.setting_up else 0.0

    def up(
        self, worker: WorkerT, act: Callable[[], None], seconds: float = 0.0, latency_s: float | None = None
    ) -> None:
        """A message to the coordinator; it is lost with the connection that it travels on. `latency_s`: of the device's
        own way."""
        session = self.open.get(worker.name)
        if session is None:
            return

        def arrive() -> None:
            if self.open.get(worker.name) == session:
                act()

        self._travel("coordinator", session, arrive, seconds, latency_s)

    def down(
        self,
        worker_id: str,
        act: Callable[[WorkerT], None],
        seconds: float = 0.0,
        latency_s: float | None = None,
    ) -> None:
        """A message from the coordinator, which takes `seconds` besides the latency."""
        session = self.open.get(worker_id)
        if session is None:
            return
        worker = session.worker

        def arrive() -> None:
            if self.open.get(worker_id) == session:
                self._world.on(session.device, partial(act, worker))

        self._travel("control", session, arrive, seconds, latency_s)

    def _travel(
        self,
        way: str,
        session: ControlSession[WorkerT],
        arrive: Callable[[], None],
        seconds: float,
        latency_s: float | None,
    ) -> None:
        """Messages on one connection stay in order, and their bytes follow each other."""
        now_s, key = self._world.clock.now_s, (way, session.number)
        wait_s = (self.latency_s() if latency_s is None else latency_s) * self._factor()
        free_s = max(now_s + wait_s, self._arrivals.get(key, 0.0))
        arrival_s = self._arrivals[key] = free_s + seconds
        self._world.clock.at(arrival_s, (way, session.worker.name), arrive)

    def join(self, worker_id: str) -> None:
        """Connect to the coordinator, or try again: it may be away, or not have noticed that the last connection is
        closed. Starts the device's process if it has none."""
        name = device_of(worker_id)
        if self.over or name in self._released or worker_id in self.open:
            return
        device = self._world.devices.get(name)
        if device is None:
            device = self._world.devices[name] = Party(name)
            self._world.effects.met("join", name)
        if not self.answered or device.waiting is not None or not self._world.reaches(worker_id):
            self._redial(worker_id)
            return
        worker = device.workers.get(worker_id)
        if worker is None:
            worker = device.workers[worker_id] = self._hearing.made(worker_id, device)
        self.open[worker_id] = ControlSession(next(self._numbers), worker, device)
        self._hearing.arrived(worker)

    def _redial(self, worker_id: str) -> None:
        def again() -> None:
            if self._world.dials(worker_id):
                self.join(worker_id)

        self._world.later(self._options.recovery.redial_s, ("dial", worker_id), again)

    def hang_up(self, worker_id: str) -> None:
        """The coordinator closes a connection: a device that is alive comes again."""
        if self.open.pop(worker_id, None) is not None and self._world.worker(worker_id) is not None:
            self._redial(worker_id)

    def release(self, worker_id: str) -> WorkerT | None:
        """A device has left."""
        self._released.add(device_of(worker_id))
        session = self.open.pop(worker_id, None)
        return session.worker if session is not None else None

    def crash(self) -> None:
        """The coordinator is away: devices try again until it is back."""
        self.answered = False
        closed, self.open = list(self.open), {}
        for worker_id in closed:
            self._redial(worker_id)

    def closed(self, device: Party[WorkerT], reason: str, after_s: float = 0.0) -> None:
        """The connections of a device are closed; the coordinator notices, unless they are history."""
        for worker_id in device.workers:
            if (session := self.open.get(worker_id)) is not None:
                noticed = partial(self._noticed, worker_id, session, reason)
                self._world.later(after_s, ("notice", worker_id), noticed)

    def _noticed(self, worker_id: str, session: ControlSession[WorkerT], reason: str) -> None:
        if self.open.get(worker_id) == session:
            self._hearing.disconnected(worker_id, reason)


class Strikes:
    def __init__(
        self,
        world: Parties[Any],
        connections: Connections[Any],
        options: SimulationOptions,
        restart: Callable[[], None],
        *,
        sees: bool = True,
    ) -> None:
        """`restart` starts a coordinator that was away again. `sees`: whether it sees processes of devices."""
        self._world = world
        self._connections = connections
        self._options = options
        self._restart = restart
        self._sees = sees
        self._ended: dict[str, str] = {}
        self._called: set[str] = set()  # devices whose process is on its way
        self._returning: set[str] = set()
        self._offers: set[str] = set()
        self._leaving: set[str] = set()

    @property
    def answered(self) -> bool:
        """Return whether the coordinator is there."""
        return self._connections.answered

    def called(self, name: str) -> None:
        """The device's process is started."""
        self._ended.pop(name, None)
        self._called.add(name)

    def call(self, name: str, worker_id: str = "") -> None:
        """Start the device's process, which connects."""
        self.called(name)
        seconds = self._options.recovery.process_s
        self._world.later(seconds, ("call", worker_id or name), partial(self._connections.join, worker_id or name))

    def tick(self) -> Observation:
        """Return the coordinator's observation of the devices now."""
        if not self._sees:
            return Observation()
        here = frozenset(self._world.devices)
        self._called -= here
        leaving, self._leaving = frozenset(self._leaving), set()
        return Observation(
            ended={device: how for device, how in self._ended.items() if device not in here},
            starting=here | self._called,
            returning=frozenset(self._returning - here),
            offers=frozenset(self._offers - here - self._called),
            leaving=leaving,
        )

    def struck(self, fault: Fault) -> None:
        """It is time for a fault, which the caller lets strike: note whether it can have an effect."""
        name, why_none = fault.device, ""
        here, party = self._world.is_at_work(name), self._world.devices.get(name)
        match fault.kind:
            case "coordinator":
                why_none = "" if self._connections.answered else "the coordinator was away already"
            case "join":
                why_none = "it was there already" if here else ""
            case "lost" | "silent" | "leave":
                offered = fault.kind == "leave" and name in self._offers | self._returning
                why_none = "" if here or offered else NOT_AT_WORK
                if fault.kind == "silent" and party is not None and party.waiting is not None:
                    why_none = "it was silent already"
            case "slow" | "link":
                pass
        self._world.effects.struck(fault, why_none)

    def strike(self, fault: Fault) -> None:
        """Now."""
        match fault.kind:
            case "lost":
                self._kill(fault)
            case "silent":
                self._silence(fault)
            case "link":
                self._world.cut(fault.device, fault.other, fault.lasts_s)
            case "coordinator":
                if self._connections.answered:
                    self._connections.crash()
                    self._world.later(fault.lasts_s, "restart", self._restart)
            case "slow":
                self._world.slow(fault.device, fault.factor)
            case "join":
                self._offers.add(fault.device)
            case "leave":
                self._leaving.add(fault.device)
                self._offers.discard(fault.device)
                self._returning.discard(fault.device)

    def _kill(self, fault: Fault) -> None:
        name = fault.device
        device = self._world.kill(name)
        if device is None:
            return
        self._ended[name] = "its process was killed by SIGKILL"
        self._offers.discard(name)
        self._returning.discard(name)
        self._connections.closed(device, "its connection closed", self._connections.latency_s())
        if math.isfinite(fault.lasts_s):
            self._returning.add(name)
            self._world.later(fault.lasts_s, ("back", name), partial(self._offers.add, name))

    def _silence(self, fault: Fault) -> None:
        device = self._world.devices.get(fault.device)
        if device is None or device.waiting is not None:
            return
        self._world.silence(device)
        waiting, timeout_s = device.waiting, self._options.recovery.timeout_s

        def noticed() -> None:
            if device.waiting is waiting:
                self._connections.closed(device, f"silent for {timeout_s:g} s")

        def goes_on() -> None:
            if device.waiting is waiting:
                self._world.wake(device)

        self._world.later(timeout_s, ("notice", fault.device), noticed)
        if math.isfinite(fault.lasts_s):
            self._world.later(fault.lasts_s, ("wake", fault.device), goes_on)


SessionT = TypeVar("SessionT", bound=Session)


class SimulatedHost(Generic[SessionT]):
    def __init__(self, session: SessionT, clock: VirtualClock, strikes: Strikes, *, regular: bool) -> None:
        """`regular`: whether anything can be seen at regular times, as faults can."""
        self.session = session
        self._clock, self._strikes, self._regular = clock, strikes, regular
        self._looked_s = -math.inf
        self._due_s = math.inf  # when the next look is

    def replace(self, session: SessionT) -> None:
        """Another coordinator is there from now on. Devices that run connect before it looks at them."""
        self.session, self._looked_s = session, self._clock.now_s
        self._plan_look()

    def tell(self, happened: Callable[[SessionT], None], *, looks: bool = False) -> None:
        """Tell the session, if it is there. `looks`: as a host does after a connection has closed."""
        session = self.session
        if session.over or not self._strikes.answered:
            return
        session.clock(self._clock.now_s)
        happened(session)
        if looks or session.urgent:
            self._look()
        else:
            self._plan_look()

    def disconnected(self, device: str, reason: str) -> None:
        self.tell(lambda session: session.disconnected(device, reason), looks=True)

    def _look(self) -> None:
        session = self.session
        if session.over or not self._strikes.answered:
            return
        self._looked_s = self._clock.now_s
        seen = self._strikes.tick()
        session.clock(self._looked_s)
        session.looked(seen)
        self._plan_look()

    def _plan_look(self) -> None:
        session = self.session
        if session.over:
            return
        due_s = self._looked_s + (SOON_S if session.suspects else TICK_S) if self._regular else math.inf
        if (decides_s := session.due_s) is not None and decides_s > self._looked_s:
            due_s = min(due_s, decides_s)
        due_s = max(due_s, self._clock.now_s)
        if due_s != self._due_s and due_s < math.inf:
            self._clock.at(due_s, "tick", partial(self._tick, due_s))
        self._due_s = due_s

    def _tick(self, due_s: float) -> None:
        if due_s == self._due_s:
            self._due_s = math.inf
            self._look()
