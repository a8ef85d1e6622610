"""How far a device's sends and copies go on beside its other work.

`isthmus.trace.hidden_share` is the share behind computing. Where links take far longer than computing it is small
however well they overlap, so here the shorter of the two counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.trace import Span, Trace

Interval = tuple[float, float]
COPIES = ("down", "up")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """In order, without overlaps."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def common(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Seconds that lie in both; each without overlaps."""
    return length(a) + length(b) - length(union([*a, *b]))


def overlap(trace: Trace) -> float | None:
    """Of the shorter of sending and computing, the share that goes on beside the other; all devices together.

    1: what takes longer is all that one sees. None for a trace that sends nothing.
    """
    both = least = 0.0
    for device in sorted({span.device for span in trace.spans}):
        sends, computes = of(trace.spans, device, ("send",)), of(trace.spans, device, ("compute",))
        both += common(sends, computes)
        least += min(length(sends), length(computes))
    return both / least if least else None


def copies_beside_work(trace: Trace) -> float | None:
    """Of the time in which tensors go from the device to its host or back, the share in which the device computes or
    a link of it is at work. None where nothing is copied, as on a CPU."""
    both = whole = 0.0
    for device in sorted({span.device for span in trace.spans}):
        copies = of(trace.spans, device, COPIES)
        both += common(copies, of(trace.spans, device, ("compute", "send", "receive")))
        whole += length(copies)
    return both / whole if whole else None


def of(spans: Iterable[Span], device: str, tracks: Sequence[str]) -> list[Interval]:
    """Of steps after the first, which warms up."""
    return union(
        (span.start_s, span.end_s) for span in spans if span.device == device and span.track in tracks and span.step > 0
    )
