"""The measured rates of devices and links, from the spans that devices report, and when to trust them.

    spans of a step ──► one rate per device (FLOP/s) and link (bytes/s) ──► window of the last steps
                                                                              │ 4 of 5 beyond 1.25 x, one side
                                                                              ▼
    stated by the fleet ──────────────────────────────────────────────────► believed

A single slow step, or three in five, changes nothing; a lasting change is believed after five steps, and its size is
the window's median. What is believed stays until a whole window speaks against it: figures close to the threshold do
not swing to and fro. Of a device, plans are made with what the first window showed in any case: that is FusionLLM's
lambda, S = lambda S*, fitted by the run's own first steps.

A buffer at either end of a link hides a message's time from that end: the end that took longer knows. Latency is left
as stated: the two ends' clocks are not compared.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from isthmus.fleet import Fleet
from isthmus.fleet.fleet import corrected
from isthmus.plans import Plan, PlanPeriod
from isthmus.trace import Span
from isthmus.units import format_bandwidth, format_compute, significant

STEPS = 5  # a window has at least so many steps
LEAST_S = 2.0
"""A window lasts at least so many seconds: a device that is busy with something else for a moment is not slow."""
APART = 1.25  # rates that differ by less are the same
AGREE = 0.8  # the share of a window's steps that must agree
LAG_STEPS = 2  # the two ends of a message report it at most so many steps apart, or it is not counted
AHEAD_STEPS = 64  # nor is what a device says of steps that are so far ahead: nothing is kept of those
LEAST_BYTES = 1 << 14  # smaller messages say more of threads than of links

Key = str | tuple[str, str]  # a device's name, or a link's source and target


class RateChange(NamedTuple):
    """A rate that is believed from now on, in FLOP/s or bytes/s."""

    key: Key
    before: float
    now: float

    @property
    def description(self) -> str:
        if isinstance(self.key, str):
            return f"{self.key} computes at {format_compute(self.now)}, not at {format_compute(self.before)}"
        source, target = self.key
        now, before = format_bandwidth(self.now), format_bandwidth(self.before)
        return f"{source} -> {target} carries {now}, not {before}"


FAR = 2.0  # a log line reports a rate again when it differs from the last reported rate by this factor


def apart(rate: float, other: float) -> bool:
    return max(rate / other, other / rate) > APART


class DriftReport:
    """Which new rates to report. A rate that changes little is reported once."""

    def __init__(self) -> None:
        self._reported: dict[Key, float] = {}

    def fresh(self, figure: RateChange) -> str:
        """Return a log line of the new rate; empty if it is nothing new."""
        last = self._reported.get(figure.key)
        if last is not None and max(figure.now / last, last / figure.now) < FAR:
            return ""
        self._reported[figure.key] = figure.now
        return figure.description if last is None else figure._replace(before=last).description


class RateEstimator:
    """One rate: what is believed, and the samples that may speak against it."""

    def __init__(self, stated: float) -> None:
        self.stated = stated
        self.believed = stated
        self.first: float | None = None  # the median of the first whole window, whether or not it was believed
        self._window: deque[tuple[float, float]] = deque()

    def add(self, time_s: float, rate: float) -> bool:
        """A step's rate, with the time at which the step ended; whether something else is believed now."""
        window = self._window
        window.append((time_s, rate))
        while len(window) > STEPS and time_s - window[1][0] >= LEAST_S:
            window.popleft()
        if len(window) < STEPS or time_s - window[0][0] < LEAST_S:
            return False
        rates = [rate for _, rate in window]
        if self.first is None:
            self.first = statistics.median(rates)
        slower = sum(rate * APART < self.believed for rate in rates)
        faster = sum(rate > self.believed * APART for rate in rates)
        if max(slower, faster) < AGREE * len(rates):
            return False
        self.believed = statistics.median(rates)
        return True

    @property
    def fitted(self) -> float | None:
        """The rate of the first steps; None before the first."""
        if self.first is None and self._window:
            return statistics.median(rate for _, rate in self._window)
        return self.first

    @property
    def measured(self) -> bool:
        """Return whether the plan in force shows this rate."""
        return bool(self._window)

    def tried(self, rate: float) -> bool:
        """A probe's rate, where nothing else shows one; whether it is believed. A probe shares the devices with the
        work: it can say that a link has recovered, not that it became slower."""
        rate = min(rate, self.stated)
        if self.measured or rate <= self.believed * APART:
            return False
        self.believed = rate
        return True

    def restart(self) -> None:
        """Forget the measurements: they belong to another plan."""
        self._window.clear()


