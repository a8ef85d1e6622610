"""How soon a round could end at best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.planners.cohort import CohortProblem, certified
from isthmus.protocol.federated_messages import LinearFit


def bound_s(sizes: NDArray[np.int64], lines: Sequence[LinearFit], factors: Sequence[float]) -> float:
    """No schedule of clients of these sizes ends sooner on executors that take `factors` times their line."""
    slow = np.array(factors)
    problem = CohortProblem(
        sizes=sizes.astype(float),
        seconds_per_sample=np.array([line.seconds_per_sample for line in lines]) * slow,
        fixed_s=np.array([line.fixed_s for line in lines]) * slow,
    )
    found = certified(problem, steps=0).lower_bound_s
    assert found is not None, "certified proves one"
    return found
