"""How much memory an emulated device has and when it fails, as the environment says.

    ISTHMUS_CHECKED_MEMORY=64MiB            each device
    ISTHMUS_CHECKED_MEMORY=1GiB,64MiB@1     device 1 less than the others
    ISTHMUS_CHECKED_FAULT=after:200@1       device 1 fails in its 200th operator, and from then on
"""

from __future__ import annotations

import os

from isthmus.errors import UserError
from isthmus.units import parse_size

MEMORY = "ISTHMUS_CHECKED_MEMORY"
FAULT = "ISTHMUS_CHECKED_FAULT"
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


def _of(variable: str, index: int) -> str:
    """What it says of this device, or else of each."""
    found = ""
    for part in filter(None, os.environ.get(variable, "").split(",")):
        text, _, of = part.partition("@")
        if of and not of.isdecimal():
            raise UserError(f"{variable}: got {part!r}, expected the number of a device after '@'")
        if of and int(of) == index:
            return text.strip()
        found = found if of else text.strip()
    return found
