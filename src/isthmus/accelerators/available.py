"""The accelerators of this machine, and one of them by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from isthmus.accelerators.accelerator import GENERATOR, HOST, Accelerator, DeviceEvent, MemoryUse, Stream
from isthmus.errors import InternalError, UserError
from isthmus.extensions import TESTING, import_extra, load_third_party, third_party

MILLISECOND_S = 1e-3


class _TorchEvent(DeviceEvent):
    def __init__(self, device: torch.device, *, timed: bool) -> None:
        self.event = torch.Event(device, enable_timing=timed)

    def done(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_to(self, later: DeviceEvent) -> float:
        return self.event.elapsed_time(_of_torch(later)) * MILLISECOND_S


class _TorchStream(Stream):
    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)


class TorchAccelerator:
    """Implements `Accelerator`. Uncalled methods of `torch.accelerator` start nothing on the hardware: a process that
    will be forked must not make one of these."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        """`device` has an index."""
        self.device = device
        self._module = torch.get_device_module(device)

    @property
    def name(self) -> str:
        called = getattr(self._module, "get_device_name", None)
        return str(called(self.device)) if called is not None else f"{self.device.type.upper()} device"

    def new_stream(self) -> Stream:
        return _TorchStream(self.device)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Generator[None]:
        if not isinstance(stream, _TorchStream):
            raise InternalError(f"got a stream of {type(stream).__name__}, expected one of {self.device}")
        # Not `with stream.stream`: torch keeps what was current before in the stream itself, and several threads may
        # be on one.
        with self._current():
            before = torch.accelerator.current_stream(self.device)
            torch.accelerator.set_stream(stream.stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def record(self, *, timed: bool = False) -> DeviceEvent:
        event = _TorchEvent(self.device, timed=timed)
        event.event.record(torch.accelerator.current_stream(self.device))
        return event

    def wait(self, event: DeviceEvent) -> None:
        _of_torch(event).wait(torch.accelerator.current_stream(self.device))

    def used_here(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.accelerator.current_stream(self.device))

    def host_buffer(self, size_bytes: int) -> Tensor:
        with self._current():  # else pinning would begin a context on the first device
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Make this device torch's current device inside, whatever the thread's is."""
        return torch.accelerator.device_index(self.device.index)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Generator[None]:
        # The generator's state is on the host: neither reading nor writing it waits for the device.
        with GENERATOR, self._current():
            before = cast(Tensor, self._module.get_rng_state(self.device))
            self._module.manual_seed(seed)
            try:
                yield
            finally:
                self._module.set_rng_state(before, self.device)

    def random_state(self) -> Tensor:
        return torch.cat([torch.get_rng_state(), cast(Tensor, self._module.get_rng_state(self.device))])

    def set_random_state(self, state: Tensor) -> None:
        host = len(torch.get_rng_state())
        torch.set_rng_state(state[:host])
        self._module.set_rng_state(state[host:], self.device)

    def memory(self) -> MemoryUse:
        free, total = torch.accelerator.get_memory_info(self.device)
        return MemoryUse(
            total=total,
            free=free,
            allocated=torch.accelerator.memory_allocated(self.device),
            reserved=torch.accelerator.memory_reserved(self.device),
            peak_allocated=torch.accelerator.max_memory_allocated(self.device),
            peak_reserved=torch.accelerator.max_memory_reserved(self.device),
        )

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def release_cached(self) -> None:
        with self._current():
            torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


def _of_torch(event: DeviceEvent) -> torch.Event:
    if not isinstance(event, _TorchEvent):
        raise InternalError(f"got an event of {type(event).__name__}, expected one of torch's")
    return event.event


AUTO = "auto"
GROUP = "isthmus.accelerators"  # entry points: kind -> callable(index: int) -> Accelerator
# To count GPUs must start no driver: a process in which one was started cannot be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_HARDWARE = torch.accelerator.current_accelerator()
"""The accelerator that this build of torch is for. It is asked once: when the emulated kind is registered too, torch
names that one."""
_EMULATED = "checked"  # the kind of the emulated accelerator, which no machine has by itself


def accelerator_names() -> tuple[str, ...]:
    """Names of this machine's accelerators, without the CPU: "cuda:0", ... `open_accelerator` takes these names."""
    if _HARDWARE is None:
        return ()
    module = torch.get_device_module(_HARDWARE)
    if not module.is_available():
        return ()
    return tuple(f"{_HARDWARE.type}:{index}" for index in range(module.device_count()))


def resolve_accelerator(name: str = AUTO, field: str = "device") -> str:
    """The full name, as "cuda:0", of what `open_accelerator` would open; nothing is started. UserError as there."""
    kind, _, number = name.partition(":")
    if ":" in name and not (number.isascii() and number.isdecimal()):
        raise UserError(f"{field}: got {name!r}, expected a kind and a number, as in 'cuda:0'")
    found = f"{kind}:{int(number or 0)}"
    if found == "cpu:0":  # not asked further: that would start a driver
        return "cpu"
    here = accelerator_names()
    if name == AUTO:
        return here[0] if here else "cpu"
    if not _is_on_request(kind) and found not in here:
        raise UserError(f"{field}: got {name!r}, expected one of: {', '.join((AUTO, 'cpu', *here))}")
    if kind == _EMULATED:
        _emulator(field).check_settings(int(number or 0), field)
    return found


def open_accelerator(name: str = AUTO, field: str = "device") -> Accelerator:
    """The accelerator of this name: `cpu`, `cuda:1`, `mps`, ...; a name without an index means the first of its kind.
    `auto` means the first accelerator of this machine, or the CPU. Raises UserError, with `field` as the field's name,
    for an accelerator that this machine does not have."""
    kind, _, index = resolve_accelerator(name, field).partition(":")
    if kind == "cpu":
        return HOST
    if _is_on_request(kind):
        return _on_request(kind, int(index), field)
    return TorchAccelerator(torch.device(kind, int(index)))


def _is_on_request(kind: str) -> bool:
    return kind == _EMULATED or kind in third_party(GROUP)


def _on_request(kind: str, index: int, field: str) -> Accelerator:
    entry = third_party(GROUP).get(kind)
    made = _emulator(field).open_checked if entry is None else load_third_party(entry)
    return cast("Callable[[int], Accelerator]", made)(index)


def _emulator(field: str) -> ModuleType:
    """The module of the emulated accelerator, which is a distribution of its own."""
    return import_extra(f"{TESTING}.emulated_accelerator", f"{field}: {_EMULATED!r}")
