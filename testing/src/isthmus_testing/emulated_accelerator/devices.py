"""The emulated devices of this process: their memory, failures and refusals, as the environment says, and on which
stream of theirs each thread works.

ISTHMUS_CHECKED_MEMORY=64MiB            each device
ISTHMUS_CHECKED_MEMORY=1GiB,64MiB@1     device 1 less than the others
ISTHMUS_CHECKED_FAULT=after:200@1       device 1 fails in its 200th operator, and from then on
ISTHMUS_CHECKED_REFUSE=implicit copy    an implicit copy raises; so does, by this name, a host synchronization
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import cast

import torch

from isthmus.errors import UserError, check_choice
from isthmus.units import parse_size
from isthmus_testing.emulated_accelerator.counters import Counters, Wait
from isthmus_testing.emulated_accelerator.memory import Block, CheckedMemory
from isthmus_testing.emulated_accelerator.order import LOCK, CheckedStream, Clock, DeviceAllocation, Point, join

MEMORY = "ISTHMUS_CHECKED_MEMORY"
FAULT = "ISTHMUS_CHECKED_FAULT"
REFUSE = "ISTHMUS_CHECKED_REFUSE"
DEFAULT_BYTES = 4 * 2**30
_AFTER = "after:"


def memory_bytes(index: int) -> int:
    text = _of(MEMORY, index)
    return parse_size(text, MEMORY) if text else DEFAULT_BYTES


def failing_kernel(index: int) -> int:
    """The number of the first operator, from 1 on, that fails; 0 for none."""
    text = _of(FAULT, index)
    if not text:
        return 0
    number = text.removeprefix(_AFTER)
    if not text.startswith(_AFTER) or not number.isdecimal() or int(number) < 1:
        raise UserError(f"{FAULT}: got {text!r}, expected e.g. 'after:200' or 'after:200@1'")
    return int(number)


def refused(index: int) -> set[Wait]:
    parts = _parts(REFUSE)
    found = {*parts.get(None, ()), *parts.get(index, ())}
    for text in found:
        check_choice(REFUSE, text, Wait)
    return cast("set[Wait]", found)


def _of(variable: str, index: int) -> str:
    """Return the variable's value for this device, or else for each."""
    parts = _parts(variable)
    return parts.get(index, parts.get(None, ("",)))[-1]


def _parts(variable: str) -> dict[int | None, tuple[str, ...]]:
    """Return the values by the device that they are for; None stands for each device."""
    found: dict[int | None, tuple[str, ...]] = {}
    for part in filter(None, os.environ.get(variable, "").split(",")):
        text, _, of = part.partition("@")
        if of and not of.isdecimal():
            raise UserError(f"{variable}: got {part!r}, expected the number of a device after '@'")
        index = int(of) if of else None
        found[index] = (*found.get(index, ()), text.strip())
    return found


KIND = "checked"


class CheckedDevice:
    def __init__(self, index: int) -> None:
        self.index = index
        self.default = CheckedStream(index)
        self.streams = [self.default]
        self.counters = Counters(refused(index))
        self.memory = CheckedMemory(f"{KIND}:{index}", memory_bytes(index))
        self.random_state = torch.Generator().manual_seed(index).get_state()
        """The state of its random numbers: they are those that the CPU would draw from it."""
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
            with stream.working, LOCK:  # a stream of another thread may wait for an event meanwhile
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
    """Seed the random numbers of every device that there is."""
    with LOCK:
        for each in _devices.values():
            each.random_state = torch.Generator().manual_seed(seed).get_state()


def renew(index: int) -> CheckedDevice:
    """Begin again as at the start of a process, with what the environment says now; for tests."""
    with LOCK:
        _devices.pop(index, None)
        return device(index)
