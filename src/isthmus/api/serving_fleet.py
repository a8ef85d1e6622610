"""A fleet's coordinator that listens, for one command; and a fleet on an engine's nodes for one run: a coordinator
here, agents there, nothing left of them afterwards. Which agents, which fleet and which address a job has there."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shutil
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import msgspec

from isthmus.api.folder import AGENTS_LOG, COORDINATOR, RunFolder
from isthmus.api.observer import Observer
from isthmus.api.states import PORT, state_folder, timeout_s
from isthmus.callbacks import Callback
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.fleet import Fleet
from isthmus.listening import shown_address
from isthmus.runtime.identity.roster import PREFIX
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, Launcher
from isthmus.runtime.processes.signals import Stop, uninterrupted
from isthmus.runtime.service.agent import local_address
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_state import Addresses, FleetState, remove_state
from isthmus.sanitize import sanitize
from isthmus.session.session import few
from isthmus.units import format_duration, parse_duration, whole_number


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  # address to listen on
    port: int = PORT  # 0: any that is free
    addresses: tuple[str, ...] = ()  # HOST or HOST:PORT by which devices reach it; none: `host`
    tickets: int = 0  # so many are made at the start
    timeout: str = "60 s"  # silence after which a device is lost
    renew_after_absence: str = "0 s"
    """For so long a device may be away and needs no ticket when it comes back, though certificates end after a day."""
    state: Path | None = None  # folder with the fleet's keys; none: ~/.local/state/isthmus/fleet
    ticket: Callable[[str], None] = lambda _: None  # is given each ticket


@contextlib.contextmanager
def serving_fleet(serving: Serving, log: Callable[[str], None]) -> Generator[FleetCoordinator]:
    renewed_s = parse_duration(serving.renew_after_absence, "--renew-after-absence")
    fleet = FleetState(serving.state or state_folder("fleet"))
    with (
        fleet.served(),
        FleetCoordinator(
            fleet,
            serving.host,
            serving.port,
            timeout_s=timeout_s(serving.timeout),
            log=log,
            renew_after_absence_s=renewed_s,
        ) as service,
    ):
        fleet.listens_at(_addresses(serving, service.port))
        service.start()
        log(f"listening on {shown_address(serving.host, service.port)} with TLS; state folder {fleet.folder}")
        for _ in range(serving.tickets):
            serving.ticket(fleet.ticket())
        if serving.tickets:
            log("each ticket lets one machine join, within 24 hours: `isthmus join` asks for it")
        yield service


def _addresses(serving: Serving, port: int) -> Addresses:
    """UserError where nobody could tell how the coordinator is reached."""
    if serving.addresses:
        return tuple(address_of(text, port) for text in serving.addresses)
    if _is_wildcard(serving.host):
        raise UserError(f"--host {serving.host!r}: tickets need an address that devices can dial: add --address HOST")
    return ((serving.host, port),)


def _is_wildcard(host: str) -> bool:
    """Return whether an address stands for every address, as "" and "0" do. It can be bound."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return any(ipaddress.ip_address(entry[4][0]).is_unspecified for entry in found)


def address_of(text: str, port: int, option: str = "--address") -> tuple[str, int]:
    """HOST, HOST:PORT, or [HOST]:PORT for one with colons. UserError, which names the option."""
    if not text.strip("[]: "):
        raise UserError(f"{option}: got {text!r}, expected HOST or HOST:PORT")
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host.strip("[]") and not host.startswith("[")):
        return text.strip("[]"), port
    if not 0 < (whole_number(number) or 0) < 65536:
        raise UserError(f"{option} {text}: port: got {number!r}, expected a number up to 65535")
    return host.strip("[]"), int(number)


AUTO, ISLAND = "auto", "island"


