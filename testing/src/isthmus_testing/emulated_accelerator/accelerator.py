"""The emulated device as the engine and the links see it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator

import torch
from torch import Tensor

from isthmus.accelerators.accelerator import GENERATOR, DeviceEvent, MemoryUse, Stream
from isthmus.errors import InternalError, UserError
from isthmus_testing.emulated_accelerator import tensors
from isthmus_testing.emulated_accelerator.copies import forget, host_waits
from isthmus_testing.emulated_accelerator.counters import Counts, Wait
from isthmus_testing.emulated_accelerator.devices import (
    KIND,
    CheckedDevice,
    device,
    failing_kernel,
    memory_bytes,
    refused,
    renew,
)
from isthmus_testing.emulated_accelerator.internals import MOST_DEVICES
from isthmus_testing.emulated_accelerator.kernels import add_device
from isthmus_testing.emulated_accelerator.misuse import FOUND, Misuse
from isthmus_testing.emulated_accelerator.order import HOST_ORDER, LOCK, CheckedStream, Clock, join


class CheckedEvent(DeviceEvent):
    def __init__(self, on: CheckedDevice, clock: Clock, *, timed: bool) -> None:
        self.clock = clock
        self.at_s = time.monotonic()
        self._device = on
        self._timed = timed
        self._asked = False

    def _known(self) -> bool:
        return all(HOST_ORDER.clock.get(stream, 0) >= tick for stream, tick in self.clock.items())

    def done(self) -> bool:
        """Not yet, for who asks the first time."""
        with LOCK:
            self._device.check_alive()
            if not self._known():
                if not self._asked:
                    self._asked = True
                    return False
                host_waits(self.clock)
            return True

    def synchronize(self) -> None:
        with LOCK:
            self._device.check_alive()
            self._device.counters.wait("event wait", "synchronize")
            host_waits(self.clock)

    def seconds_to(self, later: DeviceEvent) -> float:
        if not isinstance(later, CheckedEvent) or not (self._timed and later._timed):
            raise InternalError("expected two timed events of one accelerator")
        if not (self._known() and later._known()):
            raise InternalError("the time between two events is known once both are done")
        return later.at_s - self.at_s


class Checked:
    """Implements `Accelerator`, and says what went wrong and how often."""

    asynchronous = True

    def __init__(self, index: int) -> None:
        self.device = torch.device(KIND, index)

    @property
    def _device(self) -> CheckedDevice:
        return device(self.device.index)

    @property
    def name(self) -> str:
        return f"accelerator {self.device.index} emulated on the CPU"

    def new_stream(self) -> Stream:
        stream = CheckedStream(self.device.index)
        with LOCK:
            self._device.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Generator[None]:
        if not isinstance(stream, CheckedStream) or stream.device != self.device.index:
            raise InternalError(f"expected a stream of {self.device}")
        before = self._device.current
        self._device.current = stream
        try:
            yield
        finally:
            self._device.current = before

    def record(self, *, timed: bool = False) -> DeviceEvent:
        stream = self._device.current
        with stream.working, LOCK:
            stream.catch_up()
            return CheckedEvent(self._device, dict(stream.clock), timed=timed)

    def wait(self, event: DeviceEvent) -> None:
        if not isinstance(event, CheckedEvent):
            raise InternalError(f"got an event of {type(event).__name__}, expected one of {KIND}")
        with LOCK:
            join(self._device.current.clock, event.clock)

    def used_here(self, tensor: Tensor) -> None:
        with LOCK:
            tensors.allocation_of(tensor).used_on.add(self._device.current.number)

    def host_buffer(self, size_bytes: int) -> Tensor:
        return tensors.host_buffer(size_bytes)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Generator[None]:
        with GENERATOR:
            on = self._device
            before = on.random_state
            on.random_state = torch.Generator().manual_seed(seed).get_state()
            on.drawing = threading.get_ident()
            try:
                yield
            finally:
                on.drawing = None
                on.random_state = before

    def random_state(self) -> Tensor:
        return torch.cat([torch.get_rng_state(), self._device.random_state])

    def set_random_state(self, state: Tensor) -> None:
        host = len(torch.get_rng_state())
        torch.set_rng_state(state[:host])
        self._device.random_state = state[host:]

    def memory(self) -> MemoryUse:
        with LOCK:
            self._device.collect()
            return self._device.memory.use()

    def release_cached(self) -> None:
        with LOCK:
            self._device.collect()
            self._device.memory.give_back_unused()

    def reset_peak(self) -> None:
        with LOCK:
            self._device.collect()
            self._device.memory.reset_peak()

    def synchronize(self) -> None:
        reached = self._device.reached()
        with LOCK:
            self._device.check_alive()
            self._device.counters.wait("host synchronization", "synchronize")
            host_waits(reached)

    def counts(self, thread: int | None = None) -> Counts:
        """Since the last `reset_counts`; with `thread` (`threading.get_ident`) what that thread did."""
        with LOCK:
            return self._device.counters.counts(thread)

    def reset_counts(self) -> None:
        with LOCK:
            self._device.counters.reset()

    def refusing(self, *kinds: Wait) -> contextlib.AbstractContextManager[None]:
        """Inside of it such a wait raises RefusedWait, in any thread."""
        return self._device.counters.refusing(kinds)

    @property
    def misuses(self) -> tuple[Misuse, ...]:
        """All that were found in this process, also where someone caught one."""
        return tuple(FOUND)


def check_settings(index: int, field: str) -> None:
    """Raises UserError, with `field` as the field's name, for an emulated device that does not exist and for
    environment variables that cannot be read. Opens nothing."""
    if not 0 <= index < MOST_DEVICES:
        raise UserError(f"{field}: got '{KIND}:{index}', expected a number below {MOST_DEVICES}")
    memory_bytes(index)
    failing_kernel(index)
    refused(index)


def open_checked(index: int, *, fresh: bool = False) -> Checked:
    """Device `index`; each has its own memory and streams. What the environment says of it (devices.py) is read when a
    process asks the first time, or anew with `fresh`: what is then left of the old one is no longer counted."""
    check_settings(index, "device")
    with LOCK:
        add_device()
        if fresh:
            renew(index)
            FOUND.clear()
            forget()
        else:
            device(index)
    return Checked(index)
