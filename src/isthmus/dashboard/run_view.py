"""What the page shows of a run: all of it at once, and as it was at a moment. Pure: files in, documents out."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TypeVar

from isthmus.api.run_entries import RunEntry
from isthmus.dashboard.rounds import round_bars, rounds_view
from isthmus.dashboard.run_folder import WatchedRun
from isthmus.dashboard.spans import TRACKS, SpanTable
from isthmus.fleet import Fleet
from isthmus.plans import Plan, PlanPeriod
from isthmus.report.link_uses import link_uses_of
from isthmus.report.summary import plan_summary

Shown = dict[str, object]
Point = TypeVar("Point")
MOST_POINTS, MOST_MARKS = 1500, 1000
SLOW = 0.6
"""A link is slow below this share of what was planned with: less is in what messages wait for each other."""
RECENT_STEPS = 8
"""Over which links are measured."""
ENDINGS = {"interrupted": "interrupted", "lost": "failed", "diverged": "failed", "failed": "failed", "done": "done"}


def moments(run: WatchedRun) -> list[RunEntry]:
    """What a slider goes through. Of a run without entries, its losses stand for them, without times."""
    return run.entries() or [
        RunEntry(at_s=0.0, kind="step" if p.split == "train" else "heldout", step=p.step, loss=p.loss)
        for p in run.losses()
    ]


def state_of(run: WatchedRun) -> str:
    """In one word."""
    if run.problem:
        return "empty" if "empty" in run.problem else "broken"
    entries, job = run.entries(), run.job
    if run.works:
        return "running"
    if "federated" in job:
        rounds = run.rounds()
        return "done" if rounds and rounds[-1].record.round + 1 >= _count(job, "federated", "rounds") else "stopped"
    if entries and entries[-1].kind == "ended":
        return ENDINGS.get(entries[-1].text, "failed")
    return "done" if run.summary is not None else "stopped"


def _count(job: Shown, table: str, key: str) -> int:
    found = job.get(table)
    value: object = found.get(key) if isinstance(found, dict) else 0
    return value if isinstance(value, int) else 0


def head(run: WatchedRun) -> Shown:
    """A line of the list of runs."""
    job, losses = run.job, run.losses()
    federated = "federated" in job
    rounds = run.rounds() if federated else []
    steps = [p for p in losses if p.split == "train"]
    done = rounds[-1].record.round + 1 if rounds else steps[-1].step if steps else 0
    return {
        "name": run.path.name,
        "kind": "federated" if federated else "pipeline",
        "state": state_of(run),
        "problem": run.problem,
        "done": done,
        "of": _count(job, "federated", "rounds") if federated else _count(job, "training", "steps"),
        "unit": "rounds" if federated else "steps",
        "loss": steps[-1].loss if steps else None,
        "folder": str(run.path.absolute()),
        "place": _place(run),
    }


def _place(run: WatchedRun) -> str:
    if (run.path / "captured.safetensors").is_file():
        return "on remote devices of a fleet"
    return "at remote sites of a fleet" if run.job.get("deployment") else "on this machine"


def overview(run: WatchedRun) -> Shown:
    """All that does not depend on the moment."""
    shown = head(run)
    if run.problem:
        return shown
    entries, job, summary = moments(run), run.job, run.summary
    model: object = job.get("model")
    steps = _thinned(list({e.step: e for e in _kept(entries) if e.kind == "step" and e.at_s}.values()))
    train = _thinned([p for p in run.losses() if p.split == "train"])
    heldout = _thinned([p for p in run.losses() if p.split == "heldout"])
    origin_s = entries[0].at_s if entries else 0.0
    marks = [(n, e) for n, e in enumerate(entries) if e.kind not in ("step", "heldout")][-MOST_MARKS:]
    return shown | {
        "model": str(model.get("name", "")) if isinstance(model, dict) else "",
        "moments": len(entries) if "federated" not in job else len(run.rounds()),
        "timed": bool(run.entries()),
        "began_s": origin_s,
        "loss_curve": {"step": [p.step for p in train], "loss": [p.loss for p in train]},
        "heldout_curve": {"step": [p.step for p in heldout], "loss": [p.loss for p in heldout]},
        "speed_curve": {
            "step": [e.step for e in steps],
            "per_s": [e.per_s for e in steps],
            "bytes": [sum(size for _, _, size in e.sent) for e in steps],
            "unit": steps[-1].unit if steps else "",
        },
        "marks": [
            {"moment": n, "kind": e.kind, "at_s": e.at_s - origin_s, "step": e.step}
            | {"device": e.device, "text": _said(e)}
            for n, e in marks
        ],
        "comparison": None
        if summary is None
        else {"measured_step_s": summary.measured_step_s, "predicted_step_s": summary.predicted_step_s},
        "rounds": rounds_view(run.rounds()) if "federated" in job else None,
        "privacy": run.document("privacy.json", dict[str, object]),
        "unread": run.unread,
    }


def _kept(entries: Sequence[RunEntry]) -> list[RunEntry]:
    """Without steps that were done again later."""
    found: list[RunEntry] = []
    least = 1 << 62
    for entry in reversed(entries):
        if entry.kind == "back" or (entry.kind == "began" and entry.step >= 0):
            least = min(least, entry.step)
        elif entry.step <= least:
            found.append(entry)
    return found[::-1]


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most so many, evenly, and the last."""
    stride = -(-len(points) // MOST_POINTS) or 1
    return [*points[:-1:stride], *points[-1:]]


def _said(entry: RunEntry) -> str:
    if entry.kind == "planned" and entry.period is not None:
        return f"plan over {', '.join(entry.period.plan.used)}"
    return entry.text


class _Moment:
    """The run after so many entries."""

    def __init__(self, run: WatchedRun, entries: Sequence[RunEntry]) -> None:
        self.period: PlanPeriod | None = None
        self.last = self.heldout = RunEntry(at_s=0.0, kind="step")
        self.devices: dict[str, str] = {}
        self.paused = False
        self.ended = ""
        self.step, self.plans = 0, 0
        self.rows: list[int] = [0]
        """Rows of the trace after each of the last steps of this plan."""
        for entry in entries:
            self._take(entry)
        if self.period is None and (plan := run.first_plan) is not None and (fleet := run.fleet) is not None:
            self.period = run.periods[-1] if run.periods else PlanPeriod(plan=plan, fleet=fleet, first_step=0)

    def _take(self, entry: RunEntry) -> None:
        match entry.kind:
            case "began":
                self.devices, self.ended, self.step, self.rows, self.paused = {}, "", entry.step, [0], True
            case "planned":
                self.period, self.plans, self.rows = entry.period, self.plans + 1, [entry.spans]
            case "step":
                self.last, self.step, self.paused = entry, entry.step, False
                self.rows = [*self.rows[-RECENT_STEPS:], entry.spans]
            case "heldout":
                self.heldout = entry
            case "lost" | "left":
                self.devices[entry.device], self.paused = entry.kind, entry.kind == "lost" or self.paused
            case "joined":
                self.devices[entry.device] = "here"
            case "back":
                self.step, self.rows = entry.step, [entry.spans]
            case "ended":
                self.ended = entry.text
            case _:
                pass

    def state(self, device: str) -> str:
        said = self.devices.get(device, "")
        if said in ("lost", "left"):
            return said
        if self.period is None or device not in self.period.plan.used:
            return "unused"
        return "done" if self.ended else "paused" if self.paused and self.devices else "working"


def state_at(run: WatchedRun, moment: int | None = None) -> Shown:
    """The run as it was after that moment, by default now."""
    if "federated" in run.job:
        lines = run.rounds()
        last = len(lines) - 1 if moment is None else min(moment, len(lines) - 1)
        return {"moment": last, "step": last + 1, "round": rounds_view(lines[last : last + 1]) if lines else None}
    entries = moments(run)
    last = len(entries) - 1 if moment is None else min(moment, len(entries) - 1)
    now = _Moment(run, entries[: last + 1])
    if last < _newest_session(run):
        now.rows = [0]
    fleet, stated = now.period.fleet if now.period else run.fleet, run.fleet
    if now.period is None or fleet is None or stated is None:
        return {"moment": last, "step": now.step}
    return {
        "moment": last,
        "at_s": entries[last].at_s - entries[0].at_s if entries else 0.0,
        "step": now.step,
        "loss": now.last.loss,
        "heldout": now.heldout.loss,
        "per_s": now.last.per_s,
        "unit": now.last.unit,
        "sent_bytes": now.last.sent_bytes,
        "step_bytes": sum(size for _, _, size in now.last.sent),
        "plans": now.plans,
        "planner": now.period.plan.planner,
        "predicted_step_s": now.period.plan.predicted.step_s,
        "bottleneck": now.period.plan.predicted.bottleneck,
        "ended": now.ended,
        "regions": _regions(now, stated),
        "links": _links(run, now, stated),
        "stages": _stages(run, now, fleet),
    }


def _regions(now: _Moment, stated: Fleet) -> list[Shown]:
    assert now.period is not None
    numbers: dict[str, list[str]] = {}
    several = len(now.period.plan.replicas) > 1
    for replica_number, replica in enumerate(now.period.plan.replicas):
        for stage, worker in zip(replica.stage_of, replica.workers, strict=True):
            numbers.setdefault(worker.device, []).append(f"{replica_number}.{stage}" if several else str(stage))
    return [
        {
            "name": region,
            "devices": [
                {
                    "name": d.name,
                    "hardware": d.hardware,
                    "state": now.state(d.name),
                    "stages": numbers.get(d.name, []),
                    "busy": now.last.busy.get(d.name),
                    "flops_per_s": d.sustained_flops_per_s,
                    "believed": now.period.fleet.device(d.name).sustained_flops_per_s / d.sustained_flops_per_s
                    if d.name in now.period.fleet.names
                    else None,
                }
                for d in stated.devices
                if d.region == region
            ],
        }
        for region in stated.regions
    ]


def _links(run: WatchedRun, now: _Moment, stated: Fleet) -> list[Shown]:
    """Pairs of devices that the plan joins. Of two directions, the one that does worse."""
    assert now.period is not None
    number = {name: n for n, name in enumerate(stated.names)}
    uses = link_uses_of(now.period.plan, stated, number)
    rates = run.measured().rates(now.rows[0], now.rows[-1]) if run.entries() else {}
    sent: dict[tuple[str, str], int] = {(a, b): size for a, b, size in now.last.sent}
    found: dict[frozenset[str], Shown] = {}
    for use in uses:
        source, target = stated.names[use.source], stated.names[use.target]
        link, (size, took_s) = stated.link(source, target), rates.get((source, target), (0, 0.0))
        measured = size / took_s if took_s and size else None
        share = None if measured is None else measured / link.bandwidth_bytes_per_s
        broken = any(now.state(d) in ("lost", "left") for d in (source, target))
        state = "broken" if broken else "slow" if share is not None and share < SLOW else "used"
        shown: Shown = {
            "ends": [source, target],
            "state": state,
            "planned_per_s": link.bandwidth_bytes_per_s,
            "measured_per_s": measured,
            "share": share,
            "latency_s": link.latency_s,
            "bytes": sent.get((source, target), 0) + sent.get((target, source), 0),
            "what": use.what,
        }
        before = found.get(frozenset((source, target)))
        if before is None or (share is not None and (before["share"] is None or share < float(str(before["share"])))):
            found[frozenset((source, target))] = shown
    return list(found.values())


def _stages(run: WatchedRun, now: _Moment, fleet: Fleet) -> list[Shown]:
    assert now.period is not None
    plan, summary = now.period.plan, run.summary
    peaks = {use.device: use for use in summary.memory} if summary else {}
    rows: list[Shown] = []
    for number, stage in enumerate(plan_summary(plan, fleet).stages):
        replica = plan.replicas[stage.replica]
        compute_s = (stage.forward_s + stage.backward_s) * replica.micro_batches
        peak = peaks.get(stage.device)
        rows.append(
            {
                "number": number,
                "replica": stage.replica,
                "device": stage.device,
                "region": stage.region,
                "state": now.state(stage.device),
                "first_op": stage.first_op,
                "last_op": stage.last_op,
                "parameter_bytes": stage.parameter_bytes,
                "memory_bytes": stage.memory_bytes,
                "memory_available_bytes": stage.memory_available_bytes,
                "peak_bytes": peak.peak_bytes if peak else None,
                "resident": peak.resident if peak else False,
                "busy": now.last.busy.get(stage.device),
                "predicted_busy": min(1.0, compute_s / plan.predicted.step_s) if plan.predicted.step_s else None,
            }
        )
    return rows


def timeline(run: WatchedRun, step: int, span_s: tuple[float, float] | None, columns: int) -> Shown:
    """Predicted and measured bars of a step, each from its first forward on; `span_s` looks closer or further, in
    seconds since then. Steps count from 1."""
    if "federated" in run.job:
        lines = [line for line in run.rounds() if line.record.round + 1 == step]
        return round_bars(lines[-1]) if lines else {"problem": f"Round {step} was not done."}
    entries = run.entries()[_newest_session(run) :]
    first_row = max((e.spans for e in entries if e.kind in ("planned", "back") and e.step < step), default=0)
    now = _Moment(run, [e for e in entries if e.step < step or e.kind != "planned"])
    if now.period is None:
        return {"problem": "There is no plan yet."}
    period, table = now.period, run.measured()
    window = table.step_window(step - 1, first_row)
    predicted = run.predicted(period.plan, lambda: _simulated(run, period))
    every = period.plan.sync.period
    likeness = [s for s in predicted.steps().tolist() if s <= step - 1 and (step - 1 - s) % every == 0]
    guess = predicted.step_window(likeness[-1]) if likeness else None
    if window is None:
        return {"problem": f"The newest session has no trace of step {step}.", "steps": _range(table)}
    long_s = max(end - start for start, end in (window, guess) if guess) if guess else window[1] - window[0]
    from_s, to_s = span_s or (-0.02 * long_s, 1.05 * long_s)
    devices = dict.fromkeys([*period.plan.used, *period.fleet.names])
    return {
        "step": step,
        "steps": _range(table),
        "from_s": from_s,
        "to_s": to_s,
        "spans": len(table),
        "measured": _rows(table, window, (from_s, to_s), columns, list(devices)),
        "predicted": _rows(predicted, guess, (from_s, to_s), columns, list(devices)) if guess else None,
    }


def _newest_session(run: WatchedRun) -> int:
    """Its first entry: traces are of the newest session alone."""
    return max((n for n, e in enumerate(run.entries()) if e.kind == "began"), default=0)


def _range(table: SpanTable) -> list[int]:
    """The first and the last step that there is a trace of."""
    steps = table.steps()
    return [int(steps[0]) + 1, int(steps[-1]) + 1] if len(steps) else []


def _rows(
    table: SpanTable, window: tuple[float, float], span_s: tuple[float, float], columns: int, devices: list[str]
) -> Shown:
    origin_s = window[0]
    found = table.bars(origin_s + span_s[0], origin_s + span_s[1], columns)
    rows = [
        {
            "device": device,
            "track": track,
            "bars": [(b.start_s - origin_s, b.end_s - origin_s, *b[2:]) for b in found[device, track]],
        }
        for device in devices
        for track in TRACKS
        if (device, track) in found
    ]
    return {"rows": rows, "step_s": window[1] - window[0]}


def _simulated(run: WatchedRun, period: PlanPeriod) -> SpanTable:
    """Of a run that works still: what its end will write as `predicted.jsonl`, for this plan."""
    simulator = importlib.import_module("isthmus.simulator")  # two seconds, for who asks
    work = importlib.import_module("isthmus.protocol.work")
    plan: Plan = period.plan
    spec = work.RunSpec(
        steps=period.first_step + 2 + plan.sync.period,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        start_step=period.first_step,
    )
    table = SpanTable()
    table.add(simulator.simulate(plan, period.fleet, spec).spans)
    return table
