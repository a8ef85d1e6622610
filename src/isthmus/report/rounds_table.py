"""Rounds and merges: as tables, as they were and as they are simulated, rounds as spans for a trace viewer, and what
evaluations of a federated run found."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from isthmus.federated.admission import Guarantee
from isthmus.federated.evaluation import Evaluation, RoundLine
from isthmus.programs.merger import MERGER
from isthmus.programs.merging import Why
from isthmus.protocol.federated_messages import LinearFit
from isthmus.report.tables import new_table, titled
from isthmus.sanitize import sanitize
from isthmus.simulator.rounds import SimulatedRound
from isthmus.trace import Span, Trace, busy_share, link_bytes
from isthmus.units import format_duration, format_metric, format_metrics, format_size

MOST_SITES = 8  # sites that are named one by one


def last_figures(lines: Sequence[RoundLine], spent: object, *, of_sites: bool) -> list[str]:
    """Return the lines for the end of a run: the newest evaluation, and the promise of a private one. Sites evaluate
    the model that they receive."""
    done = lines[-1].record.round + 1
    left = "" if not isinstance(spent, Guarantee) or done == spent.rounds else f"; {done} rounds are done"
    promised = [] if not isinstance(spent, Guarantee) else [f"privacy: {spent}{left}"]
    return [*_evaluation_lines(lines, of_sites=of_sites), *promised]


def summarized(evaluation: Evaluation | None) -> dict[str, float | None]:
    """Return an evaluation's figures by name, those of clients as their mean and the mean of their worst tenth."""
    if evaluation is None:
        return {}
    found: dict[str, float | None] = {"held-out loss": evaluation.loss, **evaluation.metrics}
    for name, of in evaluation.clients.items():
        if name != "loss" or len(evaluation.clients) == 1:  # beside a metric the loss says little
            found |= {f"clients/{name}": of.mean, f"worst tenth/{name}": of.worst_decile}
    return found


def _evaluation_lines(lines: Sequence[RoundLine], *, of_sites: bool) -> list[str]:
    done = next((line for line in reversed(lines) if line.evaluation is not None), None)
    if done is None or (e := done.evaluation) is None:
        return []
    done_rounds = f"after {lines[-1].record.round + 1} rounds"
    found = [] if e.loss is None else [f"held-out loss {e.loss:.4f}{format_metrics(e.metrics)} {done_rounds}"]
    whose = f"sites' own data, before round {done.record.round + 1}" if of_sites else "clients' own data"
    for name, f in e.clients.items():
        mean, worst, deviation = (format_metric(name, value) for value in (f.mean, f.worst_decile, f.deviation))
        found.append(f"{whose}: mean {name} {mean}, worst tenth {worst}, deviation {deviation}")
        if of_sites and len(f.each) <= MOST_SITES:
            found.append("  " + ", ".join(f"{site} {format_metric(name, value)}" for site, value in f.each.items()))
    return found


Series = Mapping[str, tuple[Sequence[float | None], Callable[[float], str]]]
"""Values of rounds by name, and how one is written."""


def rounds_table(lines: Sequence[RoundLine]) -> RenderableType:
    """Return the results of a run, one row per figure; without rounds the table is empty."""
    steady = lines[1:] or lines
    series: Series = {
        "round time": ([line.seconds for line in steady], format_duration),
        "longest executor": ([line.makespan_s for line in steady], format_duration),
        "longest executor, planned": ([line.record.predicted_s for line in steady], format_duration),
        "error of client times": ([line.time_error() for line in steady], _share),
        "clients reassigned": ([float(line.record.stolen) for line in steady], _count),
        "messages with values": ([float(line.trips) for line in steady], _count),
        "sent": ([float(line.sent_bytes) for line in steady], format_size),
        "received": ([float(line.received_bytes) for line in steady], format_size),
    }
    return _medians(f"{len(lines)} rounds, the first left out", series)


def _share(value: float) -> str:
    return f"{value:.0%}"


def _count(value: float) -> str:
    return f"{value:g}"


