"""Emulated executors: slower ones, ones whose speed changes from round to round, times that are not steady; and
executors on the devices of a fleet: which executor is on which device, and their links to the coordinator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, resolve_fleet
from isthmus.rng import stream
from isthmus.units import format_size


class SpeedEmulation(msgspec.Struct, frozen=True, kw_only=True):
    """How executor number `executor` differs from this machine (Parrot, Section 5.1)."""

    executor: int = 0
    eta: float = 0.0  # it sleeps eta T after training for T seconds of a core
    unstable: bool = False  # in round r of R it takes 1 + cos(3.14 r / R + k) times T longer
    noise: float = 0.0  # sigma of a log-normal factor of mean 1, of each client by itself
    rounds: int = 1
    seed: int = 0

    def factor(self, round_: int) -> float:
        """Expected time over that of this machine."""
        wave = 1 + math.cos(3.14 * round_ / max(1, self.rounds) + self.executor) if self.unstable else 0.0
        return 1 + self.eta + wave

    def factors(self) -> Callable[[int], float]:
        """Round -> the factor of the next client's time, drawn with its noise."""
        draws, sigma = stream(self.seed, "pace", client=self.executor), self.noise

        def drawn(round_: int) -> float:
            return self.factor(round_) * (float(draws.lognormal(-(sigma**2) / 2, sigma)) if sigma else 1.0)

        return drawn

    def clock(self) -> Callable[[float, int], float]:
        """(seconds, round) -> how long training that took `seconds` lasts; never less, as it cannot be undone."""
        drawn = self.factors()
        return lambda seconds, round_: seconds * max(1.0, drawn(round_))


class Pacer:
    """Makes training last as long as on the executor that is emulated.

    Seconds of a core are stretched, not those of a clock: a wait for a core that others have would be stretched with
    them, and an executor of factor 16 would lose sixteen times what the wait took. And as a sleeper is woken late where
    cores are busy, later by far than a small client trains, what it lost is taken from the next clients' sleep.
    """

    def __init__(
        self,
        lasts: Callable[[float, int], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        core: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`lasts(seconds, round)` is how long training of so many seconds of a core lasts."""
        self._lasts = lasts
        self._clock, self._core, self._sleep = clock, core, sleep
        self._round = self._number = 0
        self._began_s = self._core_began_s = self._behind_s = 0.0

    def open(self, round_: int, number: int = 0) -> None:
        """Pass `number` of this round begins; what is behind belongs to the one before."""
        self._round, self._number, self._behind_s = round_, number, 0.0

    def begin(self) -> None:
        self._began_s, self._core_began_s = self._clock(), self._core()

    def end(self, samples: int = 0) -> float:
        """Sleep as long as is needed after training on so many samples; returns the seconds since `begin`, as a clock
        sees them."""
        return self._sleep_until(self._lasts(self._core() - self._core_began_s, self._round))

    def received(self, size_bytes: Callable[[], int]) -> None:
        """The broadcast is here: sleep as long as it takes on an emulated link, if there is one."""

    def sends(self, size_bytes: Callable[[], int]) -> None:
        """The sums are sent next: sleep as long as they take on an emulated link, if there is one."""

    def _sleep_until(self, lasts_s: float) -> float:
        """Until so long after `begin`; returns the seconds since then."""
        seconds = self._clock() - self._began_s
        if (rest_s := lasts_s - seconds - self._behind_s) > 0:
            self._sleep(rest_s)
            seconds = self._clock() - self._began_s
        self._behind_s += seconds - lasts_s
        return seconds


class DevicePacer(Pacer):
    """Makes an executor as slow as a device of a fleet, and its messages as slow as the device's link."""

    def __init__(
        self,
        client_s: Callable[[int, int], float],
        emulation: SpeedEmulation,
        *,
        receive_s: Callable[[int], float],
        send_s: Callable[[int], float],
        clock: Callable[[], float] = time.perf_counter,
        core: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`client_s(samples, pass)` is the device's time for a client, before the changes of `emulation`; `receive_s`
        and `send_s` are seconds of so many bytes from the coordinator and to it."""
        super().__init__(lambda seconds, _: seconds, clock=clock, core=core, sleep=sleep)
        self._client_s, self._factors = client_s, emulation.factors()
        self._receive_s, self._send_s = receive_s, send_s

    def end(self, samples: int = 0) -> float:
        """The seconds are the device's: what this machine adds to them is taken from the next clients' sleep. Only
        where training here takes longer than there, they are this machine's, of a core."""
        device_s = self._client_s(samples, self._number) * self._factors(self._round)
        lasts_s = max(device_s, self._core() - self._core_began_s)
        self._sleep_until(lasts_s)
        return lasts_s

    def received(self, size_bytes: Callable[[], int]) -> None:
        self._sleep(self._receive_s(size_bytes()))

    def sends(self, size_bytes: Callable[[], int]) -> None:
        self._sleep(self._send_s(size_bytes()))


class ExecutorFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Executor number k is on device number k, alone. The coordinator is on the machine of one of the fleet's devices,
    and every device has its link to that machine for itself."""

    fleet: Fleet
    devices: tuple[Device, ...]  # the executors' devices
    coordinator: str  # the device on whose machine the coordinator is: no link lies between the two

    @property
    def names(self) -> list[str]:
        return [device.name for device in self.devices]

    def flops_per_s(self, executor: int) -> float:
        return self.devices[executor].sustained_flops_per_s

    def incoming(self, executor: int) -> Link | None:
        """From the coordinator; None where the two share a machine."""
        return self._link(self.coordinator, self.devices[executor].name)

    def outgoing(self, executor: int) -> Link | None:
        """To the coordinator; None where the two share a machine."""
        return self._link(self.devices[executor].name, self.coordinator)

    def between_s(self, source: int, target: int, size_bytes: float) -> float:
        """Seconds of so many bytes from one executor to another."""
        return transfer_s(self._link(self.devices[source].name, self.devices[target].name), size_bytes)

    def check_memory(self, needed_bytes: int) -> None:
        """UserError for an executor's device with less memory than an executor holds at least."""
        for device in self.devices:
            if device.memory_bytes < needed_bytes:
                raise UserError(
                    f"fleet: device {device.name!r} has {format_size(device.memory_bytes)}, expected at least "
                    f"{format_size(needed_bytes)} for a model, its gradient, the broadcast and the sums"
                )

    def _link(self, source: str, target: str) -> Link | None:
        return None if source == target else self.fleet.link(source, target)


def transfer_s(link: Link | None, size_bytes: float) -> float:
    """Seconds of a message; none without a link."""
    return 0.0 if link is None else link.transfer_s(size_bytes)


def executor_fleet(name: str, coordinator: str, executors: int) -> ExecutorFleet:
    """The first `executors` of the fleet's devices, taken from its regions in turn, or with 0 all of them.

    `name` is a built-in fleet or the path of a fleet file; `coordinator` is a device's name, or "" for the first one.
    UserError for an unknown name, and for a fleet with fewer devices than executors.
    """
    fleet = resolve_fleet(name)
    if executors > len(fleet.devices):
        raise UserError(
            f"fleet: {name!r} has {len(fleet.devices)} devices, expected at least {executors}, one for each executor"
        )
    try:
        place = fleet.device(coordinator).name if coordinator else fleet.names[0]
    except UserError as e:
        raise UserError(f"coordinator: {e}") from None
    chosen = fleet.thin(executors) if executors else fleet
    return ExecutorFleet(fleet=fleet, devices=chosen.devices, coordinator=place)
