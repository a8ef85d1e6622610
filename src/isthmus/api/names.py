"""The names that a job can have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from rich.console import RenderableType

from isthmus.cost.compression import describe_ratios, ratio_planner_names
from isthmus.errors import UserError
from isthmus.fleet import RANDOM, built_in_names
from isthmus.fleet import describe as describe_fleet
from isthmus.option_docs import first_line
from isthmus.planners import ABILITIES, abilities, planner_names
from isthmus.planners import describe as describe_planner
from isthmus.planners.cohort import COHORT_ALGORITHMS
from isthmus.planners.sync import SYNC_PLANNERS
from isthmus.report.tables import fleets_table, names_table, planners_table

__all__ = ["Kind", "fleets", "fleets_table", "kind_table", "names_table", "planners"]


class Listed(msgspec.Struct, frozen=True):
    """One planner."""

    what: str  # one line
    abilities: tuple[str, ...] | None  # None where they are not declared


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Planners that answer the same question."""

    decides: str
    where: str  # how one is named
    abilities: tuple[str, ...] = ()  # that some have and others lack
    planners: dict[str, Listed]


def fleets() -> dict[str, str]:
    """The built-in fleets, and one line on each.

    >>> "laptop" in fleets()
    True
    """
    return {name: describe_fleet(name) for name in (*built_in_names(), RANDOM)}


def planners() -> dict[str, Kind]:
    """Return the planners by what they plan.

    >>> found = planners()
    >>> sorted(found)
    ['cohort', 'compression', 'plan', 'sync']
    >>> "replicas" in found["plan"].planners["auto"].abilities
    True
    """
    return {
        "plan": Kind(
            decides="which devices run which part of the model, in how many replicas",
            where="`planner` of a job, or --planner",
            abilities=tuple(ABILITIES.values()),
            planners=_listed(planner_names(), describe_planner, abilities),
        ),
        "compression": Kind(
            decides="how much each message is compressed",
            where="`compression.method` of a job",
            planners=_listed(ratio_planner_names(), describe_ratios),
        ),
        "sync": Kind(
            decides="in which step of a period each parameter is averaged",
            where="`planner=` of isthmus.sync",
            planners=_listed(sorted(SYNC_PLANNERS), lambda name: first_line(SYNC_PLANNERS[name])),
        ),
        "cohort": Kind(
            decides="which executor trains which clients of a round",
            where="`runtime.planner` of a federated job",
            planners=_listed(sorted(COHORT_ALGORITHMS), lambda name: first_line(COHORT_ALGORITHMS[name])),
        ),
    }


def _listed(
    names: Iterable[str],
    describe: Callable[[str], str],
    abilities_of: Callable[[str], tuple[str, ...] | None] = lambda _: None,
) -> dict[str, Listed]:
    return {name: Listed(_line(name, describe), abilities_of(name)) for name in names}


def _line(name: str, describe: Callable[[str], str]) -> str:
    """One broken package must not hide the others."""
    try:
        return describe(name)
    except UserError as e:
        return str(e)


def kind_table(kind: Kind) -> RenderableType:
    rows = ((name, listed.what, listed.abilities) for name, listed in kind.planners.items())
    return planners_table(f"Planners that decide {kind.decides} ({kind.where})", rows, kind.abilities)
