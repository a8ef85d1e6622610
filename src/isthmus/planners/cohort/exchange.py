"""Move and swap: the busiest executor gives a client to another one, or exchanges one with it, again and again.

The exchange whose two executors then end soonest is made even if it is no improvement, and clients that just changed
hands stay for some steps (tabu search: Glover 1986). Most dead ends are a few exchanges deep; without this the search
ends in the first one. Nothing is random.
"""

from __future__ import annotations

import numpy as np

from isthmus.planners.cohort.problem import CohortProblem, Floats, Integers

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
