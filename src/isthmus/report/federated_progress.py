"""A federated run as it goes: a live table on a terminal, a line per round or so elsewhere; and what came out of it."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from isthmus.federated.evaluation import Evaluation
from isthmus.federated.history import RoundLine
from isthmus.federated.privacy import Guarantee
from isthmus.protocol.federated_messages import LinearFit
from isthmus.protocol.federated_reports import refusal_texts
from isthmus.protocol.federated_rules import Why
from isthmus.report.progress import still_live
from isthmus.report.tables import new_table, titled
from isthmus.sanitize import sanitize
from isthmus.simulator.federated import SimulatedRound
from isthmus.units import format_duration, format_metric, format_metrics, format_size

COLUMNS = (
    "round",
    "clients",
    "loss",
    "metrics",
    "worst\ndecile",
    "round\ntime",
    "longest\nexecutor",
    "planned",
    "bound",
    "time\nerror",
    "re-\nassigned",
    "busy",
    "bytes",
    "ended\nby",
)
WIDE, SPARED = 116, {"worst\ndecile", "planned", "bound", "time\nerror", "re-\nassigned"}
"""In a window of fewer columns than that these are left out: cut numbers say nothing."""
SHOWN_ROUNDS = 12
REFRESH_S = 0.25
PLAIN_EVERY_S = 5.0
PLAIN_SHARE = 0.1
MOST_EXECUTORS = 8


class FederatedProgress:
    """A context manager that gets every committed round."""

    def __init__(self, console: Console, rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._rounds = rounds
        self._clock = clock
        self._recent: deque[RoundLine] = deque(maxlen=SHOWN_ROUNDS)
        self._live = still_live(console)
        self._logged_s, self._logged_round = float("-inf"), 0
        self._unseen: RoundLine | None = None
        """The newest evaluated round, where its line was not printed."""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def round(self, line: RoundLine) -> None:
        self._recent.append(line)
        done, now_s = line.record.round + 1, self._clock()
        if self._live is not None:
            if now_s - self._logged_s >= REFRESH_S or done == self._rounds:
                self._logged_s = now_s
                self._live.update(_table(self._recent, self._rounds, self._console.width), refresh=True)
            return
        due = now_s - self._logged_s >= PLAIN_EVERY_S or done - self._logged_round >= PLAIN_SHARE * self._rounds
        self._unseen = line if line.evaluation is not None else self._unseen
        if due or done == self._rounds:
            self._logged_s, self._logged_round = now_s, done
            before = "" if self._unseen in (None, line) else f"; after {_evaluated(self._unseen)}"
            self.note(_sentence(line, self._rounds) + before)
            self._unseen = None

    def note(self, text: str) -> None:
        self._console.print(Text(sanitize(text)), soft_wrap=True, highlight=False)


_ENDED: Mapping[Why, str] = {
    "all": "",
    "quorum": "ended with the share that must answer",
    "behind": "ended without those still at work for an earlier round",
    "deadline": "ended by the deadline",
}
"""Why a round ended; empty for a round in which all have answered."""


def _sentence(line: RoundLine, rounds: int) -> str:
    parts = [f"round {line.record.round + 1}/{rounds}", _clients(line), *_figures(line)]
    parts.append(format_duration(line.seconds))
    if line.record.refused:
        parts.append(_refused(line))
    if line.record.stale:
        parts.append(f"{len(line.record.stale)} late")
    if line.record.missing:
        parts.append(f"{len(line.record.missing)} missing")
    ended = _ENDED[line.record.closed_by]
    return ", ".join([*parts, f"{ended} ({line.rules})"] if ended else parts)


def _evaluated(line: RoundLine) -> str:
    return f"round {line.record.round + 1}: {', '.join(_figures(line))}"


def _figures(line: RoundLine) -> list[str]:
    """Those of the round's evaluation: on held-out samples, or else of clients."""
    e = line.evaluation
    if e is None:
        return []
    if e.loss is None:
        return [f"clients' own {name} {format_metric(name, f.mean)}" for name, f in e.clients.items()]
    known = {name: value for name, value in e.metrics.items() if value is not None}
    return [f"loss {e.loss:.4f}", *(f"{name} {format_metric(name, value)}" for name, value in known.items())]


