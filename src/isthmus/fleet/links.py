"""Directed links: what one is, how it changes with time, its history in a CSV file, and how a fleet's links are stated.

    time, latency, bandwidth
    0 s,  21 ms,   95 Mbit/s
    60 s, 35 ms,   40 Mbit/s

The columns may stand in any order. A cell is a text with a unit, or an SI base value.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from isthmus.errors import UserError
from isthmus.units import parse_bandwidth, parse_duration
from isthmus.wire_types import MOST_NAME, Above, Many, NotNegative


def check_label(field: str, text: str) -> None:
    # One printable line: names end up in TOML, in messages and in tables.
    if not 0 < len(text) <= MOST_NAME or not text.isprintable() or text != text.strip():
        raise UserError(
            f"{field}: got {text[:MOST_NAME]!r}, expected printable text of at most {MOST_NAME} characters without "
            "spaces at its ends"
        )


def check_number(field: str, number: float, *, above_zero: bool = False) -> None:
    # Compared, not math.isfinite: that overflows on an integer of 400 digits. NaN fails every comparison.
    if not 0 <= number < math.inf or (above_zero and number == 0):
        raise UserError(f"{field}: got {number}, expected a finite number {'above' if above_zero else 'of at least'} 0")


class LinkTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link as it was measured over time: each sample holds until the next one, and the last one from then on.

    Raises `UserError` for no sample, lists of different lengths, or times that do not start at 0 and rise.
    """

    times_s: Many[NotNegative]
    latency_s: Many[NotNegative]
    bandwidth_bytes_per_s: Many[Above]

    def __post_init__(self) -> None:
        counts = {len(self.times_s), len(self.latency_s), len(self.bandwidth_bytes_per_s)}
        if counts == {0} or len(counts) > 1:
            raise UserError(f"link trace: got columns of {sorted(counts)} rows, expected one or more, the same in each")
        for latency_s, bandwidth in zip(self.latency_s, self.bandwidth_bytes_per_s, strict=True):
            check_number("link trace: latency_s", latency_s)
            check_number("link trace: bandwidth_bytes_per_s", bandwidth, above_zero=True)
        if self.times_s[0] != 0:
            raise UserError(f"link trace: the first time is {self.times_s[0]} s, expected 0")
        for before, after in itertools.pairwise(self.times_s):
            check_number("link trace: times_s", after)
            if not after > before:
                raise UserError(f"link trace: time {after} s after {before} s, expected rising times")

    def latency_at(self, time_s: float) -> float:
        return self.latency_s[self._sample(time_s)]

    def sent_s(self, start_s: float, size_bytes: float) -> float:
        """Return when the last of `size_bytes` has left, if the first leaves at `start_s`."""
        sample, now_s, left_bytes = self._sample(start_s), start_s, size_bytes
        for end_s in self.times_s[sample + 1 :]:
            room_bytes = (end_s - now_s) * self.bandwidth_bytes_per_s[sample]
            if left_bytes <= room_bytes:
                break
            left_bytes -= room_bytes
            now_s, sample = end_s, sample + 1
        return now_s + left_bytes / self.bandwidth_bytes_per_s[sample]

    def mean(self) -> Link:
        """The link with the latency and bandwidth of this trace, averaged over its time."""
        held_s = [after - before for before, after in itertools.pairwise(self.times_s)] or [1.0]

        def average(column: tuple[float, ...]) -> float:
            # The last sample has no end; it counts where it is the only one.
            return sum(value * s for value, s in zip(column, held_s, strict=False)) / sum(held_s)

        return Link(average(self.latency_s), average(self.bandwidth_bytes_per_s), self)

    def _sample(self, time_s: float) -> int:
        return max(0, bisect.bisect_right(self.times_s, time_s) - 1)


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One direction between two devices: latency (alpha) and bandwidth (1/beta in FusionLLM's model).

    Of a link with a trace they are the averages that planners go by; the simulator follows the trace. Latency is in
    seconds, bandwidth in bytes per second. Raises `UserError` for a number out of range.

    >>> import isthmus
    >>> link = isthmus.Link(latency_s=0.02, bandwidth_bytes_per_s=1e6)
    >>> link.transfer_s(1e6)  # seconds of a megabyte
    1.02
    """

    latency_s: NotNegative
    bandwidth_bytes_per_s: Above
    trace: LinkTrace | None = None

    def __post_init__(self) -> None:
        check_number("link: latency_s", self.latency_s)
        check_number("link: bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above_zero=True)

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds until a message has arrived whole: latency + size / bandwidth (FusionLLM's alpha-beta model)."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link from `source` to `target`, which are two devices or two regions."""

    source: str
    target: str
    link: Link


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links of a fleet, general rules first. A later rule overrides an earlier one.

    A region paired with itself in `regions` overrides `intra` for that region.
    """

    default: Link | None = None
    intra: Link | None = None
    regions: tuple[Route, ...] = ()
    devices: tuple[Route, ...] = ()


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links of one region: within it, and to the other regions."""

    region: str
    uplink_bytes_per_s: float | None = None
    """Shared by all links that leave the region; None where they do not share any."""
    egress_price_per_gb: float = 0.0  # price of 10**9 bytes that leave the region, in the unit of the devices' prices

    def __post_init__(self) -> None:
        if self.uplink_bytes_per_s is not None:
            check_number(f"site {self.region!r}: uplink_bytes_per_s", self.uplink_bytes_per_s, above_zero=True)
        check_number(f"site {self.region!r}: egress_price_per_gb", self.egress_price_per_gb)


COLUMNS = ("time", "latency", "bandwidth")


def read_link_trace(given: object, folder: Path, where: str) -> LinkTrace:
    """The trace of a CSV file, whose path counts from `folder`, or of a list of rows. Raises `UserError`."""
    if isinstance(given, str):
        path = folder / given
        return _trace(_file_rows(path, where), f"{where} {path}")
    if isinstance(given, list):
        return _trace(cast("list[object]", given), where)
    raise UserError(f"{where}: got {given!r}, expected the path of a CSV file or a list of [time, latency, bandwidth]")


def _file_rows(path: Path, where: str) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        head, *rows = csv.reader(lines, skipinitialspace=True) if lines else [[]]
    except csv.Error as error:
        raise UserError(f"{where}: cannot read {path}: {error}") from None
    names = [name.strip() for name in head]
    if sorted(names) != sorted(COLUMNS):
        raise UserError(f"{where}: {path}: got columns {names}, expected {', '.join(COLUMNS)}")
    order = [names.index(column) for column in COLUMNS]
    full = [row for row in rows if any(cell.strip() for cell in row)]
    for number, row in enumerate(full, 1):
        if len(row) != len(COLUMNS):
            raise UserError(f"{where}: {path}: row {number}: got {len(row)} cells, expected {len(COLUMNS)}")
    return [[row[i].strip() for i in order] for row in full]


def _trace(rows: Sequence[object], where: str) -> LinkTrace:
    samples: list[tuple[float, float, float]] = []
    for number, row in enumerate(rows, 1):
        at = f"{where}: row {number}"
        if not isinstance(row, list) or len(cells := cast("list[object]", row)) != len(COLUMNS):
            raise UserError(f"{at}: got {row!r}, expected [time, latency, bandwidth]")
        time, latency, bandwidth = map(_number, cells)
        samples.append(
            (
                parse_duration(time, f"{at}: time"),
                parse_duration(latency, f"{at}: latency"),
                parse_bandwidth(bandwidth, f"{at}: bandwidth"),
            )
        )
    if not samples:
        raise UserError(f"{where}: got no row, expected at least one")
    try:
        return LinkTrace(*(tuple(column) for column in zip(*samples, strict=True)))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _number(cell: object) -> object:
    """A CSV file has no numbers, only texts."""
    try:
        return float(cell) if isinstance(cell, str) else cell
    except ValueError:
        return cell
