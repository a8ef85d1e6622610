"""The CPU: work is done when the call returns, so streams are nothing and events are moments."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import torch
from torch import Tensor

from isthmus.accelerators.accelerator import DeviceEvent, MemoryUse, Stream
from isthmus.errors import InternalError
from isthmus.free_memory import available_bytes, kilobytes

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
        used = _resident_bytes(page)
        peak = max(used, _peak_bytes())  # the kernel counts the peak a little later
        return MemoryUse(
            total=total,
            free=_free_bytes(total),
            allocated=used,
            reserved=used,
            peak_allocated=peak,
            peak_reserved=peak,
        )

    def reset_peak(self) -> None:
        """The kernel keeps the peak of a process's whole life."""

    def release_cached(self) -> None:
        pass

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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
