"""How much memory an emulated device has, when it fails and what it refuses, as the environment says.

ISTHMUS_CHECKED_MEMORY=64MiB            each device
ISTHMUS_CHECKED_MEMORY=1GiB,64MiB@1     device 1 less than the others
ISTHMUS_CHECKED_FAULT=after:200@1       device 1 fails in its 200th operator, and from then on
ISTHMUS_CHECKED_REFUSE=implicit copy    an implicit copy raises; so does, by this name, a host synchronization
"""

from __future__ import annotations

import os
from typing import cast

from isthmus.accelerators.checked.counters import Wait
from isthmus.errors import UserError, check_choice
from isthmus.units import parse_size

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
    """What it says of this device, or else of each."""
    parts = _parts(variable)
    return parts.get(index, parts.get(None, ("",)))[-1]


def _parts(variable: str) -> dict[int | None, tuple[str, ...]]:
    """By the device that it is said of; None of each."""
    found: dict[int | None, tuple[str, ...]] = {}
    for part in filter(None, os.environ.get(variable, "").split(",")):
        text, _, of = part.partition("@")
        if of and not of.isdecimal():
            raise UserError(f"{variable}: got {part!r}, expected the number of a device after '@'")
        index = int(of) if of else None
        found[index] = (*found.get(index, ()), text.strip())
    return found
