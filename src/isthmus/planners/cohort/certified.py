"""Ours: a schedule together with a lower bound on every schedule.

The fractional optimum, in which clients may be split between executors, bounds the makespan from below and says which
executors suit which sizes. Two roundings give each executor about the clients that it has there: one fills executors
evenly, one keeps to the fractional shares. Exchanges even out what is left. Where executors get few clients each,
counting them raises the bound.

The fractional optimum is a linear programme (minimise T; each client's shares add up to 1; no executor exceeds T) that
needs no solver. Where one executor is better suited to small clients than another, t_i / b_i > t_j / b_j, an exchange
of shares that keeps the load of i lowers that of j whenever i held the larger client. So some optimum gives the
smallest clients to the executor with the largest t_k / b_k, the next ones to the next, and all are busy until T:

    size    5  6  8  9  9 12 15 17 30 41
            [--- 2 ---|-- 0 --|---- 1 ----]     t_2 / b_2 > t_0 / b_0 > t_1 / b_1

T is found by bisection. (Rejected: HiGHS on clients in buckets of like sizes. That needs a solver for what two sorts
and a bisection do, and its prices are less exact by what the buckets blur.)

Move and swap: the busiest executor gives a client to another one, or exchanges one with it, again and again.

The exchange whose two executors then end soonest is made even if it is no improvement, and clients that just changed
hands stay for some steps (tabu search: Glover 1986). Most dead ends are a few exchanges deep; without this the search
ends in the first one. Nothing is random.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from isthmus.planners.cohort.parrot import longest_first
from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule, Floats, Integers, scheduled

TENURE_STEPS = 8  # how long a client stays where it was put
TINY = float(np.finfo(np.float64).tiny)


def exchange(problem: CohortProblem, executor_of: Integers, *, stop_s: float, steps: int) -> Integers:
    """(clients,) the best schedule met in `steps` exchanges from `executor_of`, or the first that ends by `stop_s`.

    The sizes are ascending. A step costs O(clients of the busiest executor x executors).
    """
    state = _State(problem, executor_of)
    best, best_s = executor_of, float(state.load_s.max())
    for step in range(steps):
        if best_s <= stop_s or not state.changed(step):
            break
        if (makespan_s := float(state.load_s.max())) < best_s:
            best, best_s = state.executor_of.copy(), makespan_s
    return best


class _State:
    """A schedule, and its clients sorted by executor, then size: `executor * clients + client`, one number each.

        clients 0..5, executor_of = 1 0 0 1 0 1   ->   1 2 4 | 6 9 11

    So one binary search finds, on every executor at once, the client nearest to a wanted size.
    """

    def __init__(self, problem: CohortProblem, executor_of: Integers) -> None:
        self._problem = problem
        self.executor_of = executor_of.copy()
        self.load_s = problem.load_s(executor_of)
        self._count = problem.clients
        self._keys = np.sort(executor_of * self._count + np.arange(self._count))
        self._first_key = np.arange(problem.executors) * self._count
        self._stays_until = np.full(self._count, -1)

    def changed(self, step: int) -> bool:
        """Carries out the busiest executor's exchange after which the later of its two executors ends soonest; its
        clients stay for a while. False where there is none."""
        source = int(self.load_s.argmax())
        clients = self._clients(source)
        free = clients[self._stays_until[clients] < step]
        clients = free if len(free) else clients  # to stand still would be worse than to go back
        moved_s = self._after_moves(source, clients)
        partners, swapped_s = self._swaps(source, clients, step)
        after_s = np.concatenate([moved_s, swapped_s])
        after_s[:, source] = np.inf
        row, target = divmod(int(after_s.argmin()), self._problem.executors)
        if not np.isfinite(after_s[row, target]):
            return False
        self._put(int(clients[row % len(clients)]), target, step)
        if row >= len(clients):  # a swap
            self._put(int(partners[row - len(clients), target]), source, step)
        self._keys.sort()
        for executor in (source, target):
            sizes = self._problem.sizes[self._clients(executor)]
            # Summed anew: thousands of differences would add up thousands of rounding errors.
            self.load_s[executor] = (
                sizes.sum() * self._problem.seconds_per_sample[executor] + len(sizes) * self._problem.fixed_s[executor]
            )
        return True

    def _put(self, client: int, executor: int, step: int) -> None:
        old = self.executor_of[client] * self._count + client
        self._keys[self._keys == old] = executor * self._count + client
        self.executor_of[client] = executor
        self._stays_until[client] = step + TENURE_STEPS

    def _clients(self, executor: int) -> Integers:
        first, end = np.searchsorted(self._keys, [executor * self._count, (executor + 1) * self._count])
        return self._keys[first:end] - executor * self._count

    def _after_moves(self, source: int, clients: Integers) -> Floats:
        """(clients, executors) seconds until both the source and the target of a move end."""
        t, b = self._problem.seconds_per_sample, self._problem.fixed_s
        sizes = self._problem.sizes[clients][:, None]
        return np.maximum(self.load_s[source] - sizes * t[source] - b[source], self.load_s + sizes * t + b)

    def _swaps(self, source: int, clients: Integers, step: int) -> tuple[Integers, Floats]:
        """(2 x clients, executors) whom to get back, and the seconds until both executors end.

        Giving D samples more than one gets back changes the loads by -D t_source and +D t_target. The two ends meet
        at one D, so the best partner is one of the two whose sizes are nearest to that, from either side.
        """
        sizes, t = self._problem.sizes, self._problem.seconds_per_sample
        surplus_s = self.load_s[source] - self.load_s
        # Where neither executor minds the size there is no such D, and any partner will do.
        with np.errstate(over="ignore"):
            wanted = sizes[clients][:, None] - surplus_s / np.maximum(t[source] + t, TINY)
        above = np.searchsorted(self._keys, self._first_key + np.searchsorted(sizes, wanted))
        keys = self._keys[np.concatenate([np.minimum(above, self._count - 1), np.maximum(above - 1, 0)])]
        owners, partners = np.divmod(keys, self._count)
        given = np.tile(sizes[clients], 2)[:, None] - sizes[partners]
        after_s = np.maximum(self.load_s[source] - given * t[source], self.load_s + given * t)
        allowed = (owners == np.arange(self._problem.executors)) & (self._stays_until[partners] < step) & (given != 0)
        return partners, np.where(allowed, after_s, np.inf)


TOLERANCE = 1e-3
PRECISION = 1e-8
"""Relative width at which the bisection stops. The bound is computed from the prices, so it is valid all the same."""
MOST_STEPS = 64
MOST_TRIES = 40
ROUNDING = 1 + 1e-12  # on a limit that may be some schedule's exact makespan
MOST_COUNTS = 256  # values of j that are tried. Fewer make a weaker bound, not a wrong one.
MOST_PER_EXECUTOR = 16
"""Clients per executor up to which the bound is worth its time: with more, the fractional one is closer."""
COUNTING_PRECISION = 1e-6


def certified(problem: CohortProblem, *, steps: int | None = None) -> CohortSchedule:
    """A nearly shortest round, with a proof of how much shorter any other could be.

    Stops at a gap of `TOLERANCE`, or after `steps` exchanges from each rounding; without a number after so many that
    improvements become rare: an exchange mends one executor, and a few rounds mend all. Never longer than Parrot's
    schedule. Nothing is random or timed: the same problem gives the same schedule.
    """
    ascending = np.argsort(problem.sizes, kind="stable")
    ordered = replace(problem, sizes=problem.sizes[ascending])
    found, bound_s = _solve(ordered, 400 + 6 * problem.executors if steps is None else steps)
    executor_of = np.empty_like(found)
    executor_of[ascending] = found
    made = scheduled(problem, executor_of, algorithm="certified")
    # A bound that is met exactly may lie above the makespan by the rounding of a sum.
    return replace(made, lower_bound_s=min(bound_s, made.makespan_s))


def _solve(problem: CohortProblem, steps: int) -> tuple[Integers, float]:
    """The schedule and the bound; the sizes are ascending."""

    def makespan_s(executor_of: Integers) -> float:
        return float(problem.load_s(executor_of).max())

    relaxed = fractional(problem)
    largest_s = float((problem.sizes[-1] * problem.seconds_per_sample + problem.fixed_s).min())
    greedy = longest_first(problem)
    bound_s = max(relaxed.lower_bound_s, largest_s)
    bound_s = counting_bound_s(problem, low_s=bound_s, high_s=makespan_s(greedy))
    stop_s = bound_s * (1 + TOLERANCE)
    fitted = smallest_fit(problem, relaxed.specialists[::-1], low_s=bound_s, high_s=makespan_s(greedy))
    best = greedy
    for start in (fitted, relaxed.rounded):
        if makespan_s(best) > stop_s and start is not None:
            best = min(best, exchange(problem, start, stop_s=stop_s, steps=steps), key=makespan_s)
    return best, bound_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Fractional:
    """An optimal solution of the programme and of its dual, up to rounding."""

    lower_bound_s: float  # seconds that no schedule falls below
    specialists: tuple[int, ...]  # all executors: those suited to the smallest clients first
    rounded: Integers  # (clients,) the executor that has most of each client, for clients in ascending order of size


def fractional(problem: CohortProblem) -> Fractional:
    """Solve the programme. O(executors log clients) per step of the bisection, O(clients executors) for the bound."""
    sizes = np.sort(problem.sizes)
    # An angle, because t / b is infinite where b is 0.
    specialists = np.argsort(-np.arctan2(problem.seconds_per_sample, problem.fixed_s), kind="stable")
    line = _Line(sizes, problem.seconds_per_sample[specialists], problem.fixed_s[specialists])
    alone_s = problem.sizes.sum() * problem.seconds_per_sample + problem.clients * problem.fixed_s
    low, high = 0.0, float(alone_s.min())
    for _ in range(MOST_STEPS):
        if high - low <= PRECISION * high:
            break
        middle = (low + high) / 2
        if line.cuts(middle) is None:
            high = middle
        else:
            low = middle
    cuts = line.cuts(low) or []
    prices = np.empty(problem.executors)
    prices[specialists] = line.prices(cuts)
    # A client belongs to the executor that has its middle.
    middles = np.arange(problem.clients) + 0.5
    share = np.minimum(np.searchsorted(np.array(cuts), middles), problem.executors - 1)
    return Fractional(
        lower_bound_s=dual_bound_s(problem, prices),
        specialists=tuple(specialists.tolist()),
        rounded=specialists[share].astype(np.int64),
    )


def dual_bound_s(problem: CohortProblem, prices: Floats) -> float:
    """The Lagrangian bound: sum over m of min over k of `prices_k T_mk`, for any prices that add up to 1.

    A schedule's loads, averaged by the prices, are at most its makespan; and that average is at least this sum.
    """
    return float((problem.client_s() * prices).min(axis=1).sum())


class _Line:
    """Clients in a row by size, filled by executors in the order given, each for the same time."""

    def __init__(self, sizes: Floats, seconds_per_sample: Floats, fixed_s: Floats) -> None:
        # Plain floats: the inner loop looks single numbers up, at which numpy is slow.
        self._sizes: list[float] = sizes.tolist()
        self._before: list[float] = np.concatenate([[0.0], np.cumsum(sizes)]).tolist()
        self._executors: list[tuple[float, float]] = list(
            zip(seconds_per_sample.tolist(), fixed_s.tolist(), strict=True)
        )

    def cuts(self, limit_s: float) -> list[float] | None:
        """Where each executor's share ends, in clients; None where they reach the end of the row within `limit_s`."""
        count, before, position, found = len(self._sizes), self._before, 0.0, list[float]()
        for t, b in self._executors:
            whole = int(position)
            samples = before[whole] + (position - whole) * self._sizes[whole]
            until_s = limit_s + t * samples + b * position

            def seconds(client: int, t: float = t, b: float = b) -> float:
                return t * before[client] + b * client

            last = bisect.bisect_right(range(count + 1), until_s, lo=whole, key=seconds) - 1
            if last >= count:
                return None
            position = last + (until_s - seconds(last)) / (t * self._sizes[last] + b)
            if position >= count:  # by rounding
                return None
            found.append(position)
        return found

    def prices(self, cuts: list[float]) -> Floats:
        """The dual: two neighbours pay the same for the client at their cut (complementary slackness)."""
        found = [0.0]  # logarithms: a product over hundreds of executors can overflow
        for (left, right), cut in zip(itertools.pairwise(self._executors), cuts, strict=False):
            size = self._sizes[int(cut)]
            found.append(found[-1] + math.log(size * left[0] + left[1]) - math.log(size * right[0] + right[1]))
        prices = np.exp(np.array(found) - max(found))
        return prices / prices.sum()


