"""The emulated devices of this process, and on which stream of theirs each thread works."""

from __future__ import annotations

import threading
from collections import deque
from typing import cast

import torch

from isthmus.accelerators.checked.counters import Counters
from isthmus.accelerators.checked.faults import failing_kernel, memory_bytes, refused
from isthmus.accelerators.checked.memory import Block, CheckedMemory
from isthmus.accelerators.checked.order import LOCK, CheckedStream, Clock, DeviceAllocation, Point, join

KIND = "checked"


class CheckedDevice:
    def __init__(self, index: int) -> None:
        self.index = index
        self.default = CheckedStream(index)
        self.streams = [self.default]
        self.counters = Counters(refused(index))
        self.memory = CheckedMemory(f"{KIND}:{index}", memory_bytes(index))
        self.random_state = torch.Generator().manual_seed(index).get_state()
        """Of its random numbers: those that the CPU would draw from this state."""
        self.drawing: int | None = None
        """The thread that holds the generators."""
        self.dropped: deque[DeviceAllocation] = deque()
        """Filled by finalizers, which may come at any moment, and emptied where memory is asked for or told."""
        self._thread = threading.local()
        self._kernels = 0
        self._fails_at = failing_kernel(index)

    @property
    def current(self) -> CheckedStream:
        """This thread's current stream."""
        return getattr(self._thread, "stream", self.default)

    @current.setter
    def current(self, stream: CheckedStream) -> None:
        self._thread.stream = stream

    def check_alive(self) -> None:
        """AcceleratorError once the hardware has failed."""
        if 0 < self._fails_at <= self._kernels:
            raise torch.AcceleratorError(
                f"{KIND}:{self.index}: unspecified launch failure in operator {self._fails_at} (emulated)"
            )

    def launch(self, what: str, *, kernel: bool = True) -> Point:
        """The next operator or copy of this thread's current stream. The caller holds the lock."""
        if kernel:
            self._kernels += 1
            self.counters.add("kernel")
        self.check_alive()
        return self.current.launch(what)

    def reached(self) -> Clock:
        """All work of all streams of the device. The caller does not hold the lock."""
        clock: Clock = {}
        for stream in tuple(self.streams):
            with stream.working:
                join(clock, stream.clock)
        return clock

    def allocate(self, size: int) -> tuple[CheckedStream, Block]:
        """On this thread's current stream."""
        self.collect()
        stream = self.current
        block = self.memory.take(size, stream.number)
        stream.catch_up()
        stream.may_allocate()
        return stream, block

    def collect(self) -> None:
        """Takes back the memory of dropped tensors."""
        while self.dropped:
            dropped = self.dropped.popleft()
            self.memory.give(cast(Block, dropped.block))
            if dropped.outstanding():
                cast(CheckedStream, dropped.owner).freed.append(dropped)


_devices: dict[int, CheckedDevice] = {}


def device(index: int) -> CheckedDevice:
    with LOCK:
        if index not in _devices:
            _devices[index] = CheckedDevice(index)
        return _devices[index]


def seed_all(seed: int) -> None:
    """Of the random numbers of every device that there is."""
    with LOCK:
        for each in _devices.values():
            each.random_state = torch.Generator().manual_seed(seed).get_state()


def renew(index: int) -> CheckedDevice:
    """As at the start of a process, with what the environment says now; for tests."""
    with LOCK:
        _devices.pop(index, None)
        return device(index)
