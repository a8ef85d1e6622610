"""What a job can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from isthmus.cost.compression import describe_ratios, ratio_planner_names
from isthmus.errors import UserError
from isthmus.fleet import RANDOM, built_in_names
from isthmus.fleet import describe as describe_fleet
from isthmus.planners import describe as describe_planner
from isthmus.planners import planner_names
from isthmus.planners.cohort import cohort_names, describe_cohort
from isthmus.planners.sync import describe_sync, sync_planner_names
from isthmus.report.fleet_tables import fleets_table, names_table, planners_table

__all__ = ["Kind", "fleets", "fleets_table", "names_table", "planners", "planners_table"]


class Kind(NamedTuple):
    where: str
    """What it plans, and where it is named."""
    described: dict[str, str]
    """By name, one line."""


def fleets() -> dict[str, str]:
    """The built-in fleets, and one line on each.

    >>> "laptop" in fleets()
    True
    """
    return {name: describe_fleet(name) for name in (*built_in_names(), RANDOM)}


def planners() -> dict[str, Kind]:
    """By what they plan.

    >>> sorted(planners())
    ['cohort', 'compression', 'plan', 'sync']
    """
    return {
        "plan": Kind("Plans: `planner` of a job", _described(planner_names(), describe_planner)),
        "compression": Kind(
            "Compression ratios: `compression.method` of a job", _described(ratio_planner_names(), describe_ratios)
        ),
        "sync": Kind(
            "When what is averaged: `planner=` of isthmus.sync", _described(sync_planner_names(), describe_sync)
        ),
        "cohort": Kind(
            "Clients on executors: `execution.planner` of a federated job", _described(cohort_names(), describe_cohort)
        ),
    }


def _described(names: Iterable[str], describe: Callable[[str], str]) -> dict[str, str]:
    return {name: _line(name, describe) for name in names}


def _line(name: str, describe: Callable[[str], str]) -> str:
    """One broken package must not hide the others."""
    try:
        return describe(name)
    except UserError as e:
        return str(e)
