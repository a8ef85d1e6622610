"""The rounds of a federated run as spans, for a trace viewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.federated.evaluation import RoundLine
from isthmus.trace import Span, Trace

COORDINATOR = "coordinator"


def trace_of(run: str, lines: Sequence[RoundLine]) -> Trace:
    """Rounds when they were, with the gaps between a run and its resumption; in each every executor's clients, in the
    order in which they were reported. What an executor waited is not written down, so its clients follow one another
    without gaps, and of an algorithm of several passes the earlier ones are one span each executor."""
    return Trace(source="runtime", run=run, spans=tuple(_spans(lines)))


def _spans(lines: Sequence[RoundLine]) -> Iterator[Span]:
    origin_s = next((line.opened_at_s for line in lines if line.opened_at_s is not None), 0.0)
    end_s = 0.0
    for line in lines:
        # A clock that was set back, or a line without its time, must not lay a round over the one before.
        begin_s = end_s if line.opened_at_s is None else max(end_s, line.opened_at_s - origin_s)
        record, end_s = line.record, begin_s + line.seconds
        number = record.round + 1
        yield Span(
            device=COORDINATOR,
            track="control",
            name=f"round {number}",
            start_s=begin_s,
            end_s=end_s,
            step=number,
            size_bytes=line.sent_bytes + line.received_bytes,
        )
        for name in sorted(line.busy_s(), key=lambda name: (len(name), name)):
            at_s = begin_s
            if earlier_s := record.earlier_s.get(name, 0.0):
                yield _training(name, "earlier passes", at_s, earlier_s, number)
                at_s += earlier_s
            for timed in record.trained.get(name, ()):
                yield _training(name, f"client {timed.client}", at_s, timed.seconds, number)
                at_s += timed.seconds


def _training(executor: str, name: str, at_s: float, seconds: float, number: int) -> Span:
    return Span(device=executor, track="compute", name=name, start_s=at_s, end_s=at_s + seconds, step=number)
