"""Capabilities that do not go together, and why: every refusal of a combination is made from `combinations.toml`.

A combination is of a capability with a program, a way to run, or another capability, each of which can be had by
itself. docs/together.md is made from it, with a test for each combination that runs. Not there: an option that needs
another one, one thing that is said twice, numbers that do not fit, and what a model or a data set cannot do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.errors import UserError

NOT_BUILT = "not built yet"
Row = tuple[str, str, str, str]  # what, field, expected, reason


class Refusal(NamedTuple):
    """A capability that is refused beside something."""

    what: str
    beside: str
    words: str  # `beside`, in a sentence
    field: str  # the key of a job, or the option, that is named
    expected: str
    reason: str
    built: bool  # False: it could run, and nobody has built it yet


class _Beside(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    words: str
    never: tuple[Row, ...] = ()
    not_yet: tuple[Row, ...] = ()


@cache
def refusals() -> dict[tuple[str, str], Refusal]:
    """Return the table by capability, and by what it is refused beside."""
    text = Path(__file__).with_suffix(".toml").read_bytes()
    return {
        (row[0], beside): Refusal(row[0], beside, one.words, *row[1:], built)
        for beside, one in msgspec.toml.decode(text, type=dict[str, _Beside]).items()
        for rows, built in ((one.never, True), (one.not_yet, False))
        for row in rows
    }


def refused(what: str, beside: str, got: object = "", field: str = "", why: str = "") -> UserError:
    """The error for a combination of the table. `got` is what was set; `field` is named in place of the row's, and
    `why` adds to the reason."""
    row = refusals()[what, beside]
    found = f"{'true' if got is True else got} {row.words}" if got != "" else row.words
    reason = "; ".join(filter(None, (row.reason, why))) + ("" if row.built else f" ({NOT_BUILT})")
    return UserError(f"{field or row.field}: got {found}, expected {row.expected}: {reason}")
