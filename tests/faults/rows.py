"""What a row of the fault table is, and what one moment of it showed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

STOP_S = float(os.environ.get("ISTHMUS_FAULT_STOP_S", "60"))
"""For how long a device is stopped or a link is cut."""
AGAIN_S = float(os.environ.get("ISTHMUS_FAULT_AGAIN_S", "600"))
"""For how long devices are killed again and again."""
NEAR = 1e-4
"""Of weights, where cuts were not the same: sums are made in another order. In runs of up to 180 steps a sample range
that is left out or done twice changes them by 1e-2 or more. A run of thousands has nothing left to learn in its middle:
a range more or less changes its weights by 5e-7 there, and only the history tells."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a moment showed."""

    seconds: tuple[float, ...] = ()
    """Of each recovery, from the fault until a step was done again."""
    redone: int = 0
    """Steps that were done again."""
    wrong: str = ""
    """What is not as it should be."""
    note: str = ""
    faults: int = 1
    """That were made."""
    length_s: float = 0.0
    """Of the fault, where it lasts."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str
    """For people."""
    once: Callable[[int, Path], Found]
    """With a seed, and a folder of its own for all moments of a process: raises whatever it likes."""
    moments: int = 20
    limit_s: float = 400.0
    """Nothing of it takes longer, on a busy machine either."""


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, bitwise: bool) -> str:
    """How the weights differ from an undisturbed run's by more than they may, or nothing."""
    if found.keys() != expected.keys():
        return f"other weights: {sorted(found.keys() ^ expected.keys())}"
    if all(torch.equal(found[name], value) for name, value in expected.items()):
        return ""
    largest = max(float((found[n].double() - v.double()).abs().max()) for n, v in expected.items() if v.numel())
    return f"weights differ by {largest:.1e}" if bitwise or not largest <= NEAR else ""
