"""Durations from a warm-up run: what FLOPs and bytes alone do not say of this model on these machines.

FusionLLM scales a device's stated speed by one factor, S = lambda * S*, fitted by regression. One factor per device
misses what a processor does differently in forward and backward, and what a tasklet costs whatever its size. So two
warm-up runs with different cuts give each device a line per kind of work,

    seconds = fixed + FLOPs * slope,    both at least 0, least squares over the runs

(the update: over parameter bytes), and any other cut is read off the lines. `Calibration.flops_per_s` is FusionLLM's
lambda S*, for planners. (Rejected: one line for all devices. Processes that share a machine, or sit in different
places, do not slow down alike.)
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from scipy.optimize import nnls

from isthmus.errors import UserError, unknown_name
from isthmus.plans import Plan, Stage
from isthmus.trace import Span, Trace

Work = Literal["F", "B", "W", "E", "update"]
"""Forward, backward, weight gradients where they are apart, evaluation forward, and the update with the collection of
the gradients."""
_Points = defaultdict[tuple[str, Work], list[tuple[float, float]]]
WORKS: tuple[Work, ...] = ("F", "B", "W", "E", "update")
TRIMMED_SHARE = 0.1
"""Share of the samples, at each end: a device that was busy with something else is not a slow device."""

_GRADIENT: Mapping[str, str] = {"F": "forward", "B": "backward"}


class AffineFit(msgspec.Struct, frozen=True, kw_only=True):
    """seconds = fixed_s + size * slope; size in FLOPs, or for an update in parameter bytes."""

    fixed_s: float
    slope: float

    def seconds(self, size: float) -> float:
        return self.fixed_s + size * self.slope


class Warmup(NamedTuple):
    """A plan, and what a run of it left."""

    plan: Plan
    trace: Trace


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of warm-up runs. All in seconds and bytes."""

    lines: Mapping[tuple[str, Work], AffineFit]  # fits by device and kind of work
    tasklet_s: float  # between two tasklets on one device that nothing had to be waited for
    handover_s: float
    """From the end of a tasklet to the first byte on a free link, and from the last byte to the start of the tasklet
    that waited for it."""
    header_bytes: int  # on the wire beside a message's tensors

    def durations(self, plan: Plan) -> dict[tuple[int, Work], float]:
        """Seconds by stage and kind of work. Raises `UserError` for a device that no warm-up used."""
        known = {device for device, _ in self.lines}
        found: dict[tuple[int, Work], float] = {}
        for number, (stage, apart) in enumerate(zip(plan.stages, plan.replica.weight_flops, strict=False)):
            if stage.device not in known:
                raise unknown_name("device in the calibration", stage.device, known)
            for work in WORKS:
                if (line := self.lines.get((stage.device, work))) is not None:
                    found[number, work] = line.seconds(_size(stage, work, apart))
        return found

    def flops_per_s(self, plan: Plan) -> dict[str, float]:
        """Sustained speed per device (FusionLLM's lambda S*): FLOPs over the time that the lines give under `plan`."""
        durations = self.durations(plan)
        found: dict[str, float] = {}
        for number, stage in enumerate(plan.stages):
            seconds = sum(durations.get((number, work), 0.0) for work in ("F", "B", "W"))
            flops = stage.flops_forward + stage.flops_backward
            if seconds and flops:
                found[stage.device] = flops / seconds
        return found


def calibrate(warmups: Sequence[Warmup]) -> Calibration:
    """Fit lines and overheads. First steps are left out: they allocate, and connections are cold.

    Raises `UserError` for warm-ups without a second step.
    """
    points: _Points = defaultdict(list)
    gaps, handovers, headers = list[float](), list[float](), list[int]()
    for plan, trace in warmups:
        spans = [span for span in trace.spans if span.step > 0]
        for stage, apart in zip(plan.stages, plan.replica.weight_flops, strict=False):
            lane = sorted((s for s in spans if s.device == stage.device), key=lambda s: s.start_s)
            _add_points(points, stage, apart, lane)
            waits = _Waits(lane)
            gaps += waits.gaps
            handovers += waits.handovers
            headers += [s.wire_bytes - s.size_bytes for s in lane if s.track == "send"]
    if not points:
        raise UserError("calibration: the warm-up runs hold no step after the first")
    return Calibration(
        lines={key: fit(found) for key, found in points.items()},
        tasklet_s=trimmed_mean(gaps) if gaps else 0.0,
        handover_s=trimmed_mean(handovers) if handovers else 0.0,
        header_bytes=round(statistics.median(headers)) if headers else 0,
    )


