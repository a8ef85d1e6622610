"""Attributes an error in a step: to the job, which every device repeats, or to this device."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from isthmus.accelerators import Accelerator
from isthmus.errors import IsthmusError, StepError
from isthmus.protocol.step_failures import MemoryShortage
from isthmus.units import parse_size

_NO_MEMORY = "can't allocate memory"  # torch's text in a plain RuntimeError where the CPU's memory is short
_LIBRARY_SHORT = re.compile(
    r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_ALLOC_FAILED|unable to find an engine"
)
"""Texts of an accelerator's libraries in a plain RuntimeError where no memory is left beside the allocator."""
_LIBRARY_FAILED = re.compile(r"(CUDA|cuDNN|NCCL|HIP) error|(CUDNN|CUBLAS|CUSOLVER)_STATUS_")
_ASKED = re.compile(r"[Tt]ried to allocate ([0-9]+(?= bytes)|[0-9.]+ ?[KMGT]?i?B)")


def raise_if_jobs(what: str, error: Exception) -> None:
    """Call it in an `except` and raise again what it leaves: StepError unless memory is short, or the device's disk,
    accelerator or connection failed."""
    if isinstance(error, IsthmusError | OSError) or is_short_of_memory(error) or is_drivers(error):
        return
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    raise StepError(what, reason) from error


def is_short_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error):
        return True
    if isinstance(error, torch.AcceleratorError):
        return "out of memory" in str(error)  # a driver's, outside of torch's
    return isinstance(error, RuntimeError) and _LIBRARY_SHORT.search(str(error)) is not None


def is_drivers(error: Exception) -> bool:
    """Return whether the accelerator itself failed: nothing can be computed with it in this process any more."""
    if is_short_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and _LIBRARY_FAILED.search(str(error)) is not None


def shortage(accelerator: Accelerator, error: Exception, before: int) -> MemoryShortage:
    """The figures of an error of memory, while what raised it is still held; `before` is what the process had reserved
    before it got its stage."""
    found = accelerator.memory()
    match = _ASKED.search(str(error))
    asked = 0
    if match is not None:
        asked = int(match[1]) if match[1].isdecimal() else parse_size(match[1], "what was asked for")
    return MemoryShortage(asked=asked, free=found.free, total=found.total, reserved=found.reserved, before=before)
