"""How clients are spread over processes: Parrot's comparison (its Fig. 2 and Table 1), and ours. One flag picks one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from isthmus.errors import unknown_name


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between schemes; everything else is the same code."""

    description: str
    processes: bool = True  # whether executors are processes of their own
    per: str = "given"  # how many executors: as `given`, or one per client of the `cohort` or of the `population`
    planner: str = "certified"
    warm_up_rounds: int = 0
    steals: bool = False
    single: bool = False


_SCHEMES: Mapping[str, Scheme] = {
    "sp": Scheme(description="everything in one process", processes=False, planner="uniform"),
    "rw": Scheme(description="one process per client of the population", per="population"),
    "sd": Scheme(description="one process per client of the cohort", per="cohort", planner="uniform"),
    "fa": Scheme(description="one client at a time per executor, its result back at once", single=True),
    "parrot": Scheme(
        description="clients in turn by fitted times, sums on the executor", planner="parrot", warm_up_rounds=1
    ),
    "ours": Scheme(description="certified schedules, and idle executors take clients of others", steals=True),
}


def scheme(name: str) -> Scheme:
    """Raises UserError for an unknown name."""
    if name not in _SCHEMES:
        raise unknown_name("scheme", name, _SCHEMES)
    return _SCHEMES[name]
