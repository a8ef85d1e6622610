"""Human units in and out: "67 ms", "1.15 Gbps", "16 GiB", "125 TFLOPS".

Inside Isthmus everything is in SI base values: seconds, bytes per second, bytes, FLOP per second. Text becomes one of
them here, exactly: the arithmetic is rational and rounds once, so "67 ms" is the float 0.067 and nothing beside it.

Units are case-sensitive, because in bandwidth the case of one letter is a factor of eight. A text without a unit is
refused; a bare number is taken as the SI base value.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from isthmus.errors import UserError

# Bounded digits: a hostile "1e999999999 s" must not cost gigabytes of rational arithmetic.
__all__ = [
    "exact",
    "format_bandwidth",
    "format_compute",
    "format_count",
    "format_duration",
    "format_share",
    "format_size",
    "parse_bandwidth",
    "parse_compute",
    "parse_duration",
    "parse_size",
    "significant",
    "whole_number",
]

_TEXT = re.compile(r"([+-]?[0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,3})?) *(\S*)")

_SI = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5}


def _si(suffix: str, base: Fraction) -> dict[str, Fraction]:
    """Every SI multiple of `suffix`; "K" is accepted beside "k", as nobody measures any of these in kelvin."""
    table = {f"{prefix}{suffix}": base * 10**power for prefix, power in _SI.items()}
    return table | {f"K{suffix}": base * 1000}


def _binary(suffix: str) -> dict[str, Fraction]:
    return {f"{prefix}{suffix}": Fraction(1024**power) for prefix, power in _BINARY.items()}


class _Quantity(NamedTuple):
    noun: str
    base: str
    examples: str
    units: Mapping[str, Fraction]
    shown: tuple[str, ...]  # the units that people are shown, largest first
    zero: bool  # whether zero is a sensible value


_ONE = Fraction(1)
_DURATION = _Quantity(
    noun="duration",
    base="seconds",
    examples='"67 ms", "1.5 s", "30 us"',
    units={
        "ns": _ONE / 10**9,
        "us": _ONE / 10**6,
        "\u00b5s": _ONE / 10**6,  # the micro sign
        "\u03bcs": _ONE / 10**6,  # the Greek letter, which looks the same
        "ms": _ONE / 1000,
        "s": _ONE,
        "min": Fraction(60),
        "h": Fraction(3600),
        "d": Fraction(86400),
    },
    shown=("d", "h", "min", "s", "ms", "us", "ns"),
    zero=True,
)
_BANDWIDTH = _Quantity(
    noun="bandwidth",
    base="bytes per second",
    examples='"1.15 Gbps", "100 Mbit/s", "12 MB/s"',
    units={**_si("bit/s", _ONE / 8), **_si("bps", _ONE / 8), **_si("B/s", _ONE), **_binary("B/s")},
    shown=("Tbit/s", "Gbit/s", "Mbit/s", "kbit/s", "bit/s"),
    zero=False,
)
_SIZE = _Quantity(
    noun="size",
    base="bytes",
    examples='"16 GiB", "500 MB", "512 KiB"',
    units={**_si("B", _ONE), **_binary("B")},
    shown=("PiB", "TiB", "GiB", "MiB", "KiB", "B"),
    zero=True,
)
_COMPUTE = _Quantity(
    noun="compute speed",
    base="FLOP per second",
    examples='"125 TFLOPS", "14 GFLOPS", "3.5e9 FLOP/s"',
    units={**_si("FLOPS", _ONE), **_si("FLOP/s", _ONE)},
    shown=("EFLOPS", "PFLOPS", "TFLOPS", "GFLOPS", "MFLOPS", "kFLOPS", "FLOPS"),
    zero=False,
)


@functools.lru_cache
def exact(share: float) -> Fraction:
    """The decimal number that was written: 0.29 of 100 are 29, of the binary float next to it 28.999..."""
    return Fraction(repr(float(share)))


def parse_duration(text: object, field: str) -> float:
    """Seconds, at least 0. `field` is what the message of the `UserError` calls the value."""
    return _parse_float(text, field, _DURATION)


def parse_bandwidth(text: object, field: str) -> float:
    """Bytes per second, above 0. "bps" and "bit/s" are bits, "B/s" are bytes. Raises `UserError`."""
    return _parse_float(text, field, _BANDWIDTH)


def parse_compute(text: object, field: str) -> float:
    """FLOP per second, above 0. Raises `UserError`."""
    return _parse_float(text, field, _COMPUTE)


def parse_size(text: object, field: str) -> int:
    """Bytes, at least 0. "MB" is 1000² bytes, "MiB" 1024². Raises `UserError`.

    A part of a byte is refused where bytes were written, and rounded where the unit made it ("1.1 GiB").
    """
    exact, unit = _parse(text, field, _SIZE)
    if unit in ("", "B") and exact.denominator != 1:
        raise _refusal(text, field, _SIZE, "a whole number of bytes is needed")
    if exact >= 2**63:  # the largest integer that TOML and JSON readers agree on
        raise _refusal(text, field, _SIZE, "it is too large")
    return round(exact)


def whole_number(text: str) -> int | None:
    """Read decimal digits; None for another text, and for more digits than any count has: Python refuses thousands."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def format_duration(seconds: float, *, exact: bool = False) -> str:
    """Three significant digits ("67 ms", "2.5 min"), or with `exact` every digit, so that it parses back equal."""
    return _exact_text(seconds, 1, ("s", "ms", "us", "ns"), _DURATION) if exact else _rounded(seconds, _DURATION)