def fit(points: Sequence[tuple[float, float]]) -> AffineFit:
    """Least squares of seconds over size, both coefficients at least 0. One size alone gives a line through zero."""
    sizes, seconds = np.array(points, dtype=np.float64).T
    scale = float(sizes.max()) or 1.0
    (slope, fixed_s), _ = nnls(np.column_stack((sizes / scale, np.ones_like(sizes))), seconds)
    return AffineFit(fixed_s=float(fixed_s), slope=float(slope) / scale)


def _size(stage: Stage, work: Work, apart: int) -> float:
    match work:
        case "F" | "E":
            return stage.flops_forward
        case "B":
            return stage.flops_backward - apart
        case "W":
            return apart
        case "update":
            return stage.parameter_bytes


def _add_points(points: _Points, stage: Stage, apart: int, lane: Sequence[Span]) -> None:
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for span in lane:
        if span.track == "compute":
            seconds[span.name].append(span.end_s - span.start_s)
    for work in WORKS:
        if seconds[work]:
            # The simulator has one duration for collection and update.
            collected = trimmed_mean(seconds["collect"]) if work == "update" and seconds["collect"] else 0.0
            points[stage.device, work].append((_size(stage, work, apart), trimmed_mean(seconds[work]) + collected))


def trimmed_mean(numbers: Iterable[float]) -> float:
    """Mean without the lowest and the highest tenth: steps add durations up, and so does a mean."""
    ordered = sorted(numbers)
    cut = int(len(ordered) * TRIMMED_SHARE)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


class _Waits:
    """The times between the spans of one device, distinguished by the cause of the wait.

    F0 ─gap─ F1              both ready: the lane itself
    F0 ─handover─ send       the link was free
    receive ─handover─ B0    the lane was free
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        """`spans` of one device, by start."""
        self.gaps: list[float] = []
        self.handovers: list[float] = []
        arrivals: defaultdict[tuple[str, int, int], float] = defaultdict(float)
        for span in spans:
            if span.track == "receive":
                key = (span.name, span.step, span.micro_batch)
                arrivals[key] = max(arrivals[key], span.end_s)
        lane = [s for s in spans if s.track == "compute"]
        for before, span in itertools.pairwise(lane):
            if span.name in _GRADIENT and before.name in _GRADIENT and before.step == span.step:
                self._started(span, before.end_s, arrivals)
        ends = {(_GRADIENT[s.name], s.step, s.micro_batch): s.end_s for s in lane if s.name in _GRADIENT}
        self._departures([s for s in spans if s.track == "send"], ends)

    def _started(self, span: Span, free_s: float, arrivals: Mapping[tuple[str, int, int], float]) -> None:
        arrived_s = max(
            arrivals.get((_GRADIENT[span.name], span.step, span.micro_batch), 0.0),
            arrivals.get(("shared", span.step, -1), 0.0) if span.name == "F" else 0.0,
        )
        if arrived_s > free_s:
            self.handovers.append(span.start_s - arrived_s)
        else:
            self.gaps.append(span.start_s - free_s)

    def _departures(self, sends: Sequence[Span], ends: Mapping[tuple[str, int, int], float]) -> None:
        free_s: defaultdict[str, float] = defaultdict(float)
        for span in sends:
            ended_s = ends.get((span.name, span.step, span.micro_batch))
            if ended_s is not None and ended_s > free_s[span.other]:
                self.handovers.append(span.start_s - ended_s)
            free_s[span.other] = max(free_s[span.other], span.end_s)
