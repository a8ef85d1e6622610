"""The one event schema that the simulator and the runtime both write, and its two file forms."""

from __future__ import annotations

import bisect
import collections
import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from isthmus.errors import UserError
from isthmus.reading import parse_json, read_file
from isthmus.wire_types import Amount, CountOrNone, Finite, Name

__all__ = [
    "Span",
    "Trace",
    "Track",
    "busy_share",
    "hidden_share",
    "in_periods",
    "link_bytes",
    "read_jsonl",
    "steady_step_s",
    "step_bounds",
    "step_slope_s",
    "step_times",
    "write_jsonl",
    "write_perfetto",
]

T = TypeVar("T")
Track = Literal["compute", "send", "receive", "down", "up", "control"]
"""`down` and `up`: copies from an accelerator to the host and back."""


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that took place on one track of one device. Times are seconds since the run's first step opened."""

    device: Name
    track: Track
    name: Name  # `F`, `B`, `E` (evaluation forward), `update`, `forward`, `backward`, `shared`, `norm`, `save`, ..
    start_s: Finite
    end_s: Finite
    step: CountOrNone = -1
    micro_batch: CountOrNone = -1
    size_bytes: Amount = 0
    other: Name = ""  # for send and receive: the device at the other end
    wire_bytes: Amount = 0  # with headers; `size_bytes` counts tensor bytes only


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """All spans of a run, and where they came from. Times are seconds.

    >>> import isthmus
    >>> from isthmus.trace import Span
    >>> forward = Span(device="desk", track="compute", name="F", start_s=0.0, end_s=0.5, step=0)
    >>> trace = isthmus.Trace(source="simulator", run="first", spans=(forward,))
    >>> len(trace.spans), trace.spans[0].end_s
    (1, 0.5)
    """

    source: Literal["simulator", "runtime"]
    run: str
    spans: tuple[Span, ...]
    period: Annotated[int, msgspec.Meta(ge=1)] = 1  # Steps after which what replicas average is the same again.


def write_jsonl(trace: Trace, path: Path) -> None:
    """One header line (source, run, period), then one line per span."""
    lines = [msgspec.json.encode({"source": trace.source, "run": trace.run, "period": trace.period})]
    lines += [msgspec.json.encode(span) for span in trace.spans]
    path.write_bytes(b"\n".join(lines) + b"\n")


def read_jsonl(path: Path) -> Trace:
    """The trace that `write_jsonl` wrote. UserError for a file that is missing or is none."""
    try:
        lines = read_file(path).splitlines()
    except FileNotFoundError:
        raise UserError(f"trace {path}: not found") from None
    except OSError as e:
        raise UserError(f"trace {path}: cannot be read: {e.strerror or e}") from None
    places = (f"trace {path}: not a trace: line {number}" for number in itertools.count(1))
    header = parse_json(lines[0] if lines else b"", dict[str, str | int], next(places))
    spans = tuple(parse_json(line, Span, place) for line, place in zip(lines[1:], places, strict=False))
    try:
        return msgspec.convert({**header, "spans": spans}, Trace)
    except msgspec.ValidationError as e:
        raise UserError(f"trace {path}: not a trace: {e}") from None


def write_perfetto(traces: Iterable[Trace], path: Path) -> None:
    """Chrome trace-event JSON, which ui.perfetto.dev and chrome://tracing open. One process per device and source.

    The format has no slices of one thread that overlap partly: spans of a track that do (messages to several peers at
    once, say) are on threads of their own, by peer where they have one.
    """
    events: list[dict[str, object]] = []
    numbers: dict[str, int] = {}
    threads: dict[tuple[int, str, int], int] = {}
    for trace in traces:
        for (device, name), spans in _by_thread(trace).items():
            process = numbers.setdefault(f"{trace.source} {device}", len(numbers) + 1)
            for span, lane in zip(spans, _lanes(spans), strict=True):
                thread = threads.setdefault((process, name, lane), len(threads) + 1)
                events.append(_slice(span, process, thread))
    for process, number in numbers.items():
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}})
    for (number, name, lane), thread in threads.items():
        label = f"{name} ({lane + 1})" if lane else name
        events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": label}})
    path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def _by_thread(trace: Trace) -> dict[tuple[str, str], list[Span]]:
    """Spans in the order of their starts, by device and name of their thread."""
    found: dict[tuple[str, str], list[Span]] = {}
    for span in sorted(trace.spans, key=lambda s: (s.start_s, s.end_s)):
        way = {"send": f"send to {span.other}", "receive": f"receive from {span.other}"} if span.other else {}
        found.setdefault((span.device, way.get(span.track, span.track)), []).append(span)
    return found


def _lanes(spans: Iterable[Span]) -> Iterator[int]:
    """Yield for each span the first lane that is free when it starts."""
    ends: list[float] = []
    for span in spans:
        lane = next((number for number, end_s in enumerate(ends) if end_s <= span.start_s), len(ends))
        ends[lane : lane + 1] = [span.end_s]
        yield lane


def _slice(span: Span, process: int, thread: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name if span.micro_batch < 0 else f"{span.name}{span.micro_batch}",
        "cat": span.track,
        "pid": process,
        "tid": thread,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"step": span.step, "bytes": span.size_bytes, "other": span.other},
    }


