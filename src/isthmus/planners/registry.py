"""The planners by name: ours, and those that other packages register under `isthmus.planners`.

A planner is a function from a `Problem` to a `Plan`; the first line of its docstring describes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from isthmus.cost import Problem
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.plan import Plan
from isthmus.planners.chain import chain
from isthmus.planners.even import even

Planner = Callable[[Problem], Plan]

ENTRY_POINTS = "isthmus.planners"

_OURS: Mapping[str, Planner] = {"chain": chain, "even": even}


def planner_names() -> list[str]:
    """Every name that `plan` takes, sorted. Ours win over a third party's of the same name."""
    return sorted({*_OURS, *_third_party()})


def describe(name: str) -> str:
    """One line on what a planner does. Raises UserError for an unknown name."""
    return (inspect.getdoc(_planner(name)) or "").partition("\n")[0]


def plan(name: str, problem: Problem) -> Plan:
    """The plan that the planner makes. Raises UserError for an unknown planner, FleetTooSmall where nothing fits."""
    planner = _planner(name)
    try:
        made = cast(object, planner(problem))
    except IsthmusError:
        raise
    except Exception as error:
        if name in _OURS:
            raise
        raise UserError(f"planner {name!r} failed: {error!r}") from error
    if not isinstance(made, Plan):
        raise UserError(f"planner {name!r}: got a {type(made).__name__}, expected a Plan")
    return made


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _planner(name: str) -> Planner:
    if name in _OURS:
        return _OURS[name]
    others = _third_party()
    if name not in others:
        raise unknown_name("planner", name, planner_names())
    entry = others[name]
    try:
        loaded: object = entry.load()
    except Exception as error:
        raise UserError(f"planner {name!r} ({entry.value}) cannot be loaded: {error}") from error
    if not callable(loaded):
        raise UserError(f"planner {name!r} ({entry.value}): got a {type(loaded).__name__}, expected a function")
    return cast(Planner, loaded)