def format_bandwidth(bytes_per_s: float, *, exact: bool = False) -> str:
    """Text in bits per second ("1.15 Gbit/s"): three significant digits, or with `exact` every digit."""
    if exact:
        return _exact_text(bytes_per_s, 8, _BANDWIDTH.shown, _BANDWIDTH)
    return _rounded(bytes_per_s, _BANDWIDTH)


def format_compute(flops_per_s: float, *, exact: bool = False) -> str:
    """Text such as "125 TFLOPS": three significant digits, or with `exact` every digit."""
    return _exact_text(flops_per_s, 1, _COMPUTE.shown, _COMPUTE) if exact else _rounded(flops_per_s, _COMPUTE)


def format_size(size_bytes: float, *, exact: bool = False) -> str:
    """Text in binary units ("1.5 GiB") to three digits, or with `exact` in the largest unit that divides it ("500
    MB")."""
    if not exact:
        return _rounded(size_bytes, _SIZE)
    if size_bytes != int(size_bytes):
        raise ValueError(f"size_bytes: got {size_bytes!r}, expected a whole number of bytes")
    whole = int(size_bytes)
    fitting = [unit for unit, factor in _SIZE.units.items() if whole % factor == 0] if whole else ["B"]
    largest = max(fitting, key=_SIZE.units.__getitem__)
    return f"{whole // int(_SIZE.units[largest])} {largest}"


def format_share(share: float) -> str:
    """A part of a whole in percent ("10 %"), to four digits."""
    return f"{100 * share:.4g} %"


def format_metric(name: str, value: float | None) -> str:
    """A figure of an evaluation: accuracies in percent, others to four digits."""
    if value is None:
        return "-"
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.4f}" if name == "loss" else f"{value:.4g}"


def format_metrics(metrics: Mapping[str, float | None]) -> str:
    """Return the text behind a loss in a sentence (", accuracy 97.2%"); empty without metrics."""
    return "".join(f", {name} {format_metric(name, value)}" for name, value in metrics.items())


