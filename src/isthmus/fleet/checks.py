"""What every name and number of a fleet has to be."""

from __future__ import annotations

import math

from isthmus.errors import UserError


def check_label(field: str, text: str) -> None:
    # One printable line: names end up in TOML, in messages and in tables.
    if not text or not text.isprintable() or text != text.strip():
        raise UserError(f"{field}: got {text!r}, expected printable text without spaces at its ends")


def check_number(field: str, number: float, *, above_zero: bool = False) -> None:
    # Compared, not math.isfinite: that overflows on an integer of 400 digits. NaN fails every comparison.
    if not 0 <= number < math.inf or (above_zero and number == 0):
        raise UserError(f"{field}: got {number}, expected a finite number {'above' if above_zero else 'of at least'} 0")