def _medians(title: str, series: Series) -> RenderableType:
    table: Table = new_table(("", "median", "least", "most"), ("median", "least", "most"))
    for name, (values, shown) in series.items():
        known = [v for v in values if v is not None]
        if known:
            table.add_row(Text(name), *(Text(shown(f(known))) for f in (statistics.median, min, max)))
    return titled(title, table)


_ENDS: Mapping[Why, str] = {  # the event that closed a round
    "all": "the last client",
    "quorum": "the quorum",
    "behind": "the last client that was not behind",
    "deadline": "the deadline",
}


def simulated_table(rounds: Sequence[SimulatedRound], line: LinearFit, fleet: str = "") -> RenderableType:
    """Return the virtual clock's figures, one row each. `line` is of this machine, or the mean over the fleet."""
    steady = rounds[1:] or rounds
    series: dict[str, tuple[Sequence[float | None], Callable[[float], str]]] = {
        "round time": ([r.seconds for r in steady], format_duration),
        "longest executor, planned": ([r.record.predicted_s for r in steady], format_duration),
        "its lower bound": ([r.record.bound_s for r in steady], format_duration),
        "executors busy": ([_busy(r) for r in steady], _share),
        "clients": ([float(sum(map(len, r.record.trained.values()))) for r in steady], _count),
        "clients reassigned": ([float(r.record.stolen) for r in steady], _count),
    }
    if any(r.record.stale for r in steady):
        series["late updates"] = [float(len(r.record.stale)) for r in steady], _count
    if any(r.record.missing for r in steady):
        series["clients missing"] = [float(len(r.record.missing)) for r in steady], _count
    throughput = f"{format_duration(line.seconds_per_sample)} a sample and {format_duration(line.fixed_s)} a client"
    where = f"on fleet {sanitize(fleet)}, by its figures, on average" if fleet else "on this machine"
    total = format_duration(sum(r.seconds for r in rounds))
    counted: Counter[Why] = Counter(r.record.closed_by for r in rounds)
    ends = ", ".join(f"{count} by {_ENDS[why]}" for why, count in counted.most_common())
    return _medians(f"{len(rounds)} simulated rounds ({ends}), {total} in all; {where} {throughput}", series)


def _busy(simulated: SimulatedRound) -> float:
    spent_s = simulated.busy_s
    return float(spent_s.sum() / (len(spent_s) * simulated.seconds)) if simulated.seconds else 0.0


COORDINATOR = "coordinator"


def trace_of(run: str, lines: Sequence[RoundLine]) -> Trace:
    """Rounds when they were, with the gaps between a run and its resumption; in each every executor's clients, in the
    order in which they were reported. What an executor waited is not written down, so its clients follow one another
    without gaps, and of an algorithm of several passes the earlier ones are one span each executor."""
    return Trace(source="runtime", run=run, spans=tuple(_spans(lines)))


def _spans(lines: Sequence[RoundLine]) -> Iterator[Span]:
    origin_s = next((line.opened_at_s for line in lines if line.opened_at_s is not None), 0.0)
    end_s = 0.0
    for line in lines:
        # A clock that was set back, or a line without its time, must not lay a round over the one before.
        begin_s = end_s if line.opened_at_s is None else max(end_s, line.opened_at_s - origin_s)
        record, end_s = line.record, begin_s + line.seconds
        number = record.round + 1
        yield Span(
            device=COORDINATOR,
            track="control",
            name=f"round {number}",
            start_s=begin_s,
            end_s=end_s,
            step=number,
            size_bytes=line.sent_bytes + line.received_bytes,
        )
        for name in sorted(line.busy_s(), key=lambda name: (len(name), name)):
            at_s = begin_s
            if earlier_s := record.earlier_s.get(name, 0.0):
                yield _training(name, "earlier passes", at_s, earlier_s, number)
                at_s += earlier_s
            for timed in record.trained.get(name, ()):
                yield _training(name, f"client {timed.client}", at_s, timed.seconds, number)
                at_s += timed.seconds


def _training(executor: str, name: str, at_s: float, seconds: float, number: int) -> Span:
    return Span(device=executor, track="compute", name=name, start_s=at_s, end_s=at_s + seconds, step=number)


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
