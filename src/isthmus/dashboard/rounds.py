"""Federated rounds for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from isthmus.dashboard.spans import Bar
from isthmus.programs.open_phase import RoundRecord


class RoundShown(msgspec.Struct, frozen=True):
    """A line of `federated/evaluation.py`, which imports torch."""

    record: RoundRecord
    seconds: float
    sent_bytes: int = 0
    received_bytes: int = 0
    evaluation: Mapping[str, object] | None = None

    @property
    def makespan_s(self) -> float:
        """Seconds of the executor that trained longest."""
        return max((sum(t.seconds for t in timed) for timed in self.record.trained.values()), default=0.0)


MOST_SITES = 10  # clients or sites that have a line of their own


def _evaluation(line: RoundShown, names: Sequence[str]) -> Mapping[str, object]:
    """Return the figures for a browser, without those of each client where there are many. Clients have their names
    where the run knows them."""
    named = {str(number): name for number, name in enumerate(names)}
    found = dict(line.evaluation or {})
    if isinstance(clients := found.get("clients"), dict):
        found["clients"] = {name: _named(of, named) for name, of in clients.items() if isinstance(of, dict)}
    return found


def _named(figures: Mapping[str, object], names: Mapping[str, str]) -> Mapping[str, object]:
    shown, each = {key: value for key, value in figures.items() if key != "each"}, figures.get("each")
    if isinstance(each, dict) and len(each) <= MOST_SITES:
        shown["each"] = {names.get(who, who): value for who, value in each.items()}
    return shown


def round_row(line: RoundShown, names: Sequence[str] = ()) -> dict[str, object]:
    """Return a round for a browser. `names` are those of clients, in the order of their numbers."""
    record = line.record
    return {
        "round": record.round + 1,
        "clients": sum(map(len, record.trained.values())),
        "makespan_s": line.makespan_s,
        "planned_s": record.predicted_s,
        "stolen": record.stolen,
        "refused": [f"client {r.client}: {r.reason}" for r in record.refused],
        "missing": len(record.missing),
        "late": len(record.stale),
        "closed_by": record.closed_by,
        "bytes": line.sent_bytes + line.received_bytes,
        "evaluation": _evaluation(line, names),
    }


def round_timeline(line: RoundShown) -> dict[str, object]:
    """Return which executor trained which client when, beside the time that was planned."""
    rows: list[dict[str, object]] = []
    for name in sorted(line.record.trained, key=lambda name: (len(name), name)):
        at_s, bars = 0.0, list[Bar]()
        for timed in line.record.trained[name]:
            bars.append(Bar(at_s, at_s + timed.seconds, "client", timed.client, f"{timed.samples} samples", 1, 1.0))
            at_s += timed.seconds
        rows.append({"device": name, "track": "compute", "bars": bars})
    planned_s = line.record.predicted_s
    return {
        "step": line.record.round + 1,
        "from_s": 0.0,
        "to_s": max(line.makespan_s, planned_s or 0.0),
        "planned_s": planned_s,
        "measured": {"rows": rows, "step_s": line.makespan_s},
        "predicted": {"rows": [], "step_s": planned_s},
    }