def smallest_fit(problem: CohortProblem, order: Sequence[int], *, low_s: float, high_s: float) -> Integers | None:
    """(clients,) whole clients in executors that are bins of T seconds, under the smallest T found by bisection between
    `low_s` and `high_s`.

    Executors are filled one after another in the order of the fractional optimum, the specialists for large clients
    first, each with the largest client left that still fits. So every executor gets about the clients that it has in
    the fractional optimum, and small clients fill what large ones leave. (Multifit: Coffman, Garey and Johnson 1978,
    whose bins are equal and so need no order. Rejected: to give each client of the fractional optimum to the executor
    with its largest share. That leaves whole clients of imbalance, 2-13 % at 1,000 clients on 32 executors; this leaves
    0.1-0.4 %.)

    The sizes are ascending. None where `high_s` is too little too: what fits is not monotone in the limit, so this is
    a heuristic, and high_s may come from another schedule.
    """
    if (best := first_fit(problem, order, low_s)) is not None:
        return best
    best = first_fit(problem, order, high_s)
    for _ in range(MOST_TRIES):
        if best is None or high_s <= low_s * (1 + TOLERANCE / 4):
            break
        middle_s = (low_s + high_s) / 2
        found = first_fit(problem, order, middle_s)
        if found is None:
            low_s = middle_s
        else:
            best, high_s = found, min(middle_s, float(problem.load_s(found).max()))
    return best


