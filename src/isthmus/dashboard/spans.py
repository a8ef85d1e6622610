"""Spans in columns: half a million of them are searched, measured and drawn within a moment."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.trace import Span

MOST_BARS = 3000
"""Of a picture; of more spans, those that are narrower than a column of pixels are drawn as one."""
TRACKS = ("compute", "send", "receive", "down", "up", "control")


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
    """Seconds of the trace; `spans` that are drawn as one have the name of those that take most of it."""

    start_s: float
    end_s: float
    name: str
    micro_batch: int
    other: str
    spans: int
    busy: float
    """Share of the bar that spans cover."""


class SpanTable:
    """Rows in the order in which they were written."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._numbers: dict[str, int] = {}
        self.clear()

    def clear(self) -> None:
        self.times = np.empty((0, 2))
        """Start and end, seconds."""
        self.whole = np.empty((0, 7), dtype=np.int64)
        """device, track, name, other (numbers of words), step, micro-batch, bytes."""

    def __len__(self) -> int:
        return len(self.times)

    def add(self, spans: Sequence[LightSpan | Span]) -> None:
        if spans and not spans[0].device:
            spans = spans[1:]  # a trace's header
        if not spans:
            return
        gc.disable()  # what is made here holds no cycles, and a hundred collections of it would take seconds
        try:
            number = self._number
            times = np.array([(s.start_s, s.end_s) for s in spans])
            whole = [
                (*map(number, (s.device, s.track, s.name, s.other)), s.step, s.micro_batch, s.size_bytes) for s in spans
            ]
            self.times = np.concatenate([self.times, times])
            self.whole = np.concatenate([self.whole, np.array(whole, dtype=np.int64)])
        finally:
            gc.enable()

    def _number(self, word: str) -> int:
        found = self._numbers.get(word)
        if found is None:
            found = self._numbers[word] = len(self.words)
            self.words.append(word)
        return found

    def number(self, word: str) -> int:
        """-1 for one that no span has."""
        return self._numbers.get(word, -1)

    def steps(self) -> NDArray[np.int64]:
        """Those with a forward, ascending."""
        return np.unique(self.whole[self.whole[:, 2] == self.number("F"), 4])

    def step_window(self, step: int, first_row: int = 0) -> tuple[float, float] | None:
        """From the first forward of a step to that of the next, or to its last update; None where it was not done.
        Rows before `first_row` are of attempts that do not count."""
        times, whole = self.times[first_row:], self.whole[first_row:]
        forward = whole[:, 2] == self.number("F")
        starts = times[forward & (whole[:, 4] == step), 0]
        if not len(starts):
            return None
        following = times[forward & (whole[:, 4] == step + 1), 0]
        end = following.min() if len(following) else times[whole[:, 4] == step, 1].max()
        return float(starts.min()), float(max(end, starts.min()))

    def rates(self, first_row: int, end_row: int) -> dict[tuple[str, str], tuple[int, float]]:
        """By source and target: bytes that these rows' sends carried, and in how many seconds."""
        whole, times = self.whole[first_row:end_row], self.times[first_row:end_row]
        sends = whole[:, 1] == self.number("send")
        found: dict[tuple[str, str], tuple[int, float]] = {}
        pairs, inverse = np.unique(whole[sends][:, (0, 3)], axis=0, return_inverse=True)
        carried = np.bincount(inverse.ravel(), whole[sends][:, 6], len(pairs))
        seconds = np.bincount(inverse.ravel(), (times[sends][:, 1] - times[sends][:, 0]), len(pairs))
        for (source, target), size, took in zip(pairs, carried, seconds, strict=True):
            found[self.words[source], self.words[target]] = (int(size), float(took))
        return found

    def bars(self, from_s: float, to_s: float, columns: int) -> dict[tuple[str, str], list[Bar]]:
        """What a picture of so many columns of pixels shows of a time, by device and track."""
        inside = (self.times[:, 1] > from_s) & (self.times[:, 0] < to_s)
        times, whole = self.times[inside], self.whole[inside]
        merged = (
            (times[:, 1] - times[:, 0] < (to_s - from_s) / columns)
            if len(times) > MOST_BARS
            else np.zeros(len(times), dtype=bool)
        )
        found: dict[tuple[str, str], list[Bar]] = {}
        for (start, end), row in zip(times[~merged].tolist(), whole[~merged].tolist(), strict=True):
            device, track, name, other = (self.words[n] for n in row[:4])
            found.setdefault((device, track), []).append(Bar(start, end, name, row[5], other, 1, 1.0))
        self._merge(times[merged], whole[merged], (from_s, (to_s - from_s) / columns), found)
        return found

    def _merge(
        self,
        times: NDArray[np.float64],
        whole: NDArray[np.int64],
        grid: tuple[float, float],
        found: dict[tuple[str, str], list[Bar]],
    ) -> None:
        """A bar for each column of each row, with the name that takes most of it; neighbours of one name are one."""
        from_s, width_s = grid
        column = np.clip((times[:, 0] - from_s) / width_s, 0, None).astype(np.int64)
        rows = np.column_stack([whole[:, 0], whole[:, 1], column, whole[:, 2]])
        keys, inverse = np.unique(rows, axis=0, return_inverse=True)
        seconds = np.bincount(inverse.ravel(), times[:, 1] - times[:, 0], len(keys))
        counts = np.bincount(inverse.ravel(), minlength=len(keys))
        best: dict[tuple[int, int, int], tuple[float, int, float, int]] = {}
        for (device, track, at, name), took, n in zip(keys.tolist(), seconds.tolist(), counts.tolist(), strict=True):
            most, named, sum_s, total = best.get((device, track, at), (-1.0, -1, 0.0, 0))
            most, named = (took, name) if took > most else (most, named)
            best[device, track, at] = (most, named, sum_s + took, total + n)
        for (device, track, at), (_, named, sum_s, total) in best.items():
            bars = found.setdefault((self.words[device], self.words[track]), [])
            start, busy = from_s + at * width_s, min(1.0, sum_s / width_s)
            last = bars[-1] if bars else None
            if last and last.spans > 1 and last.name == self.words[named] and start - last.end_s < width_s / 2:
                share = last.busy * (last.end_s - last.start_s) + busy * width_s
                whole_s = start + width_s - last.start_s
                bars[-1] = last._replace(end_s=start + width_s, spans=last.spans + total, busy=share / whole_s)
            else:
                bars.append(Bar(start, start + width_s, self.words[named], -1, "", max(2, total), busy))
