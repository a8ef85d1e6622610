"""The accelerators of this machine, and one of them by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import cast

import torch

from isthmus.accelerators.accelerator import Accelerator
from isthmus.accelerators.host import HOST
from isthmus.accelerators.torch_accelerator import TorchAccelerator
from isthmus.errors import UserError
from isthmus.extensions import TESTING, import_extra, load_third_party, third_party

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
