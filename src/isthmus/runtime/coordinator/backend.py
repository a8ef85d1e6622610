"""The devices that work for a run: processes started here, or devices that joined a fleet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from isthmus.accelerators import AUTO, accelerator_names, resolve_accelerator
from isthmus.data import DataSpec
from isthmus.data.description import DataDescription, check_description
from isthmus.engines import EngineName
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.plans.plan import device_of
from isthmus.protocol.run_messages import PeerPath
from isthmus.runtime.coordinator.data_holders import DataQueries
from isthmus.runtime.processes.data_description import described_at
from isthmus.runtime.processes.device_processes import DeviceProcesses, ForkServers, ProcessPlace
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.acceptor import Acceptor
from isthmus.runtime.transport.listener import Listener
from isthmus.training.engine_operators import EngineOperators
from isthmus.wire_types import WorkerRole


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    devices: tuple[str, ...]  # at the beginning
    others: tuple[str, ...] = ()  # who may be called later
    timeout_s: float
    threads: int
    logs: Path  # where what devices write to standard error goes, as far as it is written on this machine
    stages: Mapping[str, int] = {}  # how many stages each device may get, for those that may get several at once
    anyone: bool = False  # every device of the fleet may be called later
    role: WorkerRole = "stage"
    yields: bool = False  # a device that another run calls leaves this one
    stop: Stop = msgspec.field(default_factory=Stop)  # devices are waited for no longer


class DevicesAtWork:
    """Devices at work for a run; these come by themselves."""

    def ended(self) -> Mapping[str, str]:
        """Return how each device's process ended, for those that failed."""
        return {}

    def starting(self, device: str) -> bool:
        """Return whether a process of it is known to be there, or on its way."""
        return False

    def returns(self, device: str) -> bool:
        """Return whether one that is lost is expected among the offers."""
        return False

    def queued(self) -> Collection[str]:
        """Return who waits in the queue of an engine, which starts it at any time."""
        return ()

    def offers(self) -> Collection[str]:
        """Return who could work and does not, as far as is known here."""
        return ()

    def call(self, device: str) -> None:
        """Have one of them connect to the acceptor, with all its workers."""

    def leaving(self) -> Collection[str]:
        """Return who is to leave without loss; each is called once."""
        return ()

    def bandwidth(self, source: str, target: str) -> float | None:
        """Bytes/s of a link between two devices, probed now; None where that cannot be. Any thread; takes seconds."""
        return None

    def linked(self, device: str, paths: Sequence[PeerPath]) -> None:
        """The device has a stage, and has got to others in these ways."""


def paths_of(device: str, paths: Sequence[PeerPath], worker_ids: Collection[str]) -> list[PeerPath]:
    """Return the paths that a device has taken to other devices with one of these worker ids, each device once."""
    found = {device_of(way.device): way for way in paths if way.device in worker_ids}
    return [msgspec.structs.replace(way, device=other) for other, way in found.items() if other != device]


class StartedProcesses(DevicesAtWork):
    """Processes that were started for the run, one for each device: each runs until it is known to have ended."""

    def __init__(self, ended: Callable[[], Mapping[str, str]]) -> None:
        """`ended` returns whose process has ended otherwise than well, and how."""
        self._look = ended
        self._ended: Mapping[str, str] = {}

    def ended(self) -> Mapping[str, str]:
        self._ended = self._look()
        return self._ended

    def starting(self, device: str) -> bool:
        return device not in self._ended


class Backend(Protocol):
    @property
    def survives_coordinator(self) -> bool:
        """Return whether devices go on while their coordinator is away."""
        ...

    def expects_reconnect(self, run: str) -> None:
        """Devices may be at work for this run of a coordinator that was lost: those that come before it is called
        wait."""

    def asks(self, stop: Stop) -> DataQueries:
        """About data, until that is to stop."""
        ...

    @property
    def computes(self) -> Mapping[str, EngineOperators]:
        """The operators that devices reported of their engines; devices that are not named have this installation's."""
        ...

    def idle(self, like: Collection[str]) -> list[str]:
        """Devices that are here, work for no run, and are of the hardware and engine that all of `like` are of, so that
        they compute the same bits."""
        ...

    def at_work(self, call: RunRequest, acceptor: Acceptor) -> AbstractContextManager[DevicesAtWork]:
        """While inside, the devices of the call connect to the acceptor, each on a connection of its own."""
        ...


