"""Random rounds of federated learning, and the best schedule of small ones by trying all."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from isthmus.planners.cohort import CohortProblem
from isthmus.planners.cohort.problem import Floats

KINDS = ("uniform", "lognormal", "pareto")


@st.composite
def cohorts(draw: st.DrawFn, most_clients: int = 12, most_executors: int = 5) -> CohortProblem:
    """Few distinct numbers on purpose: ties in sizes, loads and t / b are where algorithms go wrong."""
    clients = draw(st.integers(1, most_clients))
    executors = draw(st.integers(1, most_executors))
    size = st.one_of(st.integers(1, 9), st.floats(0.5, 200.0))
    second = st.one_of(st.integers(0, 3), st.floats(0.0, 10.0))

    def array(element: st.SearchStrategy[float], length: int) -> Floats:
        return np.array(draw(st.lists(element, min_size=length, max_size=length)), dtype=np.float64)

    fixed_s = array(second, executors)
    t = array(second, executors)
    return CohortProblem(
        sizes=array(size, clients), seconds_per_sample=np.where(t + fixed_s == 0, 1.0, t), fixed_s=fixed_s
    )


def random_cohort(kind: str, clients: int, executors: int, seed: int) -> CohortProblem:
    """Executors whose t_k differ by up to ten."""
    random = np.random.default_rng(seed)
    sizes = {
        "uniform": random.uniform(20, 400, clients),
        "lognormal": random.lognormal(5, 0.8, clients),
        "pareto": (random.pareto(1.5, clients) + 1) * 50,
    }[kind]
    return CohortProblem(
        sizes=np.ceil(sizes),
        seconds_per_sample=np.exp(random.uniform(0, np.log(10), executors)) * 1e-2,
        fixed_s=random.uniform(0.2, 0.6, executors),
    )


def shortest_s(problem: CohortProblem) -> float:
    """The makespan of the best of all executors ** clients schedules."""
    everything = itertools.product(range(problem.executors), repeat=problem.clients)
    return min(float(problem.load_s(np.array(choice)).max()) for choice in everything)
