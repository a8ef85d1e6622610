"""What the virtual clock foretells of a run's rounds: each from a few rounds that were measured just before it.

Not the second half of a run by its first, as other work on a machine comes and goes, and would be taken for the model's
error. What is foretold is a round as most are: a process that is pushed off its core makes single rounds much longer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus import FederatedJob
from isthmus.experiments import RoundLine
from isthmus.federated.cohorts import Cohorts
from isthmus.federated.job import emulation
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import ClientTime, LinearFit, PhaseId
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.runtime.federated.run import coordinator_of
from isthmus.simulator.rounds import FederatedCosts
from isthmus_testing.virtual_runs import simulate_federated


class Alternating(Rounds):
    """Executors steal in every other round."""

    @staticmethod
    def steals_in(round_: int) -> bool:
        return bool(round_ % 2)

    def _open_phase(self, phase: PhaseId) -> None:
        self.rules = msgspec.structs.replace(self.rules, steals=self.steals_in(phase.round))
        super()._open_phase(phase)


def foretell(job: FederatedJob, sizes: NDArray[np.int64], before: Sequence[RoundLine], round_: int) -> float:
    """Seconds of a round, by the run's own machine and what was measured in the rounds `before`.

    Other rounds are simulated first, as many as fill the window of the machine's times, and one, for schedules are made
    a round ahead: where speeds change, what it believes is as old as in the run.
    """
    assert all(line.record.round < round_ for line in before), "a round is foretold from those before it"
    until = msgspec.structs.replace(job, federated=msgspec.structs.replace(job.federated, rounds=round_ + 1))
    first_round = max(0, round_ - (job.runtime.window_rounds or round_) - 1)
    machine = coordinator_of(until, sizes, Cohorts(job, sizes), first_round, None)
    return simulate_federated(machine, fitted_costs(job, before), seed=round_)[-1].seconds


def fitted_costs(job: FederatedJob, rounds: Sequence[RoundLine]) -> FederatedCosts:
    """Lines, noise, what passes between two clients and what messages take."""
    lasting, noise = calm_lines(job, rounds)
    between_s, around_s = outside_training(rounds)
    return FederatedCosts(
        lines=tuple(_of_the_median(line, k, job, rounds) for k, line in enumerate(lasting)),
        noise=noise,
        between_s=between_s,
        broadcast_s=around_s / 2,
        sums_s=around_s / 2,
        factor=lambda executor, phase: emulation(job, executor).factor(phase.round),
    )


def calm_lines(job: FederatedJob, rounds: Sequence[RoundLine]) -> tuple[tuple[LinearFit, ...], float]:
    """Each executor's line without its emulated factor, and the noise's sigma about the lines."""
    throughput = ThroughputModel(job.runtime.executors, window_rounds=0)
    for k in range(job.runtime.executors):
        emulated = emulation(job, k)
        for line in rounds:
            timed = line.record.trained.get(f"executor-{k}", ())
            calm = [ClientTime(t.client, t.samples, t.seconds / emulated.factor(line.record.round)) for t in timed]
            throughput.record(line.record.round, k, calm)
    found = tuple(throughput.line(k) for k in range(job.runtime.executors))
    sigmas = [
        math.log(t.seconds / emulation(job, k).factor(line.record.round) / found[k].seconds(t.samples))
        for line in rounds
        for k in range(job.runtime.executors)
        for t in line.record.trained.get(f"executor-{k}", ())
    ]
    return found, statistics.pstdev(sigmas)


def _of_the_median(line: LinearFit, executor: int, job: FederatedJob, rounds: Sequence[RoundLine]) -> LinearFit:
    """An executor's line, which is of mean times, scaled to how long it trained in the median round."""
    over: list[float] = []
    for one in rounds:
        if timed := one.record.trained.get(f"executor-{executor}"):
            expected_s = emulation(job, executor).factor(one.record.round) * sum(line.seconds(t.samples) for t in timed)
            over.append(sum(t.seconds for t in timed) / expected_s)
    scale = statistics.median(over)
    return LinearFit(line.seconds_per_sample * scale, line.fixed_s * scale)


def outside_training(rounds: Sequence[RoundLine]) -> tuple[float, float]:
    """Seconds from one client's end to the next one's beginning; seconds of a round besides: messages, the wait for the
    model, the sums' way. An executor that trains more clients has less of the round for training."""
    busy = [(line, line.busy_s()) for line in rounds]
    clients = np.array([len(line.record.trained[name]) for line, each in busy for name in each], dtype=np.float64)
    left = np.array([line.seconds - seconds for line, each in busy for seconds in each.values()])
    slope_s = float(np.polyfit(clients, left, 1)[0]) if np.ptp(clients) else 0.0
    # Executors that train as many clients each say little of what one takes: it is within what is left of any round.
    between_s = min(max(0.0, slope_s), float((left / clients).min()))
    last = [
        min(line.seconds - seconds - between_s * len(line.record.trained[name]) for name, seconds in each.items())
        for line, each in busy
    ]
    return between_s, statistics.median(last)
