"""Federated rounds for the page. Of a line of `federated/history.py` the part that is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

MOST_LISTED = 300
"""Rounds of the table; curves have all."""


class LightClient(msgspec.Struct, frozen=True, array_like=True, gc=False):
    client: int
    samples: int
    seconds: float


class LightRefusal(msgspec.Struct, frozen=True, array_like=True):
    client: int
    reason: str


class LightSpread(msgspec.Struct, frozen=True):
    """Accuracies of clients on their own data."""

    mean: float
    worst_decile: float
    deviation: float


class LightEvaluation(msgspec.Struct, frozen=True):
    loss: float | None = None
    accuracy: float | None = None
    clients: LightSpread | None = None


class LightRecord(msgspec.Struct, frozen=True):
    round: int
    trained: Mapping[str, tuple[LightClient, ...]] = {}
    refused: tuple[LightRefusal, ...] = ()
    missing: tuple[int, ...] = ()
    predicted_s: float | None = None
    stolen: int = 0
    stale: tuple[tuple[int, int], ...] = ()
    closed_by: str = "all"


class LightRound(msgspec.Struct, frozen=True):
    record: LightRecord
    seconds: float
    sent_bytes: int = 0
    received_bytes: int = 0
    evaluation: LightEvaluation | None = None

    @property
    def makespan_s(self) -> float:
        """Of the executor that trained longest."""
        return max((sum(t.seconds for t in timed) for timed in self.record.trained.values()), default=0.0)


def rounds_view(lines: Sequence[LightRound]) -> dict[str, object]:
    """Curves by round, and what became of each of the last rounds."""
    spread = [e.clients if (e := line.evaluation) else None for line in lines]
    return {
        "round": [line.record.round + 1 for line in lines],
        "loss": [e.loss if (e := line.evaluation) else None for line in lines],
        "accuracy": [e.accuracy if (e := line.evaluation) else None for line in lines],
        "mean": [s.mean if s else None for s in spread],
        "worst": [s.worst_decile if s else None for s in spread],
        "low": [max(0.0, s.mean - s.deviation) if s else None for s in spread],
        "high": [min(1.0, s.mean + s.deviation) if s else None for s in spread],
        "makespan_s": [line.makespan_s for line in lines],
        "planned_s": [line.record.predicted_s for line in lines],
        "bytes": [line.sent_bytes + line.received_bytes for line in lines],
        "table": [_row(line) for line in lines[-MOST_LISTED:]],
    }


def _row(line: LightRound) -> dict[str, object]:
    record = line.record
    return {
        "round": record.round + 1,
        "clients": sum(map(len, record.trained.values())),
        "seconds": line.seconds,
        "makespan_s": line.makespan_s,
        "planned_s": record.predicted_s,
        "stolen": record.stolen,
        "refused": [f"client {r.client}: {r.reason}" for r in record.refused],
        "missing": len(record.missing),
        "late": len(record.stale),
        "closed_by": record.closed_by,
    }


def round_bars(line: LightRound) -> dict[str, object]:
    """Who trained whom in a round, one client after another, beside the time that was planned."""
    rows: list[dict[str, object]] = []
    for name in sorted(line.record.trained, key=lambda name: (len(name), name)):
        at_s, bars = 0.0, list[tuple[float, float, str, int, str, int, float]]()
        for timed in line.record.trained[name]:
            bars.append((at_s, at_s + timed.seconds, "client", timed.client, f"{timed.samples} samples", 1, 1.0))
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