class UpChoices(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    options: Mapping[str, object] = {}  # options of the engine
    nodes: int | None = None  # None: as many as the fleet names, or all that the engine has
    devices_per_node: str = AUTO
    host: str = ""  # address to listen on; none: this machine's on the route to the engine
    port: int = 0
    addresses: tuple[str, ...] = ()
    timeout: str = "60 s"
    data: Path | None = None
    """Folder with the data, on every node; None: the current folder where the nodes are this machine, else none."""
    memory: str = ""
    measure: bool | None = None  # whether devices that joined are measured; None: unless the job names a fleet file
    resume: bool = False
    run: Path | None = None
    again: str = ""  # as of `Choices`
    verbose: bool = False  # show what agents print
    callbacks: tuple[Callback, ...] = ()  # besides the job's


def is_known(fleet: str, measure: bool | None) -> bool:
    """Return whether the job's fleet describes the engine's devices. A built-in fleet describes devices that nobody
    has."""
    return fleet.endswith(".toml") if measure is None else not measure


def machines_of(fleet: Fleet) -> tuple[str, ...]:
    """Names of the machines of its devices: NAME of NAME/0 and NAME/1."""
    return tuple(dict.fromkeys(name.partition("/")[0] for name in fleet.names))


def numbered_names(count: int) -> tuple[str, ...]:
    """
    >>> numbered_names(2)
    ('node-0', 'node-1')
    """
    return tuple(f"node-{number}" for number in range(count))


def agent_names(asked: UpChoices, fleet: Fleet | None, engine_has: int | None) -> tuple[str, ...]:
    """One for each node; `fleet` is the one that describes them, if any. UserError where their number is not known, or
    differs."""
    if asked.nodes is not None and asked.nodes < 1:
        raise UserError(f"--nodes: got {asked.nodes}, expected 1 or more")
    if asked.nodes is not None and engine_has is not None and asked.nodes > engine_has:
        raise UserError(f"--nodes: got {asked.nodes}, but --on {asked.engine} has {engine_has}")
    if fleet is None:
        count = asked.nodes or engine_has
        if count is None:
            raise UserError(f"--nodes: got none, and --on {asked.engine} starts as many as it is asked for: add it")
        return numbered_names(count)
    machines = machines_of(fleet)
    if asked.nodes not in (None, len(machines)):
        raise UserError(
            f"--nodes: got {asked.nodes}, but fleet {fleet.name!r} names {len(machines)} machines: leave it out, or "
            "add --measure to plan with the devices that join"
        )
    if engine_has is not None and len(machines) > engine_has:
        raise UserError(
            f"fleet {fleet.name!r} names {len(machines)} machines, but --on {asked.engine} has {engine_has}"
        )
    return machines


def agent_specs(
    names: Sequence[str], asked: UpChoices, fleet: Fleet | None, here: Path | None = None
) -> list[AgentSpec]:
    """Without tickets. `here` is the folder of the job's data where the nodes are this machine."""
    island = asked.devices_per_node == ISLAND
    arguments = ["--one-owner", "--timeout", asked.timeout, *_devices(asked.devices_per_node, fleet)]
    data = asked.data or here
    if data is not None:
        arguments += ["--data", str(data if here is None else data.absolute())]
    if asked.memory:
        arguments += ["--memory", asked.memory]
    return [AgentSpec(name=name, arguments=tuple(arguments), ticket="", island=island) for name in names]


def _devices(per_node: str, fleet: Fleet | None) -> list[str]:
    if per_node == ISLAND:
        return []
    if per_node == AUTO:
        alone = fleet is not None and not any("/" in name for name in fleet.names)
        return [] if alone else ["--devices", AUTO]
    if not (count := whole_number(per_node)):
        raise UserError(f"--devices-per-node: got {per_node!r}, expected auto, island or a number from 1 on")
    return ["--devices", ",".join(map(str, range(count)))]


def check_devices(joined: Sequence[str], fleet: Fleet) -> None:
    """UserError for a device of the fleet that is not there."""
    missing = [name for name in fleet.names if name not in joined]
    if missing:
        raise UserError(f"fleet {fleet.name!r}: {', '.join(missing)} did not join; here are {', '.join(joined)}")


def check_not_public(address: str) -> None:
    """UserError for one that the internet could reach."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return
    if found.is_global:
        raise UserError(
            f"--host: this machine's address towards the nodes is {address}, a public one: name it to use it"
        )


LAST_LINES = 20  # lines of an agent that are shown where it fails
MOST_CHARACTERS = 2000
_TICKET = re.compile(PREFIX + r"[\w-]+")


class AgentLog:
    """Any thread may write. A context manager."""

    def __init__(self, path: Path, echo: Callable[[str], None] | None = None) -> None:
        """`echo` is given each line too. UserError if the file cannot be written."""
        self.path = path
        self._echo = echo
        self._lock = threading.Lock()
        self._last: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=LAST_LINES))
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as e:
            raise UserError(f"{path}: cannot be written: {e.strerror or e}") from None

    def write(self, name: str, line: str) -> None:
        line = _TICKET.sub(f"{PREFIX}...", sanitize(line)[:MOST_CHARACTERS])
        with self._lock:
            self._last[name].append(line)
            if not self._file.closed:
                self._file.write(f"{name}: {line}\n")
        if self._echo is not None:
            self._echo(f"{name}: {line}")

    def last(self, name: str) -> list[str]:
        with self._lock:
            return list(self._last[name])

    def __enter__(self) -> AgentLog:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._file.close()


LOOK_S = 0.2
REMIND_S = 30.0  # how often to say which agents are waited for
MOST_RESTARTS = 3  # restarts in a row of one agent that never joined
PAUSE_S = 5.0  # before the second restart of an agent in a row; before the third, twice as long
_GONE = (AgentState.ENDED, AgentState.LOST)


class Cluster:
    """One agent per node, named as the specs say; their tickets are made here."""

    def __init__(
        self,
        launcher: Launcher,
        service: FleetCoordinator,
        specs: Sequence[AgentSpec],
        log: AgentLog,
        note: Callable[[str], None],
    ) -> None:
        self._launcher = launcher
        self._service = service
        self._specs = {spec.name: spec for spec in specs}
        self._log = log
        self._note = note
        self._tickets: dict[str, str] = {}
        self._restarts: dict[str, AgentRestarts] = {}
        self._devices: dict[str, list[str]] = {}  # devices by agent, once all have joined
        self._queued: frozenset[str] = frozenset()
        """Agents that the run waits for while the engine has no node for them."""
        self._over = threading.Event()

    def start(self, folder: Path) -> None:
        """PeerError where the engine refuses."""
        self._launcher.start([self._with_ticket(spec) for spec in self._specs.values()], folder, self._log.write)

    def stop(self) -> None:
        """End all agents; tickets that nobody used are void."""
        try:
            self._launcher.stop()
        finally:
            for ticket in self._tickets.values():
                self._service.state.withdraw(ticket)

    def joined(self, stop: Stop) -> list[str]:
        """The names of their devices, once all have joined. PeerError for an agent that ended before, with what it
        printed last; Interrupted where that is to stop."""
        began_s = reminded_s = time.monotonic()
        while missing := self._missing():
            stop.check()
            states = self._launcher.states()
            gone = {name for name in missing if states.get(name, AgentState.STARTING) in _GONE}
            for name in self._missing() if gone else ():
                if name in gone:
                    raise PeerError(f"{name}: its agent ended before it had joined{self._why(name)}")
            if (now_s := time.monotonic()) - reminded_s >= REMIND_S:
                reminded_s = now_s
                self._note(_waiting(missing, states, now_s - began_s))
            self._over.wait(LOOK_S)
        joined = self._service.state.devices()
        self._devices = {name: joined[name] for name in self._specs}
        return [device for devices in self._devices.values() for device in devices]

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Lost agents are brought back meanwhile."""
        self._expect_back()
        keeper = threading.Thread(target=self._keep, name="agents", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            self._over.set()
            keeper.join()
            with self._service.deciding() as fleet:
                fleet.brought_back = fleet.in_queue = frozenset()

    def _keep(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                states = self._launcher.states()
            except IsthmusError as e:
                self._note(f"the engine does not say how its agents are: {e}")
                self._over.wait(REMIND_S)
                continue
            for name in self._specs:
                if states.get(name) is AgentState.LOST:
                    self._bring_back(name)
                elif name in self._restarts and name not in self._missing():
                    self._note(f"{name} has joined again")
                    del self._restarts[name]
            self._wait_for(frozenset(name for name in self._specs if states.get(name) is AgentState.QUEUED))

    def _wait_for(self, queued: frozenset[str]) -> None:
        if fresh := sorted(queued - self._queued):
            self._note(f"{few(fresh)}: in the queue of the engine, which starts it once it has a node")
        if queued != self._queued:
            with self._service.deciding() as fleet:
                fleet.in_queue = frozenset(device for name in queued for device in self._devices[name])
        self._queued = queued

    def _bring_back(self, name: str) -> None:
        restarts, now_s = self._restarts.get(name, AgentRestarts()), time.monotonic()
        if restarts.given_up or now_s < restarts.next_s:
            return
        self._restarts[name] = restarts.after(now_s, able=self._launcher.restarts)
        lost = f"{name} was lost{self._why(name)}"
        if self._restarts[name].given_up:
            tried = f"after {restarts.count} restarts" if self._launcher.restarts else "the engine cannot restart it"
            self._note(f"{lost}: the run goes on without it, {tried}")
            self._expect_back()
            return
        self._note(f"{lost}: starting it again")
        try:
            for device in self._service.state.devices().get(name, ()):
                self._service.revoke(device)
            self._launcher.restart(self._with_ticket(self._specs[name]))
        except IsthmusError as e:
            self._note(f"{name}: cannot be started again: {e}")

    def _expect_back(self) -> None:
        """Say which devices come back when they are lost: of the agents that are started again."""
        able = self._specs if self._launcher.restarts else ()
        names = [name for name in able if not self._restarts.get(name, AgentRestarts()).given_up]
        with self._service.deciding() as fleet:
            fleet.brought_back = frozenset(device for name in names for device in self._devices[name])

    def _with_ticket(self, spec: AgentSpec) -> AgentSpec:
        """With a new one; the one before it is void."""
        before, ticket = self._tickets.get(spec.name), self._service.state.ticket()
        if before is not None:
            self._service.state.withdraw(before)
        self._tickets[spec.name] = ticket
        return msgspec.structs.replace(spec, ticket=ticket)

    def _missing(self) -> list[str]:
        """Agents that have not joined, or not with all of their devices: they join together, and connect one after
        another."""
        joined, present = self._service.state.devices(), self._service.present
        return [name for name in self._specs if name not in joined or not present.issuperset(joined[name])]

    def _why(self, name: str) -> str:
        last = [line for line in self._log.last(name) if line.strip()]
        errors = [line for line in last if line.startswith("error: ")]
        said = errors[-1].removeprefix("error: ") if errors else f"it printed last {last[-1]!r}" if last else ""
        return f": {said or 'it printed nothing'} (log {self._log.path})"


class AgentRestarts(msgspec.Struct, frozen=True):
    """Restarts of an agent that was lost and has not joined since."""

    count: int = 0
    next_s: float = 0.0  # when it may be started again, by the monotonic clock
    given_up: bool = False

    def after(self, now_s: float, *, able: bool) -> AgentRestarts:
        if not able or self.count == MOST_RESTARTS:
            return AgentRestarts(self.count, given_up=True)
        return AgentRestarts(self.count + 1, now_s + PAUSE_S * self.count * 2)


def _waiting(missing: Sequence[str], states: Mapping[str, AgentState], waited_s: float) -> str:
    named = [f"{name} ({states.get(name, AgentState.STARTING).value})" for name in missing]
    return f"waiting for {few(named)} to join, for {format_duration(waited_s)}"


ANY_PORT = 9  # a port of the engine's head, where only the route to it is asked for


def serving_towards(head: str, timeout: str, host: str = "", port: int = 0, addresses: tuple[str, ...] = ()) -> Serving:
    """Where the coordinator listens: where nobody says, at the address of this machine towards the engine's head."""
    if not host:
        host = local_address(head, ANY_PORT) if head else "127.0.0.1"
        check_not_public(host)
    return Serving(host=host, port=port, addresses=addresses, timeout=timeout)


@contextlib.contextmanager
def fleet_on(
    folder: RunFolder,
    launcher: Launcher,
    specs: Sequence[AgentSpec],
    serving: Serving,
    observer: Observer,
    stop: Stop,
    *,
    verbose: bool = False,
) -> Generator[tuple[FleetCoordinator, list[str]]]:
    """The coordinator and its devices, once the agents of all have joined; lost agents are brought back. Afterwards no
    process, key or ticket is left."""
    log, interrupted = folder.path / AGENTS_LOG, False
    try:
        with _started(folder, launcher, specs, serving, observer, verbose=verbose) as (cluster, service):
            with stop.calls(lambda: None):
                devices = cluster.joined(stop)
            with cluster.kept():
                yield service, devices
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        if not folder.begun and log.is_file() and (interrupted or not log.stat().st_size):
            log.unlink()


@contextlib.contextmanager
def _started(
    folder: RunFolder,
    launcher: Launcher,
    specs: Sequence[AgentSpec],
    serving: Serving,
    observer: Observer,
    *,
    verbose: bool,
) -> Generator[tuple[Cluster, FleetCoordinator]]:
    state, ending = folder.path / COORDINATOR, False

    def say(line: str) -> None:
        log.write("coordinator", line)
        if not ending and not verbose:
            observer.note(line)

    with contextlib.ExitStack() as stack:
        folder.path.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(AgentLog(folder.path / AGENTS_LOG, observer.note if verbose else None))
        remove_state(state)  # of a run that was killed: its devices have our agents' names
        stack.callback(shutil.rmtree, state, ignore_errors=True)
        service = stack.enter_context(serving_fleet(msgspec.structs.replace(serving, state=state), say))
        cluster = Cluster(launcher, service, specs, log, observer.note)
        try:
            cluster.start(state)
            yield cluster, service
        finally:
            ending = True
            with uninterrupted():
                cluster.stop()
