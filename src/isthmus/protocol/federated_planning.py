"""A round's schedule: what it depends on, and how it is made. A host calls `plan_round` where a machine asks for it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from isthmus.planners.cohort import CohortProblem, CohortSchedule, certified, fractional, parrot, schedule_cohort
from isthmus.planners.cohort.problem import Floats
from isthmus.protocol.federated_participation import at_least


class ExecutorChurn(msgspec.Struct, frozen=True, kw_only=True):
    """Executors that come and go, as sites and devices do: who is lost may come back, and takes part from the next
    phase on."""

    start: int  # the run begins when so many are here
    wait_s: float = 5.0  # later, and after a restart: once enough for a phase are here, so long for the others


class SecureRules(msgspec.Struct, frozen=True, kw_only=True):
    share: float = 0.5  # more than this share of a secret's shares give it back
    wait_s: float = 10.0  # for sites that do not answer, in each step
    fewest: int = 2  # updates in a sum


class RoundRules(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int
    first_round: int = 0
    passes: int = 1
    needed: int = 1  # clients that a round wants; more may be asked (over-selection)
    poisson: bool = False
    """Each client is drawn independently, and every drawn client is needed. `needed` is the population then."""
    quorum: float = 1.0
    minimum: int = 1
    deadline_s: float = 600.0
    timeout_s: float = 60.0  # for a process that was started for the run to join
    attempts: int = 3
    planner: str = "certified"
    warm_up_rounds: int = 0  # so many first rounds are scheduled by number of clients alone (Parrot's R_w)
    steals: bool = True
    stealing_pays_s: float = 0.01
    """No executor steals in a phase that is expected to end sooner. Asking in vain costs two round trips, of a
    millisecond each on busy cores."""
    single: bool = False  # one client at a time, its result back at once (the FA scheme)
    staleness: int = 0
    """Rounds that an update may be late; it then has a smaller weight (FedBuff). 0: late updates are ignored."""
    at_work: int = 0
    """Clients at work at any time in a simulation with late updates; a round is the next `needed` of them that end."""
    secure: SecureRules | None = None
    """Sums are masked: when a phase is over, the masks are taken off first. None: they are not."""
    most_samples: int = 0  # the most samples of a client, which does not say how many it has; 0: it does
    gathering: ExecutorChurn | None = None
    """None: a run begins when all executors are connected, and a lost executor stays lost."""

    def enough(self, needed: int) -> int:
        """Clients that close a round of which `needed` are wanted, also where others are still at work."""
        return max(self.minimum, at_least(self.quorum, needed))

    @property
    def description(self) -> str:
        """The closing rules in words."""
        if self.at_work:
            share = f"the next {self.needed} of {self.at_work} at work"
        else:
            of = "those drawn" if self.poisson else str(self.needed)
            share = f"{'all' if self.quorum == 1 else f'{self.quorum:.0%}'} of {of}"
        late = f", late ones count for {self.staleness} rounds" if self.staleness else ""
        return f"{share}, at least {self.minimum}, deadline {self.deadline_s:g} s{late}"


STEP_S = 1e-4  # the rough seconds of one exchange of the certified search
FEWEST_STEPS, MOST_STEPS = 300, 4000
LARGE = 100_000_000
"""Clients x executors from where on the certified search's tables would be larger than 1 GB; then it is Parrot's."""
TINY_S = 1e-12


class PlanningProblem(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All that a round's schedule depends on. Arrays are not changed."""

    planner: str
    sizes: Floats  # (clients,) in samples
    seconds_per_sample: Floats  # (executors,)
    fixed_s: Floats  # (executors,) what a client costs whatever its size
    known: bool  # whether these times were measured; else they are of sizes alone


def plan_round(problem: PlanningProblem) -> CohortSchedule:
    """The schedule over the problem's executors, in their order.

    `certified` looks no longer than a better schedule could save: short rounds are Parrot's.
    """
    sizes, per_sample, fixed_s = problem.sizes, problem.seconds_per_sample, problem.fixed_s
    if len(fixed_s) == 1:
        return _everything(problem)
    cohort = CohortProblem(sizes=sizes, seconds_per_sample=per_sample, fixed_s=fixed_s)
    if problem.planner != "certified":
        return schedule_cohort(problem.planner, cohort)
    greedy = parrot(cohort)
    if not problem.known or cohort.clients * cohort.executors > LARGE:
        return greedy
    at_least_s = float(sizes.sum() / (1 / np.maximum(per_sample, TINY_S)).sum())
    if greedy.makespan_s - at_least_s < FEWEST_STEPS * STEP_S:
        return greedy
    # What clients take whatever their size is left out there: it would pass for something to be saved.
    bound_s = min(fractional(cohort).lower_bound_s, greedy.makespan_s)
    steps = int((greedy.makespan_s - bound_s) / STEP_S)
    if steps < FEWEST_STEPS:
        return replace(greedy, lower_bound_s=bound_s)
    return certified(cohort, steps=min(steps, MOST_STEPS))


def _everything(problem: PlanningProblem) -> CohortSchedule:
    """There is one executor: it trains them all, by every planner."""
    clients = len(problem.sizes)
    load_s = float(problem.seconds_per_sample[0]) * float(problem.sizes.sum()) + float(problem.fixed_s[0]) * clients
    return CohortSchedule(
        algorithm=problem.planner,
        executor_of=np.zeros(clients, dtype=np.int64),
        load_s=np.array([load_s]),
        lower_bound_s=load_s,
    )
