"""The solver HiGHS: work limits in place of time limits, so that every machine gets the same answer, and no output.

HiGHS writes some lines from C to the process's standard output, whatever `disp` says: they go to standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

from scipy.sparse import csr_matrix

from isthmus.cost.network import Floats, Ints

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

MOST_WORK = 20_000_000  # nodes of an integer programme, times the entries of its matrix


def integer_programme(
    cost: Floats, constraints: tuple[csr_matrix, Floats, Floats], integrality: Ints
) -> OptimizeResult:
    """Return the result of `scipy.optimize.milp` after so many nodes as `MOST_WORK` allows, one at least."""
    from scipy.optimize import milp  # noqa: PLC0415  # 0.2 s, which the heuristics beside need not take

    nodes = max(1, MOST_WORK // max(1, int(constraints[0].nnz)))
    with stdout_to_stderr():
        return milp(cost, constraints=constraints, integrality=integrality, options={"node_limit": nodes})


@contextlib.contextmanager
def stdout_to_stderr() -> Generator[None]:
    """Also what is written from C."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed: nothing can be written there
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