class LocalBackend(msgspec.Struct, frozen=True, kw_only=True):
    """A process for each device, on this machine or in a place on it."""

    host: str = "127.0.0.1"  # address that the coordinator listens on
    places: Mapping[str, ProcessPlace] = {}  # per device; loopback where a device is not named
    trusted_network: bool = False  # plain TCP beyond loopback: for network namespaces of our own
    respawn_after_s: float | None = None
    """A device whose process ended could work again after so long: as a machine that starts anew. None: never."""
    starts_again: bool = False
    """Where no process is left, all could work again at once: one that ended alone stands for a machine that is lost,
    but all of them did not end for that."""

    fork_servers: ForkServers | None = None  # kept from run to run; None: each run makes its own

    @property
    def accelerators(self) -> Mapping[str, str]:
        """Where devices compute that do not on the CPU."""
        return {name: place.accelerator for name, place in self.places.items() if place.accelerator != "cpu"}

    @property
    def survives_coordinator(self) -> bool:
        return False

    def expects_reconnect(self, run: str) -> None:
        """None outlives its coordinator."""

    def asks(self, stop: Stop) -> DataQueries:
        return _LocalDataQueries(self.places)

    @property
    def computes(self) -> Mapping[str, EngineOperators]:
        return {}

    def idle(self, like: Collection[str]) -> list[str]:
        return []  # a process is started for each when there is work

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[DevicesAtWork]:
        listener = Listener(self.host, trusted_network=self.trusted_network, timeout_s=call.timeout_s)
        listener.start(acceptor.on_connection)
        address = f"{self.host}:{listener.port}"
        try:
            with DeviceProcesses(
                address,
                call.run,
                timeout_s=call.timeout_s,
                threads=call.threads,
                logs=call.logs,
                fork_servers=self.fork_servers,
            ) as launcher:
                work = _LocalDevices(self, call, launcher)
                for device in call.devices:
                    work.call(device)
                yield work
        finally:
            listener.close()


class _LocalDataQueries:
    def __init__(self, places: Mapping[str, ProcessPlace]) -> None:
        self._places = places

    def here(self, devices: Sequence[str], *, every: bool) -> list[str]:
        return list(devices)

    def describe(
        self, devices: Sequence[str], data: DataSpec, *, heldout: bool
    ) -> dict[str, DataDescription | IsthmusError]:
        """Devices in the same folder have the same data: one of them is asked, and speaks for all."""
        found: dict[tuple[tuple[str, ...], Path | None], DataDescription | IsthmusError] = {}
        said: dict[str, DataDescription | IsthmusError] = {}
        for device in devices:
            place = self._places.get(device, ProcessPlace())
            where = place.prefix, place.data
            if where not in found:
                found[where] = self._described(device, place, data, heldout=heldout)
            said[device] = found[where]
        return said

    def _described(
        self, device: str, place: ProcessPlace, data: DataSpec, *, heldout: bool
    ) -> DataDescription | IsthmusError:
        try:
            found = described_at(place, data, heldout=heldout)
            check_description(found, heldout=heldout)
        except IsthmusError as e:
            # Where all are in one place it is of no help to say who was asked.
            return type(e)(f"device {device!r}: {e}") if place.data is not None else e
        return found

    def are_equal(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """They have one key."""
        return one[1] == other[1]


class _LocalDevices(DevicesAtWork):
    def __init__(self, backend: LocalBackend, call: RunRequest, launcher: DeviceProcesses) -> None:
        self._backend = backend
        self._call = call
        self._launcher = launcher
        self._ended_s: dict[str, float] = {}

    def ended(self) -> Mapping[str, str]:
        return self._launcher.ended()

    def starting(self, device: str) -> bool:
        return self._launcher.running(device)

    def returns(self, device: str) -> bool:
        return self._respawn_after_s is not None

    @property
    def _respawn_after_s(self) -> float | None:
        if self._backend.starts_again and not self._launcher.any_runs:
            return 0.0
        return self._backend.respawn_after_s

    def offers(self) -> Collection[str]:
        after_s, now_s = self._respawn_after_s, time.monotonic()
        found = [d for d in self._call.others if not self._launcher.started(d)]
        if after_s is not None:
            for device in self._launcher.ended():
                if now_s - self._ended_s.setdefault(device, now_s) >= after_s:
                    found.append(device)
        return found

    def call(self, device: str) -> None:
        self._ended_s.pop(device, None)
        place = self._backend.places.get(device, ProcessPlace())
        self._launcher.start(device, place, self._call.stages.get(device, 1), role=self._call.role)


FIELD = "runtime.device"


def local_places(
    chosen: str | dict[str, str], devices: Sequence[str], engines: Mapping[str, EngineName] = {}
) -> dict[str, ProcessPlace]:
    """The place of each device of the fleet, by `[runtime] device`, and its engine; torch for those that `engines`
    leaves out. Raises UserError for a device or an accelerator that does not exist."""
    places = _places(chosen, devices)
    for device, name in engines.items():
        places[device] = msgspec.structs.replace(places.get(device, ProcessPlace()), engine=name)
    return places


def _places(chosen: str | dict[str, str], devices: Sequence[str]) -> dict[str, ProcessPlace]:
    if chosen == AUTO:
        return dict(zip(devices, _dealt(len(devices)), strict=True))
    if isinstance(chosen, str):
        return dict.fromkeys(devices, _place(chosen, FIELD))
    for device in chosen:
        if device not in devices:
            raise UserError(f"{FIELD}: {unknown_name('device', device, devices)}")
    return {device: _place(name, f"{FIELD}.{device}") for device, name in chosen.items()}


def _dealt(count: int) -> list[ProcessPlace]:
    """This machine's accelerators in turn: more devices than there are share them."""
    here = accelerator_names() or ("cpu",)
    return [ProcessPlace(accelerator=here[number % len(here)]) for number in range(count)]


def _place(name: str, field: str) -> ProcessPlace:
    return ProcessPlace(accelerator=resolve_accelerator(name, field))
