"""The steps, contributions and bytes of each decoupled replica, by the trace of their run."""

from __future__ import annotations

import msgspec
from rich.console import RenderableType

from isthmus.programs.merge_trace import MERGER
from isthmus.report.tables import new_table, titled
from isthmus.trace import Trace, busy_share, link_bytes
from isthmus.units import format_size


class ReplicaUse(msgspec.Struct, frozen=True, kw_only=True):
    """One replica in the steps that its trace has."""

    replica: str
    steps: int
    busy: float  # share of the run during which it made steps, 0 to 1
    contributions: int
    sent_bytes: int
    received_bytes: int


class ReplicasTraced(msgspec.Struct, frozen=True, kw_only=True):
    merges: int
    replicas: tuple[ReplicaUse, ...]


def replicas_traced(trace: Trace) -> ReplicasTraced:
    """Replicas by name, without the devices of pipelines."""
    busy, carried = busy_share(trace), link_bytes(trace)
    counts: dict[tuple[str, str], int] = {}
    for span in trace.spans:
        counts[span.device, span.name] = counts.get((span.device, span.name), 0) + 1
    uses = [
        ReplicaUse(
            replica=name,
            steps=counts.get((name, "step"), 0),
            busy=share,
            contributions=counts.get((name, "contribution"), 0),
            sent_bytes=carried.get((name, MERGER), 0),
            received_bytes=carried.get((MERGER, name), 0),
        )
        for name, share in sorted(busy.items())
        if name != MERGER and (name, "F") not in counts
    ]
    merges = sum(span.device == MERGER and span.track == "control" for span in trace.spans)
    return ReplicasTraced(merges=merges, replicas=tuple(uses))


def replicas_table(found: ReplicasTraced) -> RenderableType:
    columns = ("replica", "steps", "busy", "contributions", "sent", "received")
    table = new_table(columns, columns[1:])
    for use in found.replicas:
        sizes = format_size(use.sent_bytes), format_size(use.received_bytes)
        table.add_row(use.replica, str(use.steps), f"{use.busy:.0%}", str(use.contributions), *sizes)
    return titled(f"{found.merges} merges", table)