class _RunningSum:
    """The amount that passed in one step, and the seconds that it took."""

    def __init__(self) -> None:
        self.amount = self.seconds = self.end_s = 0.0

    def add(self, amount: float, seconds: float, end_s: float) -> None:
        self.amount += amount
        self.seconds += seconds
        self.end_s = max(self.end_s, end_s)


class Drift:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._estimators: dict[Key, RateEstimator] = {}
        self._flops: dict[str, dict[str, float]] = {}
        """Mean FLOP of a device's stages, which do the same micro-batches, by device and kind of work."""
        self._sums: dict[int, dict[Key, _RunningSum]] = {}
        self._halves: dict[int, dict[tuple[str, str, str, int], Span]] = {}
        """Messages that one end has reported, by step: that end's span by source, target, name and micro-batch."""
        self._first = 0
        self.fits = 0  # devices and links whose rate the first steps have shown

    def begin(self, plan: Plan, step: int) -> None:
        """A plan is in force from this step on. The step itself is not measured: its devices and links are cold."""
        works: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
        for replica in plan.replicas:
            for stage, apart in zip(replica.workers, replica.weight_flops, strict=True):
                flops = {"F": stage.flops_forward, "B": stage.flops_backward - apart, "W": apart}
                works[stage.device].append(flops)
        self._flops = {
            device: {work: statistics.mean(flops[work] for flops in own) for work in own[0]}
            for device, own in works.items()
        }
        self._first = step + 1
        self._sums.clear()
        self._halves.clear()
        for estimator in self._estimators.values():
            estimator.restart()

    def note(self, step: int, spans: Iterable[Span]) -> list[RateChange]:
        """Take the spans that were reported up to the end of a step; return the rates that are believed anew."""
        for span in spans:
            if not self._first <= span.step <= step + AHEAD_STEPS or span.end_s <= span.start_s:
                continue
            if span.track == "compute":
                self._computed(span)
            elif span.track in ("send", "receive"):
                self._carried(span)
        found: list[RateChange] = []
        for closed in sorted(s for s in self._sums if s <= step - LAG_STEPS):
            self._halves.pop(closed, None)
            for key, total in self._sums.pop(closed).items():
                found += self._judge(key, total)
        return found

    def doubtful(self) -> list[tuple[str, str]]:
        """Links that are believed to be slower than stated, and that carry nothing."""
        links = ((key, estimator) for key, estimator in self._estimators.items() if isinstance(key, tuple))
        return [
            key for key, estimator in links if estimator.believed * APART < estimator.stated and not estimator.measured
        ]

    def tried(self, link: tuple[str, str], bandwidth_bytes_per_s: float) -> list[RateChange]:
        """Take the rate that a probe of a doubtful link found; return the rates that are believed anew."""
        estimator = self._estimators[link]
        before = estimator.believed
        return [RateChange(link, before, estimator.believed)] if estimator.tried(bandwidth_bytes_per_s) else []

    def fleet(self) -> Fleet:
        """The fleet as it is believed to be. Devices that nobody has measured are as far from what was stated of them
        as is usual for those that were (FusionLLM's lambda, one for all)."""
        firsts = [
            g.first / g.stated for key, g in self._estimators.items() if isinstance(key, str) and g.first is not None
        ]
        usual = statistics.median_high(firsts) if firsts else 1.0  # the higher: a slow device is no rule
        usual = usual if apart(usual, 1.0) else 1.0
        speeds = {device.name: device.sustained_flops_per_s * usual for device in self._fleet.devices}
        bandwidths: dict[tuple[str, str], float] = {}
        for key, estimator in self._estimators.items():
            if isinstance(key, tuple):
                if estimator.believed != estimator.stated:
                    bandwidths[key] = estimator.believed
            elif estimator.first is not None:
                speeds[key] = estimator.first if estimator.believed == estimator.stated else estimator.believed
        return corrected(self._fleet, speeds, bandwidths)

    def fitted(self) -> Fleet | None:
        """The fleet with what the first steps showed in place of what is stated: FusionLLM's S = lambda S*, and links
        beyond `APART` (latency hides in a message's time). Devices that nobody has measured are as stated. None where
        no device was measured."""
        speeds: dict[str, float] = {}
        bandwidths: dict[tuple[str, str], float] = {}
        for key, estimator in self._estimators.items():
            fit = estimator.fitted
            if fit is None:
                continue
            if isinstance(key, str):
                stated = self._fleet.device(key).flops_per_s
                speeds[key] = significant(fit / stated) * stated
            elif apart(fit, estimator.stated):
                bandwidths[key] = significant(8 * fit) / 8  # in bits, as fleets are written
        return corrected(self._fleet, speeds, bandwidths) if speeds else None

    def _computed(self, span: Span) -> None:
        flops = self._flops.get(span.device)
        if flops is not None and span.name in flops:
            self._sum(span.step, span.device).add(flops[span.name], span.end_s - span.start_s, span.end_s)

    def _carried(self, span: Span) -> None:
        sends = span.track == "send"
        source, target = (span.device, span.other) if sends else (span.other, span.device)
        if source == target or not {source, target} <= set(self._fleet.names):
            return  # between two stages of one device, or one that nobody knows
        key = (source, target, span.name, span.micro_batch)
        halves = self._halves.setdefault(span.step, {})
        other = halves.pop(key, None)
        if other is None or other.track == span.track:
            halves[key] = span
            return
        size_bytes = (span if sends else other).wire_bytes
        if size_bytes >= LEAST_BYTES:
            seconds = max(span.end_s - span.start_s, other.end_s - other.start_s)
            self._sum(span.step, (source, target)).add(size_bytes, seconds, span.end_s)

    def _sum(self, step: int, key: Key) -> _RunningSum:
        return self._sums.setdefault(step, {}).setdefault(key, _RunningSum())

    def _judge(self, key: Key, total: _RunningSum) -> list[RateChange]:
        if not total.amount:
            return []
        estimator = self._estimators.get(key)
        if estimator is None:
            estimator = self._estimators[key] = RateEstimator(self._stated(key))
        before, known = estimator.believed, estimator.first is not None
        changed = estimator.add(total.end_s, total.amount / total.seconds)
        self.fits += estimator.first is not None and not known
        return [RateChange(key, before, estimator.believed)] if changed else []

    def _stated(self, key: Key) -> float:
        if isinstance(key, str):
            return self._fleet.device(key).sustained_flops_per_s
        return self._fleet.link(*key).bandwidth_bytes_per_s