def last_figures(lines: Sequence[RoundLine], spent: Guarantee | None, *, of_sites: bool) -> list[str]:
    """Return the lines for the end of a run: the newest evaluation, and the promise of a private one. Sites evaluate
    the model that they receive."""
    done = lines[-1].record.round + 1
    left = "" if spent is None or done == spent.rounds else f"; {done} rounds are done"
    promised = [] if spent is None else [f"privacy: {spent}{left}"]
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
        if of_sites and len(f.each) <= MOST_EXECUTORS:
            found.append("  " + ", ".join(f"{site} {format_metric(name, value)}" for site, value in f.each.items()))
    return found


def _refused(line: RoundLine) -> str:
    """The number of refused updates, and the reason of the first."""
    return f"{len(line.record.refused)} refused ({refusal_texts(line.record.refused)[0]:.100})"


def _clients(line: RoundLine) -> str:
    """How many answered, of those that were asked."""
    answered = line.clients + len(line.record.refused)
    return f"{line.clients} of {answered + len(line.record.missing)} clients"


def _table(lines: Sequence[RoundLine] | deque[RoundLine], rounds: int, width: int) -> RenderableType:
    metrics = list(dict.fromkeys(n for line in lines if line.evaluation is not None for n in line.evaluation.metrics))
    columns = [*COLUMNS[:3], *metrics, *COLUMNS[4:]]
    shown = [place for place, name in enumerate(columns) if width >= WIDE or name not in SPARED]
    left = {"busy", COLUMNS[-1]}
    table = new_table([columns[place] for place in shown], [name for name in columns if name not in left])
    executors = sorted({name for line in lines for name in line.busy_s()}, key=lambda name: (len(name), name))
    for line in lines:
        cells = _cells(line, executors, metrics)
        table.add_row(*(cells[place] for place in shown))
    refusals = [f"round {line.record.round + 1}: {_refused(line)}" for line in lines if line.record.refused]
    title = f"federated run, round {lines[-1].record.round + 1} of {rounds}"
    return titled(title, table, sanitize("".join(refusals[-1:])))


def _cells(line: RoundLine, executors: Sequence[str], metrics: Sequence[str]) -> tuple[RenderableType, ...]:
    e, record = line.evaluation, line.record
    named = "loss" if e is None or not e.metrics else next(iter(e.metrics))
    clients = None if e is None else e.clients.get(named)
    error = line.time_error()
    lacking = len(record.refused) + len(record.missing)
    return (
        Text(f"{record.round + 1}"),
        Text(f"{line.clients}/{line.clients + lacking}" if lacking else f"{line.clients}"),
        Text("-" if e is None or e.loss is None else f"{e.loss:.4f}"),
        *(Text(format_metric(name, None if e is None else e.metrics.get(name))) for name in metrics),
        Text("-" if clients is None else format_metric(named, clients.worst_decile)),
        Text(format_duration(line.seconds)),
        Text(format_duration(line.makespan_s)),
        Text("-" if record.predicted_s is None else format_duration(record.predicted_s)),
        Text("-" if record.bound_s is None else format_duration(record.bound_s)),
        Text("-" if error is None else f"{error:.0%}"),
        Text(f"{record.stolen}"),
        Text(_busy(line, executors)),
        Text(format_size(line.sent_bytes + line.received_bytes)),
        Text(record.closed_by),
    )


def _busy(line: RoundLine, executors: Sequence[str]) -> str:
    """Percent per executor, of the round's time, as far as its sums came."""
    busy_s = line.busy_s() if line.seconds else {}
    shown = executors[:MOST_EXECUTORS]
    text = " ".join(f"{min(1.0, busy_s[name] / line.seconds):.0%}" if name in busy_s else "-" for name in shown)
    return text if len(executors) <= MOST_EXECUTORS else f"{text} ..."