def step_bounds(trace: Trace) -> dict[int, tuple[float, float]]:
    """Begin and end of each training step, in seconds: from the last update of the step before to its own last update.

    A step whose predecessor is not in the trace begins with its first forward. First forwards alone tell no times: a
    stage that waits for nobody computes them several steps ahead.
    """
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in trace.spans:
        if span.track == "compute" and span.name == "F":
            starts[span.step] = min(span.start_s, starts.get(span.step, math.inf))
        if span.track == "compute" and span.name == "update":
            ends[span.step] = max(span.end_s, ends.get(span.step, 0.0))
    return {step: (ends.get(step - 1, starts[step]), ends[step]) for step in sorted(starts.keys() & ends.keys())}


def step_times(trace: Trace) -> dict[int, float]:
    """Duration of each training step in seconds, by `step_bounds`."""
    return {step: end_s - start_s for step, (start_s, end_s) in step_bounds(trace).items()}


def steady_step_s(trace: Trace, *, undisturbed: bool = False) -> float:
    """Duration of a step between those that fill the pipeline and the one that drains it: the slope of step ends over
    whole periods of averaging. The first period and the last step are left out where others are left, else the first
    step; so are periods with an evaluation, and those that take half longer than the median (a recovery), unless the
    run was `undisturbed`: then every so many steps one may wait for what the others had ahead. UserError when no step
    was finished."""
    bounds = [bounds for _, bounds in sorted(step_bounds(trace).items())]
    if not bounds:
        raise UserError(f"trace {trace.run!r}: no training step was finished")
    averaged_s = max((span.end_s for span in trace.spans if span.name == "average"), default=-math.inf)
    if len(bounds) == trace.period and averaged_s > bounds[-1][1]:  # no later step shows what a period's end takes
        return (averaged_s - bounds[0][0]) / trace.period
    period = min(trace.period, max(1, len(bounds) - 1))
    last = len(bounds) - period
    firsts = range(min(1, last), last + 1)
    firsts = [k for k in firsts if trace.period <= k < last] or [k for k in firsts if 0 < k < last] or firsts
    between = [(bounds[first][0], bounds[first + period - 1][1]) for first in firsts]
    evaluations = sorted(span.start_s for span in trace.spans if span.track == "compute" and span.name == "E")
    between = [(a, b) for a, b in between if bisect.bisect(evaluations, a) == bisect.bisect(evaluations, b)] or between
    times = [(end_s - start_s) / period for start_s, end_s in between]
    most_s = math.inf if undisturbed else 1.5 * statistics.median(times)
    return statistics.fmean(time for time in times if time <= most_s)


def step_slope_s(trace: Trace) -> float:
    """Duration of a step where steps overlap: the slope of step ends by least squares, without the first eighth and the
    last. The trace has four steps or more, and no evaluations."""
    ends = [end_s for _, (_, end_s) in sorted(step_bounds(trace).items())]
    ends = ends[len(ends) // 8 : -1]
    return statistics.linear_regression(range(len(ends)), ends).slope


def in_periods(steps: Sequence[T], period: int) -> list[Sequence[T]]:
    """Steps in runs of a whole period, wherever it begins; all of them in one where there is no whole one."""
    whole = [steps[i : i + period] for i in range(0, len(steps) - period + 1, period)]
    return whole or [steps]


def busy_share(trace: Trace) -> dict[str, float]:
    """Share of the trace's whole duration that each device's compute lane was at work, by device."""
    busy: dict[str, float] = dict.fromkeys((span.device for span in trace.spans), 0.0)
    for span in trace.spans:
        busy[span.device] += span.end_s - span.start_s if span.track == "compute" else 0.0
    whole = max((span.end_s for span in trace.spans), default=0.0) - min((s.start_s for s in trace.spans), default=0.0)
    return {device: seconds / whole if whole else 0.0 for device, seconds in busy.items()}


def hidden_share(trace: Trace, tracks: Collection[Track] = ("send", "down", "up")) -> dict[str, float]:
    """Share of the time of each device's sends and copies during which its compute lane was at work: 1 where they cost
    nothing. Devices without any are left out."""
    work: dict[str, list[tuple[float, float]]] = {}
    for span in sorted(trace.spans, key=lambda s: s.start_s):
        if span.track == "compute":
            spells = work.setdefault(span.device, [])
            if spells and span.start_s <= spells[-1][1]:
                spells[-1] = (spells[-1][0], max(spells[-1][1], span.end_s))
            else:
                spells.append((span.start_s, span.end_s))
    whole: dict[str, float] = collections.defaultdict(float)
    hidden: dict[str, float] = collections.defaultdict(float)
    for span in trace.spans:
        if span.track not in tracks or span.end_s <= span.start_s:
            continue
        spells = work.get(span.device, [])
        first = max(0, bisect.bisect_right(spells, span.start_s, key=lambda spell: spell[0]) - 1)
        last = bisect.bisect_left(spells, span.end_s, key=lambda spell: spell[0])
        inside = sum(max(0.0, min(span.end_s, end) - max(span.start_s, start)) for start, end in spells[first:last])
        whole[span.device] += span.end_s - span.start_s
        hidden[span.device] += inside
    return {device: hidden[device] / seconds for device, seconds in whole.items()}


def link_bytes(trace: Trace) -> dict[tuple[str, str], int]:
    """Tensor bytes sent, by (source, target) device."""
    total: dict[tuple[str, str], int] = collections.Counter()
    for span in trace.spans:
        if span.track == "send":
            total[span.device, span.other] += span.size_bytes
    return dict(total)
