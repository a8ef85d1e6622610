"""Each worker broadcasts once in a period how it spends its time, and the worker that delays the others is named.

The exchange of one period is started at its end and read at the end of the next: nobody waits for it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Generator
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist

from isthmus.sync.averaging import Averager
from isthmus.sync.exchange import message_device

LOG = logging.getLogger("isthmus.sync")
BEHIND = 1.2  # a worker whose computation takes this many times the others' median, in two periods running, is named
LEAST_BEHIND_S = 2e-3  # less a step is not worth a line


class PeriodReport(msgspec.Struct, frozen=True, kw_only=True):
    """One period, as all workers saw it. Seconds are per step, in the order of the workers."""

    steps: int  # how many had been made at its end
    compute_s: tuple[float, ...]  # between two calls of `sync.step`, data loading included and waiting left out
    wait_s: tuple[float, ...]  # waiting for averages
    divergence: float  # gamma: the mean over the workers, every layer taken just before it was averaged
    link_busy_s: float  # how long averages were on the way in the whole period, as the last worker to start them saw it

    @property
    def usual_s(self) -> float:
        """The median without the slowest worker: of two, the other one."""
        return statistics.median(sorted(self.compute_s)[:-1] or self.compute_s)

    @property
    def behind_s(self) -> float:
        """Seconds per step that the slowest worker costs the others: its time over theirs."""
        return max(self.compute_s) - self.usual_s


class Monitor:
    """Measures this worker's steps. All workers must end their periods alike."""

    def __init__(self, averager: Averager, workers: tuple[str, ...]) -> None:
        self.workers = workers
        self.last: PeriodReport | None = None  # the newest period that all have reported
        self._averager = averager
        self._on_the_way: tuple[torch.Tensor, dist.Work, int] | None = None
        self._named = self._seen = -1
        self._since_s = time.perf_counter()
        self._waited_s = 0.0
        self._busy_before_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._compute_s = self._wait_s = self._divergence = 0.0
        self._busy_before_s = self._averager.busy_s

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the time inside as waiting for others."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - start_s

    @property
    def waited_s(self) -> float:
        """Waiting in the step that is being made."""
        return self._waited_s

    def diverged(self, distance: float) -> None:
        """This worker was so far from the average, squared, of some layers."""
        self._divergence += distance

    def stepped(self) -> None:
        end_s = time.perf_counter()
        self._compute_s += end_s - self._since_s - self._waited_s
        self._wait_s += self._waited_s
        self._steps += 1
        self._since_s, self._waited_s = end_s, 0.0

    def period_ended(self, steps: int) -> PeriodReport | None:
        """Tell the others of this period, and return what all told of the one before; None the first time."""
        report = self._read()
        own = [
            self._compute_s / self._steps,
            self._wait_s / self._steps,
            self._divergence,
            self._averager.busy_s - self._busy_before_s,
        ]
        group = self._averager.group
        table = torch.zeros(len(self.workers), len(own), dtype=torch.float64)
        table[dist.get_rank(group)] = torch.tensor(own, dtype=torch.float64)
        table = table.to(message_device(group))
        work = dist.all_reduce(table, group=group, async_op=True)
        assert work is not None
        self._averager.watch(work)
        self._on_the_way = (table, work, steps)
        self._clear()
        return report

    def restart(self) -> None:
        """Leave out the time since the last step: it was spent on something else."""
        self._since_s = time.perf_counter()

    def flush(self) -> None:
        """Read what is on the way, before the group is used no more."""
        self._read()

    def _read(self) -> PeriodReport | None:
        if self._on_the_way is None:
            return None
        table, work, steps = self._on_the_way
        work.wait()
        self._on_the_way = None
        compute_s, wait_s, divergence, busy_s = (column.tolist() for column in table.unbind(1))
        self.last = PeriodReport(
            steps=steps,
            compute_s=tuple(compute_s),
            wait_s=tuple(wait_s),
            divergence=statistics.fmean(divergence),
            link_busy_s=min(busy_s),
        )
        self._name_slowest(self.last)
        return self.last

    def _name_slowest(self, report: PeriodReport) -> None:
        usual_s, most_s = report.usual_s, max(report.compute_s)
        behind = most_s > max(BEHIND * usual_s, usual_s + LEAST_BEHIND_S)
        slowest = report.compute_s.index(most_s) if behind else -1
        again, self._seen = slowest == self._seen, slowest
        if not again:
            return
        if slowest not in (self._named, -1) and dist.get_rank(self._averager.group) == 0:
            LOG.warning(
                "%s computes %.0f ms a step, the others %.0f: every averaging waits for it, %.0f ms a step",
                self.workers[slowest],
                1e3 * most_s,
                1e3 * usual_s,
                1e3 * report.behind_s,
            )
        self._named = slowest