def fit_fleet(stated: Fleet, periods: Sequence[PlanPeriod], spans: Iterable[Span]) -> Fleet | None:
    """The fleet as the first steps of a run's trace showed it (`Drift.fitted`); `spans` of all devices, in any order.
    None for a trace that holds no second step under any of its plans: the first is not measured."""
    drift = Drift(stated)
    by_step: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_step[span.step].append(span)
    for number, period in enumerate(periods):
        end = min((p.first_step for p in periods[number + 1 :]), default=max(by_step, default=0) + 1)
        drift.begin(period.plan, period.first_step)
        for step in range(period.first_step, end):
            drift.note(step, [span for span in by_step[step] if span.start_s >= period.since_s])
        for step in range(end, end + LAG_STEPS):
            drift.note(step, ())
    return drift.fitted()


def differs(stated: Fleet, fitted: Fleet) -> bool:
    """Return whether plans for the two may differ: a device or a stated link beyond `APART`."""
    pairs = [(stated.device(d.name).sustained_flops_per_s, d.sustained_flops_per_s) for d in fitted.devices]
    for route in fitted.links.devices:
        before = stated.link(route.source, route.target)
        pairs.append((before.bandwidth_bytes_per_s, route.link.bandwidth_bytes_per_s))
    return any(apart(before, now) for before, now in pairs)
