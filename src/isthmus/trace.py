"""The one event schema that the simulator and the runtime both write, and its two file forms."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from isthmus.errors import UserError

__all__ = [
    "Span",
    "Trace",
    "Track",
    "busy_share",
    "hidden_share",
    "in_periods",
    "link_bytes",
    "period_s",
    "read_jsonl",
    "steady_step_s",
    "step_times",
    "write_jsonl",
    "write_perfetto",
]

T = TypeVar("T")
Track = Literal["compute", "send", "receive", "down", "up", "control"]
"""`down` and `up`: copies from an accelerator to the host and back."""


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that took place on one track of one device. Times are seconds since the run's first step opened."""

    device: str
    track: Track
    name: str
    """`F`, `B`, `E` (evaluation forward), `update`, `forward`, `backward`, `shared`, `norm`, `save`, ..."""
    start_s: float
    end_s: float
    step: int = -1
    micro_batch: int = -1
    size_bytes: int = 0
    other: str = ""
    """For send and receive: the device at the other end."""
    wire_bytes: int = 0
    """With headers; `size_bytes` counts tensor bytes only."""


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
    period: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Steps after which what replicas average is the same again."""


def write_jsonl(trace: Trace, path: Path) -> None:
    """One header line (source, run, period), then one line per span."""
    lines = [msgspec.json.encode({"source": trace.source, "run": trace.run, "period": trace.period})]
    lines += [msgspec.json.encode(span) for span in trace.spans]
    path.write_bytes(b"\n".join(lines) + b"\n")


def read_jsonl(path: Path) -> Trace:
    """The trace that `write_jsonl` wrote. UserError for a file that is missing or is none."""
    try:
        head, *rest = path.read_bytes().splitlines()
        header = msgspec.json.decode(head, type=dict[str, str | int])
        spans = tuple(msgspec.json.decode(line, type=Span) for line in rest)
        return msgspec.convert({**header, "spans": spans}, Trace)
    except FileNotFoundError:
        raise UserError(f"trace {path}: not found") from None
    except (ValueError, msgspec.MsgspecError) as e:
        raise UserError(f"trace {path}: not a trace: {e}") from None


def write_perfetto(traces: Iterable[Trace], path: Path) -> None:
    """Chrome trace-event JSON, which ui.perfetto.dev and chrome://tracing open. One process per device and source."""
    events: list[dict[str, object]] = []
    numbers: dict[str, int] = {}
    tracks: dict[tuple[int, str], int] = {}
    for trace in traces:
        for span in trace.spans:
            process = numbers.setdefault(f"{trace.source} {span.device}", len(numbers) + 1)
            thread = tracks.setdefault((process, span.track), len(tracks) + 1)
            label = span.name if span.micro_batch < 0 else f"{span.name}{span.micro_batch}"
            args = {"step": span.step, "bytes": span.size_bytes, "other": span.other}
            events.append(
                {
                    "ph": "X",
                    "name": label,
                    "cat": span.track,
                    "pid": process,
                    "tid": thread,
                    "ts": span.start_s * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": args,
                }
            )
    for process, number in numbers.items():
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}})
    for (number, track), thread in tracks.items():
        events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": track}})
    path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def step_times(trace: Trace) -> dict[int, float]:
    """Duration of each training step: from the first forward of a step to the first forward of the next, in seconds.

    The last step has no next one: it ends with its last update.
    """
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in trace.spans:
        if span.track == "compute" and span.name == "F":
            starts[span.step] = min(span.start_s, starts.get(span.step, float("inf")))
        if span.track == "compute" and span.name == "update":
            ends[span.step] = max(span.end_s, ends.get(span.step, 0.0))
    order = sorted(starts)
    times = {a: starts[b] - starts[a] for a, b in itertools.pairwise(order) if b == a + 1}
    if order and order[-1] in ends:
        times[order[-1]] = ends[order[-1]] - starts[order[-1]]
    return times


def steady_step_s(trace: Trace) -> float:
    """Duration of a step between those that fill the pipeline and the one that drains it: the mean over a period of
    averaging, the median of periods. The first period and the last step are left out, if a whole period is left, else
    the first step. UserError when no step was finished."""
    times = sorted(step_times(trace).items())
    if not times:
        raise UserError(f"trace {trace.run!r}: no training step was finished")
    last = max(span.step for span in trace.spans if span.track == "compute" and span.name == "F")
    between = [duration for step, duration in times[trace.period :] if step != last]
    if len(between) < trace.period:
        between = [duration for _, duration in times[1:] or times]
    return statistics.median(map(statistics.fmean, in_periods(between, trace.period)))


def in_periods(steps: Sequence[T], period: int) -> list[Sequence[T]]:
    """Steps in runs of a whole period, wherever it begins; all of them in one where there is no whole one."""
    whole = [steps[i : i + period] for i in range(0, len(steps) - period + 1, period)]
    return whole or [steps]


def period_s(trace: Trace, device: str) -> float:
    """Median time between the ends of consecutive backward passes of one step on a device.

    UserError when no step has two of them there.
    """
    ends: dict[int, list[float]] = {}
    for span in trace.spans:
        if span.device == device and span.track == "compute" and span.name == "B":
            ends.setdefault(span.step, []).append(span.end_s)
    gaps = [b - a for step in ends.values() for a, b in itertools.pairwise(sorted(step))]
    if not gaps:
        raise UserError(f"trace {trace.run!r}: device {device!r}: no step has two backward passes")
    return statistics.median(gaps)


def busy_share(trace: Trace) -> dict[str, float]:
    """Share of the trace's whole duration that each device's compute lane was at work, by device."""
    busy: dict[str, float] = {}
    for span in trace.spans:
        at_work = span.end_s - span.start_s if span.track == "compute" else 0.0
        busy[span.device] = busy.get(span.device, 0.0) + at_work
    starts, ends = [span.start_s for span in trace.spans], [span.end_s for span in trace.spans]
    whole = max(ends, default=0.0) - min(starts, default=0.0)
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
    whole: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for span in trace.spans:
        if span.track not in tracks or span.end_s <= span.start_s:
            continue
        spells = work.get(span.device, [])
        first = max(0, bisect.bisect_right(spells, span.start_s, key=lambda spell: spell[0]) - 1)
        last = bisect.bisect_left(spells, span.end_s, key=lambda spell: spell[0])
        inside = sum(max(0.0, min(span.end_s, end) - max(span.start_s, start)) for start, end in spells[first:last])
        whole[span.device] = whole.get(span.device, 0.0) + span.end_s - span.start_s
        hidden[span.device] = hidden.get(span.device, 0.0) + inside
    return {device: hidden[device] / seconds for device, seconds in whole.items()}


def link_bytes(trace: Trace) -> dict[tuple[str, str], int]:
    """Tensor bytes sent, by (source, target) device."""
    total: dict[tuple[str, str], int] = {}
    for span in trace.spans:
        if span.track == "send":
            pair = (span.device, span.other)
            total[pair] = total.get(pair, 0) + span.size_bytes
    return total