def rounds_table(lines: Sequence[RoundLine]) -> RenderableType:
    """Return the results of a run, one row per figure. UserError is never raised: without rounds the table is empty."""
    table: Table = new_table(("", "median", "least", "most"), ("median", "least", "most"))
    steady = lines[1:] or lines
    series: dict[str, tuple[Sequence[float | None], Callable[[float], str]]] = {
        "round time": ([line.seconds for line in steady], format_duration),
        "longest executor": ([line.makespan_s for line in steady], format_duration),
        "longest executor, planned": ([line.record.predicted_s for line in steady], format_duration),
        "error of client times": ([line.time_error() for line in steady], lambda share: f"{share:.0%}"),
        "clients reassigned": ([float(line.record.stolen) for line in steady], lambda count: f"{count:g}"),
        "messages with values": ([float(line.trips) for line in steady], lambda count: f"{count:g}"),
        "sent": ([float(line.sent_bytes) for line in steady], format_size),
        "received": ([float(line.received_bytes) for line in steady], format_size),
    }
    for name, (values, shown) in series.items():
        known = [v for v in values if v is not None]
        if known:
            table.add_row(Text(name), *(Text(shown(f(known))) for f in (statistics.median, min, max)))
    return titled(f"{len(lines)} rounds, the first left out", table)


_ENDS: Mapping[Why, str] = {
    "all": "the last client",
    "quorum": "the quorum",
    "behind": "the last client that was not behind",
    "deadline": "the deadline",
}
"""The event that closed a round."""


def simulated_table(rounds: Sequence[SimulatedRound], line: LinearFit, fleet: str = "") -> RenderableType:
    """Return the virtual clock's figures, one row each. `line` is of this machine, or the mean over the fleet."""
    table: Table = new_table(("", "median", "least", "most"), ("median", "least", "most"))
    steady = rounds[1:] or rounds
    busy = [float(r.busy_s.sum() / (len(r.busy_s) * r.seconds)) if r.seconds else 0.0 for r in steady]
    series: dict[str, tuple[Sequence[float | None], Callable[[float], str]]] = {
        "round time": ([r.seconds for r in steady], format_duration),
        "longest executor, planned": ([r.record.predicted_s for r in steady], format_duration),
        "its lower bound": ([r.record.bound_s for r in steady], format_duration),
        "executors busy": (busy, lambda share: f"{share:.0%}"),
        "clients": ([float(sum(map(len, r.record.trained.values()))) for r in steady], lambda count: f"{count:g}"),
        "clients reassigned": ([float(r.record.stolen) for r in steady], lambda count: f"{count:g}"),
    }
    if any(r.record.stale for r in steady):
        series["late updates"] = [float(len(r.record.stale)) for r in steady], lambda count: f"{count:g}"
    if any(r.record.missing for r in steady):
        series["clients missing"] = [float(len(r.record.missing)) for r in steady], lambda count: f"{count:g}"
    for name, (values, shown) in series.items():
        known = [v for v in values if v is not None]
        if known:
            table.add_row(Text(name), *(Text(shown(f(known))) for f in (statistics.median, min, max)))
    throughput = f"{format_duration(line.seconds_per_sample)} a sample and {format_duration(line.fixed_s)} a client"
    where = f"on fleet {sanitize(fleet)}, by its figures, on average" if fleet else "on this machine"
    total = format_duration(sum(r.seconds for r in rounds))
    counted: Counter[Why] = Counter(r.record.closed_by for r in rounds)
    ends = ", ".join(f"{count} by {_ENDS[why]}" for why, count in counted.most_common())
    return titled(f"{len(rounds)} simulated rounds ({ends}), {total} in all; {where} {throughput}", table)
