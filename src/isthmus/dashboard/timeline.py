"""Predicted and measured bars of any step."""

from __future__ import annotations

import importlib
import itertools

import msgspec

from isthmus.dashboard.moment import Moment
from isthmus.dashboard.rounds import round_timeline
from isthmus.dashboard.run_folder import WatchedRun
from isthmus.dashboard.spans import SpanTable
from isthmus.plans import PlanPeriod

TRACKS = ("compute", "send", "receive", "down", "up", "control")


class Timelines:
    """The timelines of runs that work, with the prediction of each of their plans, simulated once."""

    def __init__(self) -> None:
        self._simulated: dict[bytes, SpanTable] = {}

    def timeline(
        self,
        run: WatchedRun,
        step: int,
        moment: int | None = None,
        *,
        span_s: tuple[float, float] | None = None,
        columns: int = 800,
    ) -> dict[str, object]:
        """Bars from the step's first forward on, of the attempt that counted at the moment; `span_s` looks closer or
        further, in seconds since then. Steps count from 1. `problem` says why there are none."""
        if run.rounds:
            lines = [line for line in run.rounds if line.record.round + 1 == step]
            return round_timeline(lines[-1]) if lines else {"problem": f"Round {step} was not done."}
        session = max((n for n, e in enumerate(run.entries) if e.kind == "began"), default=0)
        last = len(run.entries) if moment is None else moment + 1
        before, after = run.entries[session:last], run.entries[last:]  # traces are of the newest session
        begins = max((e.spans for e in before if e.kind in ("planned", "back") and e.step < step), default=0)
        ends = min((e.spans for e in after if e.kind == "back" and e.step < step), default=None)
        now = Moment([e for e in before if e.kind != "planned" or e.step < step])
        if now.period is None:
            return {"problem": "The newest session has no plan then."}
        measured, predicted = run.measured(), run.predicted() or self._simulation(now.period)
        window = measured.step_window(step - 1, slice(begins, ends))
        if window is None:
            return {"problem": f"The newest session has no trace of step {step}."}
        every = now.period.plan.sync.period
        plans = [e for e in run.entries[session:] if e.kind == "planned"]
        until = next((b.step for a, b in itertools.pairwise(plans) if a.period is now.period), step + 1)
        alike = [s for s in predicted.steps() if s < min(step, until - 1) and (step - 1 - s) % every == 0]
        forecast = predicted.step_window(alike[-1]) if alike else None
        long_s = max(end - start for start, end in (window, forecast or window))
        from_s, to_s = span_s or (-0.02 * long_s, 1.05 * long_s)
        devices = list(dict.fromkeys([*now.period.plan.used, *now.period.fleet.names]))
        return {
            "step": step,
            "from_s": from_s,
            "to_s": to_s,
            "spans": len(measured),
            "measured": _rows(measured, window, (from_s, to_s), columns, devices),
            "predicted": _rows(predicted, forecast, (from_s, to_s), columns, devices) if forecast else None,
        }

    def _simulation(self, period: PlanPeriod) -> SpanTable:
        """Simulate this plan, as the run's end will for predicted.jsonl."""
        key = msgspec.json.encode(period)
        if key not in self._simulated:
            simulator = importlib.import_module("isthmus.simulator")  # two seconds, for who asks
            work = importlib.import_module("isthmus.protocol.run_messages")
            spec = work.RunSpec(
                steps=period.first_step + 2 + period.plan.sync.period,
                micro_batches=period.plan.micro_batches,
                micro_batch_size=period.plan.micro_batch_size,
                start_step=period.first_step,
            )
            table = self._simulated[key] = SpanTable()
            table.add(simulator.simulate(period.plan, period.fleet, spec).spans)
        return self._simulated[key]


def _rows(
    table: SpanTable, window: tuple[float, float], span_s: tuple[float, float], columns: int, devices: list[str]
) -> dict[str, object]:
    origin_s = window[0]
    found = table.bars(origin_s + span_s[0], origin_s + span_s[1], columns)
    rows = [
        {
            "device": device,
            "track": track,
            "bars": [b._replace(start_s=b.start_s - origin_s, end_s=b.end_s - origin_s) for b in found[device, track]],
        }
        for device in devices
        for track in TRACKS
        if (device, track) in found
    ]
    return {"rows": rows, "step_s": window[1] - window[0]}
