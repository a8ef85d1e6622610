"""The connections between simulated devices and their coordinator: who is connected, and what travels between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, Protocol

from isthmus.plans.plan import device_of
from isthmus.simulator.clock import Jitter
from isthmus.simulator.options import SimulationOptions
from isthmus.simulator.parties import Parties, Party, WorkerT


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
