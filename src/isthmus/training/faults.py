"""Whose fault it is that something raised in a step: the job's, which every device repeats, or this device's."""

from __future__ import annotations

import torch

from isthmus.errors import IsthmusError, StepError

_DEVICES_OWN = (MemoryError, OSError, torch.OutOfMemoryError, torch.AcceleratorError)
_NO_MEMORY = "can't allocate memory"
"""What torch says, as a plain RuntimeError, where the CPU's memory is short."""


def raise_if_jobs(what: str, error: Exception) -> None:
    """Call it in an `except` and raise again what it leaves: StepError unless memory is short, or the device's disk,
    accelerator or connection failed."""
    if isinstance(error, (IsthmusError, *_DEVICES_OWN)) or _NO_MEMORY in str(error):
        return
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    raise StepError(what, reason) from error
