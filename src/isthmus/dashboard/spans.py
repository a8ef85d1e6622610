"""Spans in columns: half a million of them are searched, measured and drawn within a moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.trace import Span

MOST_BARS = 3000
"""Bars of a picture. If there are more spans, those that are narrower than a column are drawn as one bar."""


class LightSpan(msgspec.Struct, gc=False):
    """A line of a trace; its header has none of these."""

    device: str = ""
    track: str = "control"
    name: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    step: int = -1
    micro_batch: int = -1
    size_bytes: int = 0
    other: str = ""


class Bar(NamedTuple):
    """One span in seconds, or several that are drawn as one under the name that takes most of their time."""

    start_s: float
    end_s: float
    name: str
    micro_batch: int
    other: str
    spans: int
    busy: float  # share of the bar that spans cover


class SpanTable:
    """Rows in the order in which they were written."""

    def __init__(self) -> None:
        self._words = defaultdict[str, int]()
        """Each name of a device, track or span, and its number, which is the next one where it is new."""
        self._words.default_factory = self._words.__len__
        self.clear()

    def clear(self) -> None:
        self.times = np.empty((0, 2))  # start and end, seconds
        self.whole = np.empty((0, 7), dtype=np.int64)
        """Numbers of device, track, name and other; step, micro-batch, bytes."""

    def __len__(self) -> int:
        return len(self.times)

    def add(self, spans: Sequence[LightSpan | Span]) -> None:
        """The header of a trace is left out."""
        kept = spans[1:] if spans and not spans[0].device else spans
        if not kept:
            return
        columns: list[NDArray[np.int64]] = []
        for name in ("device", "track", "name", "other"):
            numbers = map(self._words.__getitem__, map(attrgetter(name), kept))
            columns.append(np.fromiter(numbers, np.int64, len(kept)))
        for name in ("step", "micro_batch", "size_bytes"):
            columns.append(np.fromiter(map(attrgetter(name), kept), np.int64, len(kept)))
        times = [np.fromiter(map(attrgetter(name), kept), np.float64, len(kept)) for name in ("start_s", "end_s")]
        self.times = np.concatenate([self.times, np.column_stack(times)])
        self.whole = np.concatenate([self.whole, np.column_stack(columns)])

    def _named(self, column: int, word: str, rows: slice = slice(None)) -> NDArray[np.bool_]:
        return self.whole[rows, column] == self._words.get(word, -1)

    def steps(self) -> list[int]:
        """Those with a forward, ascending."""
        return np.unique(self.whole[self._named(2, "F"), 4]).tolist()

    def step_window(self, step: int, rows: slice = slice(None)) -> tuple[float, float] | None:
        """From the first forward of a step to that of the next, or to its last span; None where it was not done.
        Other rows are of attempts that do not count."""
        times, steps, forward = self.times[rows], self.whole[rows, 4], self._named(2, "F", rows)
        starts, following = times[forward & (steps == step), 0], times[forward & (steps == step + 1), 0]
        if not len(starts):
            return None
        end = following.min() if len(following) else times[steps == step, 1].max()
        return float(starts.min()), float(max(end, starts.min()))

    def rates(self, first_row: int, end_row: int) -> dict[tuple[str, str], float]:
        """Return bytes per second while these rows' sends were under way, by source and target."""
        rows, words = slice(first_row, end_row), list(self._words)
        sends = self._named(1, "send", rows)
        whole, times = self.whole[rows][sends], self.times[rows][sends]
        pairs, which = np.unique(whole[:, 0] * len(words) + whole[:, 3], return_inverse=True)
        size, took_s = np.bincount(which, whole[:, 6]), np.bincount(which, times[:, 1] - times[:, 0])
        return {
            (words[pair // len(words)], words[pair % len(words)]): carried / seconds
            for pair, carried, seconds in zip(pairs.tolist(), size.tolist(), took_s.tolist(), strict=True)
            if carried and seconds
        }

    def bars(self, from_s: float, to_s: float, columns: int) -> dict[tuple[str, str], list[Bar]]:
        """Return the bars of a time in a picture of so many columns, by device and track."""
        inside = (self.times[:, 1] > from_s) & (self.times[:, 0] < to_s)
        times, whole, words = self.times[inside], self.whole[inside], list(self._words)
        narrow = (times[:, 1] - times[:, 0] < (to_s - from_s) / columns) & (len(times) > MOST_BARS)
        found: dict[tuple[str, str], list[Bar]] = {}
        for (start, end), row in zip(times[~narrow].tolist(), whole[~narrow].tolist(), strict=True):
            bar = Bar(start, end, words[row[2]], row[5], words[row[3]], 1, 1.0)
            found.setdefault((words[row[0]], words[row[1]]), []).append(bar)
        self._merge(times[narrow], whole[narrow], from_s, (to_s - from_s) / columns, found)
        return found

    def _merge(
        self,
        times: NDArray[np.float64],
        whole: NDArray[np.int64],
        from_s: float,
        width_s: float,
        found: dict[tuple[str, str], list[Bar]],
    ) -> None:
        """A bar for each column of each track. A cell is a column of a track, and a part is one name in a cell."""
        if not len(times):
            return
        words, column = list(self._words), ((times[:, 0] - from_s) / width_s).clip(0).astype(np.int64)
        n, columns = len(words), int(column.max()) + 1
        cell = (whole[:, 0] * n + whole[:, 1]) * columns + column
        parts, part = np.unique(cell * n + whole[:, 2], return_inverse=True)
        took_s = np.bincount(part, times[:, 1] - times[:, 0])
        cells, of = np.unique(parts // n, return_inverse=True)
        longest = np.lexsort((took_s, of))[np.searchsorted(np.sort(of), np.arange(len(cells)), side="right") - 1]
        counts, busy = np.bincount(of, np.bincount(part)), np.bincount(of, took_s) / width_s
        facts = zip(cells.tolist(), (parts[longest] % n).tolist(), counts.tolist(), busy.tolist(), strict=True)
        for number, name, count, share in facts:
            track, at = divmod(number, columns)
            start = from_s + at * width_s
            bar = Bar(start, start + width_s, words[name], -1, "", max(2, int(count)), min(1.0, share))
            found.setdefault((words[track // n], words[track % n]), []).append(bar)
