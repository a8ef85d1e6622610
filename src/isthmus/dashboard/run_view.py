"""The page's view of a run: all of it at once, and as it was at a moment. Pure: files in, documents out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from isthmus.api.run_entries import LossPoint, RunEntry
from isthmus.dashboard.moment import Moment
from isthmus.dashboard.rounds import round_row
from isthmus.dashboard.run_folder import PRIVACY, WatchedRun
from isthmus.figures import FIGURES
from isthmus.plans import Plan, PlanPeriod
from isthmus.reading import printable
from isthmus.report.summary import link_uses_of, plan_summary

Shown = dict[str, object]
Point = TypeVar("Point")
MOST_POINTS, MOST_MARKS = 1500, 1000
SLOW = 0.6  # a link is slow below this share of what was planned with: less is in what messages wait for each other


def state_of(run: WatchedRun) -> str:
    """In one word."""
    if run.problem:
        return "empty" if "empty" in run.problem else "broken"
    if run.works:
        return "running"
    outcome = run.state.outcome
    if outcome:
        return outcome if outcome in ("done", "stopped", "interrupted") else "failed"
    return "done" if run.summary is not None else "stopped"


def head(run: WatchedRun) -> Shown:
    """A line of the list of runs. A run whose files say what no run writes is a broken one: others are still listed."""
    try:
        return _head(run)
    except Exception as e:  # of any kind: files say anything
        return {
            "name": printable(run.path.name),
            "unit": "step",
            "state": "broken",
            "problem": f"The run is broken: its files cannot be shown: {type(e).__name__}: {e}",
            "done": 0,
            "of": 0,
            "loss": None,
            "folder": printable(run.path.absolute()),
            "place": "on this machine",
        }


def _head(run: WatchedRun) -> Shown:
    state = run.state
    remote = "on remote devices of a fleet" if (run.path / "captured.safetensors").is_file() else ""
    rounds = run.job.get("federated")
    remote = remote or ("at remote sites of a fleet" if isinstance(rounds, dict) and "deployment" in rounds else "")
    return {
        "name": printable(run.path.name),
        "state": state_of(run),
        "problem": run.problem,
        "unit": state.unit,
        "done": state.done,
        "of": state.steps,
        "loss": state.loss,
        "folder": printable(run.path.absolute()),
        "place": remote or "on this machine",
    }


def overview(run: WatchedRun) -> Shown:
    """All that does not depend on the moment."""
    shown = head(run)
    if run.problem:
        return shown
    entries, model = run.entries, run.job.get("model")
    steps = _thinned(list({e.step: e for e in _kept(entries) if e.kind == "step"}.values()))
    marks = [(n, e) for n, e in enumerate(entries) if e.kind not in ("step", "heldout")][-MOST_MARKS:]
    return shown | {
        "model": str(model.get("name", "")) if isinstance(model, dict) else "",
        "moments": len(entries),
        "train": _curve(run.losses, "train"),
        "heldout": _curve(run.losses, "heldout"),
        "metrics": _metrics(run.losses),
        "figures": _figures(steps),
        "marks": [_mark(n, e, entries[0].at_s) for n, e in marks],
        "comparison": run.summary,
        "rounds": [round_row(line, run.client_names) for line in _thinned(run.rounds)],
        "privacy": run.document(PRIVACY, Shown),
        "unread": run.unread,
    }


def _mark(moment: int, entry: RunEntry, origin_s: float) -> Shown:
    text = f"plan over {', '.join(entry.period.plan.used)}" if entry.period is not None else entry.text
    shown: Shown = {"kind": entry.kind, "step": entry.step, "device": entry.device, "text": text}
    return shown | {"moment": moment, "at_s": entry.at_s - origin_s}


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


def _curve(points: Sequence[LossPoint], split: str) -> list[list[float | None]]:
    kept = _thinned([p for p in points if p.split == split])
    return [[p.step for p in kept], [p.loss for p in kept]]


def _metrics(points: Sequence[LossPoint]) -> dict[str, list[list[float | None]]]:
    kept = _thinned([p for p in points if p.split == "heldout"])
    names = dict.fromkeys(name for p in kept for name in p.metrics)
    return {name: [[p.step for p in kept], [p.metrics.get(name) for p in kept]] for name in names}


def _figures(steps: Sequence[RunEntry]) -> dict[str, Shown]:
    """Return how each number of the steps is shown, and its values."""
    return {
        name: {"label": figure.label, "kind": figure.kind, "curve": [[e.step for e in found], values]}
        for name, figure in FIGURES.items()
        if (found := [e for e in steps if name in e.figures]) and any(values := [e.figures[name] for e in found])
    }


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most so many, evenly, and the last."""
    stride = -(-len(points) // MOST_POINTS) or 1
    return [*points[:-1:stride], *points[-1:]]


def state_at(run: WatchedRun, moment: int | None = None) -> Shown:
    """The run as it was after that moment, by default now."""
    entries = run.entries
    last = len(entries) - 1 if moment is None else min(moment, len(entries) - 1)
    now, fleet = Moment(entries[: last + 1]), run.fleet
    shown: Shown = {"moment": last, "step": now.step, "last": now.last, "heldout": now.heldout.loss}
    shown |= {"metrics": now.heldout.metrics, "at_s": entries[last].at_s - entries[0].at_s if entries else 0.0}
    if line := next((line for line in reversed(run.rounds) if line.record.round + 1 <= now.step), None):
        shown["round"] = round_row(line, run.client_names)
    if now.period is None or fleet is None:
        return shown
    if any(e.kind == "began" for e in entries[last + 1 :]):
        now.rows = [0]  # of an earlier session there is no trace here
    return shown | {
        "plans": now.plans,
        "planner": now.period.plan.planner,
        "predicted": now.period.plan.predicted,
        "regions": {region: _devices(region, run, now, now.period) for region in fleet.regions},
        "links": _links(run, now, now.period.plan),
        "stages": _stages(run, now, now.period),
    }


def _devices(region: str, run: WatchedRun, now: Moment, period: PlanPeriod) -> list[Shown]:
    fleet, numbers, several = run.fleet, dict[str, list[str]](), len(period.plan.replicas) > 1
    for replica_number, replica in enumerate(period.plan.replicas):
        for stage, worker in zip(replica.stage_of, replica.workers, strict=True):
            numbers.setdefault(worker.device, []).append(f"{replica_number}.{stage}" if several else str(stage))
    believed = {d.name: d.sustained_flops_per_s for d in period.fleet.devices}
    return [
        {
            "name": d.name,
            "hardware": d.hardware,
            "state": now.state(d.name),
            "stages": numbers.get(d.name, []),
            "busy": now.last.busy.get(d.name),
            "flops_per_s": d.sustained_flops_per_s,
            "believed": believed.get(d.name, d.sustained_flops_per_s) / d.sustained_flops_per_s,
        }
        for d in (fleet.devices if fleet else ())
        if d.region == region
    ]


def _links(run: WatchedRun, now: Moment, plan: Plan) -> list[Shown]:
    """Pairs of devices that the plan joins. Of two directions, the one that does worse."""
    fleet = run.fleet
    assert fleet is not None
    rates = run.measured().rates(now.rows[0], now.rows[-1])
    sent = {frozenset((a, b)): 0 for a, b, _ in now.last.sent}
    for a, b, size in now.last.sent:
        sent[frozenset((a, b))] += size
    found: dict[frozenset[str], tuple[float, Shown]] = {}
    for use in link_uses_of(plan, fleet, {name: n for n, name in enumerate(fleet.names)}):
        ends = fleet.names[use.source], fleet.names[use.target]
        link, measured = fleet.link(*ends), rates.get(ends)
        share = None if measured is None else measured / link.bandwidth_bytes_per_s
        broken = any(now.state(device) in ("lost", "left") for device in ends)
        shown: Shown = {
            "ends": ends,
            "state": "broken" if broken else "slow" if share is not None and share < SLOW else "used",
            "planned_per_s": link.bandwidth_bytes_per_s,
            "measured_per_s": measured,
            "share": share,
            "latency_s": link.latency_s,
            "bytes": sent.get(frozenset(ends), 0),
            "what": use.what,
        }
        worse = share if share is not None else float("inf")
        if frozenset(ends) not in found or worse < found[frozenset(ends)][0]:
            found[frozenset(ends)] = worse, shown
    return [shown for _, shown in found.values()]


def _stages(run: WatchedRun, now: Moment, period: PlanPeriod) -> list[Shown]:
    modules = run.modules
    plan, peaks = period.plan, {use.device: use for use in run.summary.memory} if run.summary else {}
    return [
        Shown(
            msgspec.structs.asdict(stage),
            number=number,
            first_op=modules.get(stage.first_op, stage.first_op),
            last_op=modules.get(stage.last_op, stage.last_op),
            state=now.state(stage.device),
            peak=peaks.get(stage.device),
            busy=now.last.busy.get(stage.device),
            predicted_busy=(stage.forward_s + stage.backward_s)
            * plan.replicas[stage.replica].micro_batches
            / (plan.predicted.expected_s or 1.0),
        )
        for number, stage in enumerate(plan_summary(plan, period.fleet).stages)
    ]