def first_fit(problem: CohortProblem, order: Sequence[int], limit_s: float) -> Integers | None:
    """(clients,) the executor of each when all of `order` take at most `limit_s`; None where clients are left over.

    The sizes are ascending.
    """
    sizes: list[float] = problem.sizes.tolist()
    clients = list(range(problem.clients))
    executor_of = np.empty(problem.clients, dtype=np.int64)
    for executor in order:
        t, b = float(problem.seconds_per_sample[executor]), float(problem.fixed_s[executor])
        left_s, fits = limit_s * ROUNDING, len(sizes)
        while fits:
            size = (left_s - b) / t if t else (np.inf if left_s >= b else 0.0)
            fits = bisect.bisect_right(sizes, size, hi=fits)
            if fits:
                fits -= 1
                left_s -= t * sizes.pop(fits) + b
                executor_of[clients.pop(fits)] = executor
    return None if clients else executor_of


def counting_bound_s(problem: CohortProblem, *, low_s: float, high_s: float) -> float:
    """The largest limit between `low_s`, known to be a bound, and `high_s` that counting refutes, by bisection.

    It is for executors that get few clients each, where half a client is far from none. Of the j largest clients an
    executor trains within T at most as many as there are of the smallest of them that fit; if those numbers add up to
    less than j, no schedule ends by T. For j = executors + 1 this says that two of them meet on one executor; for
    j = 1, that the largest client must be trained somewhere.

    O(MOST_COUNTS executors) per step and client that an executor may get. The sizes are ascending.
    """
    if problem.clients > MOST_PER_EXECUTOR * problem.executors:
        return low_s
    counts = np.unique(np.linspace(1, problem.clients, min(problem.clients, MOST_COUNTS)).round().astype(np.int64))
    before = np.concatenate([[0.0], np.cumsum(problem.sizes)])
    # Numbers next to each other have no middle, and near 0 they may be further apart than the precision.
    while high_s - low_s > COUNTING_PRECISION * high_s and low_s < (middle_s := (low_s + high_s) / 2) < high_s:
        if _refuted(problem, before, counts, middle_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def _refuted(problem: CohortProblem, before: Floats, counts: Integers, limit_s: float) -> bool:
    """Return whether for some j, of `counts`, the j largest clients are more than all executors can take."""
    first = problem.clients - counts
    held = np.zeros((len(counts), problem.executors), dtype=np.int64)
    for number in range(1, int(counts[-1]) + 1):
        end = np.minimum(first + number, problem.clients)
        seconds = np.outer(before[end] - before[first], problem.seconds_per_sample) + number * problem.fixed_s
        fits = (seconds <= limit_s) & (number <= counts)[:, None]
        if not fits.any():
            break
        held += fits
    return bool((held.sum(axis=1) < counts).any())