def format_count(count: int, noun: str) -> str:
    """`1 step`, `2 steps`: of nouns that take an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _parse_float(value: object, field: str, quantity: _Quantity) -> float:
    exact, _ = _parse(value, field, quantity)
    try:
        number = float(exact)
    except OverflowError:
        raise _refusal(value, field, quantity, "it is too large") from None
    # Again after rounding: what is too small for a float became zero.
    if number == 0 and not quantity.zero:
        raise _refusal(value, field, quantity, "it must be above zero")
    return number


def _parse(value: object, field: str, quantity: _Quantity) -> tuple[Fraction, str]:
    """The exact value in the base unit, and the unit that was written ("" for a bare number)."""
    if isinstance(value, str):
        exact, unit = _parse_text(value, field, quantity)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):  # an integer of 400 digits would overflow here
            raise _refusal(value, field, quantity, "it must be finite")
        exact, unit = Fraction(value), ""
    else:
        raise _refusal(value, field, quantity)
    if exact < 0:
        raise _refusal(value, field, quantity, "it must not be negative")
    if exact == 0 and not quantity.zero:
        raise _refusal(value, field, quantity, "it must be above zero")
    return exact, unit


def _parse_text(text: str, field: str, quantity: _Quantity) -> tuple[Fraction, str]:
    match = _TEXT.fullmatch(text.strip(" "))
    if match is None:
        raise _refusal(text, field, quantity)
    number, unit = match.groups()
    if not unit:
        raise _refusal(text, field, quantity, "the unit is missing")
    if unit not in quantity.units:
        raise _refusal(text, field, quantity, f"there is no unit {_short(unit)}{_offer(unit, quantity)}")
    return Fraction(number) * quantity.units[unit], unit


def _offer(unit: str, quantity: _Quantity) -> str:
    """The nearest units. Several, without regard to case: "Mb/s" may have been meant as "MB/s" and as "Mbit/s"."""
    folded = {name.casefold(): name for name in quantity.units}
    near = difflib.get_close_matches(unit.casefold(), folded, n=6, cutoff=0.6)
    # The prefix is rarely the slip: "kB/s" is one letter from "Mb/s" too, but nobody meant it.
    same_prefix = [name for name in near if name[0] == unit[0].casefold()]
    offered = (same_prefix or near)[:3]
    return f"; did you mean {' or '.join(repr(folded[name]) for name in offered)}?" if offered else ""


def _refusal(value: object, field: str, quantity: _Quantity, why: str = "") -> UserError:
    reason = f" ({why})" if why else ""
    # A text never passes for a number: on a command line there is nothing else.
    number = "" if isinstance(value, str) else f", or a number of {quantity.base}"
    expected = f"a {quantity.noun} such as {quantity.examples}{number}"
    return UserError(f"{field}: got {_short(value)}{reason}, expected {expected}")


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print the longest of them
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def significant(value: float, digits: int = 4) -> float:
    """To so many significant digits: what was measured is known to no more."""
    return float(f"{value:.{digits}g}")


def _rounded(value: float, quantity: _Quantity) -> str:
    if not math.isfinite(value):
        return f"{value} {quantity.base}"
    sign, size = ("-" if value < 0 else ""), abs(value)
    scaled, unit = size, next(unit for unit in quantity.shown if quantity.units[unit] <= 1)
    if size:
        for unit in quantity.shown:
            scaled = size / float(quantity.units[unit])
            # Compared after rounding, so that 59.98 s is "1 min" and never "60 s".
            if float(f"{scaled:.3g}") >= 1:
                break
    # Whole above a hundred: 1023 KiB would otherwise read "1.02e+03 KiB".
    return f"{sign}{scaled:.0f} {unit}" if 100 <= scaled < 1e6 else f"{sign}{scaled:.3g} {unit}"


def _exact_text(value: float, per_base: int, shown: tuple[str, ...], quantity: _Quantity) -> str:
    """Every digit of the float's shortest repr, moved to the largest unit of `shown` (powers of ten) it reaches.

    `per_base` is how many of the last-resort unit make one base value: 8 bits in a byte.
    """
    if not math.isfinite(value):
        raise ValueError(f"{quantity.noun}: got {value!r}, expected a finite number")
    decimal = Decimal(repr(float(value))) * per_base
    powers = {unit: round(math.log10(float(quantity.units[unit] * per_base))) for unit in shown}
    unit = next((unit for unit in shown if abs(decimal) >= Decimal(1).scaleb(powers[unit])), shown[-1])
    scaled = decimal.scaleb(-powers[unit]).normalize()
    plain = scaled.is_zero() or -9 <= scaled.adjusted() <= 12
    return f"{scaled:f} {unit}" if plain else f"{scaled} {unit}"
