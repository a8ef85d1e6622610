"""What a verification found, field by field."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

CLOSE = 1e-9
"""Relative: sums of floats taken in another order agree to this."""

Figure = int | float | str | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the document that does not hold."""

    field: str
    got: Figure
    """What the document says."""
    expected: Figure
    """What was computed, or what would be allowed, in words."""
    by: str = ""
    """How far apart two numbers are."""


class BoundCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What was done about the certificate's lower bound, and what was not."""

    status: Literal["none stated", "proven", "refuted", "unchecked"]
    own: float | None = None
    """A lower bound computed here without a search, for the same question: seconds, or money."""
    proven: float = 0.0
    """The highest lower bound that was proven here, by a search too, but not above the one stated."""
    text: str
    """In words, with what this does not prove."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`checked` fields were compared with figures computed anew; `differences` did not hold."""

    checked: int
    differences: tuple[Difference, ...]
    bound: BoundCheck

    def holds(self, *, bound_unchecked: bool = False) -> bool:
        """Whether all figures hold, and the bound, if one is stated, was proven or need not be."""
        return not self.differences and (bound_unchecked or self.bound.status != "unchecked")


class DifferenceList:
    """Counts what is compared and keeps what differs."""

    def __init__(self) -> None:
        self.checked = 0
        self.differences: list[Difference] = []

    def same(self, field: str, got: Figure, expected: Figure) -> bool:
        """Equal; two numbers to the last digit."""
        return self.judge(field, got == expected, got, expected)

    def close(self, field: str, got: float, expected: float) -> bool:
        """Equal but for the order of a sum; a number that is not finite is never close."""
        return self.judge(field, math.isclose(got, expected, rel_tol=CLOSE, abs_tol=1e-15), got, expected)

    def judge(self, field: str, holds: bool, got: Figure, expected: Figure) -> bool:
        self.checked += 1
        if not holds:
            self.differences.append(Difference(field=field, got=got, expected=expected, by=_apart(got, expected)))
        return holds


def _apart(got: Figure, expected: Figure) -> str:
    if isinstance(got, str) or isinstance(expected, str) or got is None or expected is None:
        return ""
    relative = f" ({100 * (got - expected) / expected:+.3g} %)" if expected else ""
    return f"{got - expected:+.6g}{relative}"
