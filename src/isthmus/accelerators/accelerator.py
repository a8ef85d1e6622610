"""The interface of the hardware that computes a stage, for the engine and the links; and its events on the host's
clock.

The rules of streams, for every kind: work is queued on the current stream of the thread that calls torch, and runs in
that stream's order. Between streams only events give an order. The host may read a host buffer that a stream writes,
or write one that a stream reads, once an event recorded after that copy is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

import msgspec
import torch
from torch import Tensor

from isthmus.errors import InternalError
from isthmus.free_memory import available_bytes, code_bytes, kilobytes


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, at one moment."""

    total: int
    free: int  # bytes that no process has reserved
    allocated: int  # in this process's tensors
    reserved: int  # bytes that this process's allocator has taken from the hardware, in use or cached
    peak_allocated: int  # the most that tensors had since the last `reset_peak`
    peak_reserved: int


class DeviceEvent(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Return whether all work before it has been done; never waits."""
        ...

    def synchronize(self) -> None:
        """The host waits until it is done."""

    def seconds_to(self, later: DeviceEvent) -> float:
        """Seconds of the hardware's clock. Both must have been recorded with `timed` and be done."""
        ...


class Stream(Protocol):
    """A queue of work that is done in order, beside other streams."""


class Accelerator(Protocol):
    """A device that computes, with its streams, events, copies and memory: a CPU, a GPU, or an emulated one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """The hardware's name, as people call it."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Return whether calls return before their work is done, and tensors lie outside of the host's memory."""
        ...

    def new_stream(self) -> Stream: ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside of it, this thread's work is queued on `stream`."""
        ...

    def record(self, *, timed: bool = False) -> DeviceEvent:
        """An event after all that was queued so far on this thread's current stream."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Work that this thread queues on its current stream from now on waits for the event; the host does not."""

    def used_here(self, tensor: Tensor) -> None:
        """This thread's current stream works with a tensor that was allocated on another one: its memory is given to
        nobody else before that work is done."""

    def host_buffer(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes] in host memory that copies reach without waiting (pinned, where that exists)."""
        ...

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Inside of it, random operators of this accelerator draw from `seed`. The generators are then as before."""
        ...

    def random_state(self) -> Tensor:
        """The states of all generators that random operators draw from on this accelerator and the host."""
        ...

    def set_random_state(self, state: Tensor) -> None:
        """Set the state that `random_state` gave."""

    def memory(self) -> MemoryUse: ...

    def reset_peak(self) -> None: ...

    def release_cached(self) -> None:
        """Gives what the allocator has reserved and no tensor uses to other processes."""

    def synchronize(self) -> None:
        """The host waits for all streams."""


ANCHOR_S = 30.0
"""How long an anchor is used. The two clocks drift, and the time between two distant events has few digits."""
TRIES = 3


class DeviceClock:
    """The clock of all threads, in seconds. It is anchored by an event on a stream that has nothing else to do: the
    host waits for no work of other streams."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.new_stream()
        self._anchoring = threading.Lock()
        self._anchor = self._anchored()

    def at_s(self, event: DeviceEvent) -> float:
        """Return the time of a timed event that is done, in seconds of `time.monotonic`."""
        with self._anchoring:
            anchor, anchored_s = self._anchor
            if time.monotonic() - anchored_s > ANCHOR_S:
                self._anchor = anchor, anchored_s = self._anchored()
        return anchored_s + anchor.seconds_to(event)

    def _anchored(self) -> tuple[DeviceEvent, float]:
        tries: list[tuple[float, DeviceEvent, float]] = []
        with self._accelerator.on(self._stream):
            for _ in range(TRIES):
                before_s = time.monotonic()
                event = self._accelerator.record(timed=True)
                event.synchronize()
                after_s = time.monotonic()
                tries.append((after_s - before_s, event, (before_s + after_s) / 2))
        _, event, at_s = min(tries, key=lambda one: one[0])
        return event, at_s


GENERATOR = threading.Lock()
"""Torch draws from one generator per process and device, and the stages of several devices may run in its threads."""


class _Moment(DeviceEvent):
    def __init__(self) -> None:
        self.at_s = time.monotonic()

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def seconds_to(self, later: DeviceEvent) -> float:
        if not isinstance(later, _Moment):
            raise InternalError("events of two accelerators have no time between them")
        return later.at_s - self.at_s


class _HostStream(Stream):
    pass


class Host:
    device = torch.device("cpu")
    asynchronous = False

    @property
    def name(self) -> str:
        return _cpu_name()

    def new_stream(self) -> Stream:
        return _HostStream()

    def on(self, stream: Stream) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def record(self, *, timed: bool = False) -> DeviceEvent:
        return _Moment()

    def wait(self, event: DeviceEvent) -> None:
        pass

    def used_here(self, tensor: Tensor) -> None:
        pass

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Generator[None]:
        with GENERATOR, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def memory(self) -> MemoryUse:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        code = code_bytes()
        used = max(0, _resident_bytes(page) - code)
        peak = max(used, _peak_bytes() - code)  # the kernel counts the peak a little later
        return MemoryUse(
            total=total,
            free=_free_bytes(total),
            allocated=used,
            reserved=used,
            peak_allocated=peak,
            peak_reserved=peak,
        )

    def reset_peak(self) -> None:
        """On Linux; elsewhere the kernel keeps the peak of a process's whole life."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def release_cached(self) -> None:
        """Give back what glibc keeps of freed memory between blocks in use."""
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            cast("Callable[[int], int]", trim)(0)

    def synchronize(self) -> None:
        pass


HOST = Host()


def _free_bytes(total: int) -> int:
    """Without swapping, and of what this process may have; where the system does not tell, all there is."""
    available = available_bytes()
    if available is None:
        return total
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY:
        return available
    return max(0, min(available, most - (kilobytes(Path("/proc/self/status"), "VmData") or 0)))


def _resident_bytes(page: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * page
    return _peak_bytes()


def _peak_bytes() -> int:
    # Linux counts the parent's memory before exec among the usage's.
    if (found := kilobytes(Path("/proc/self/status"), "VmHWM")) is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
