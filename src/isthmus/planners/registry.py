"""The planners by name: ours, those that other packages register under `isthmus.planners`, and the user's own.

A planner is a function from a `Problem` to a `Plan`; the first line of its docstring describes it. Ours are imported
when they are called: together that takes most of a second, and who goes on with a plan needs none of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from isthmus.cost import Problem, broken_constraint
from isthmus.cost.price import beyond_limit
from isthmus.errors import FleetTooSmall, IsthmusError, UserError, unknown_name
from isthmus.extensions import import_object, load_third_party, third_party
from isthmus.planners.least import stated, with_certificate
from isthmus.planners.observer import SearchStopped, keeping, looked_at
from isthmus.planners.surrogates import over_surrogates
from isthmus.planners.sync.dream import dream
from isthmus.planners.sync.dream_dfs import dream_dfs
from isthmus.planners.sync.registry import SyncPlanner
from isthmus.planners.sync.replicas import dream_replicas
from isthmus.plans import Constraints, Plan
from isthmus.units import format_duration

if TYPE_CHECKING:
    from isthmus.planners.auto import Score

Planner = Callable[[Problem], Plan]

ENTRY_POINTS = "isthmus.planners"


ABILITIES = ("replicas", "data holders", "labels stay", "price", "compression")
"""Several replicas; the first stage where the data are; the last too (U-shape); least price; what a codec makes of each
message is part of the search, and not put on the best plan without."""


class PlannerEntry(NamedTuple):
    """One of our planners."""

    function: str
    """`module:function`."""
    holders: bool = False
    """Whether it puts the first stage, and where labels stay the last, where the data are."""
    prices: bool = False
    """Whether it can minimise the price of a step."""
    packs: bool = False
    """Whether it looks at what is sent in each plan, or at none of it."""
    replicas: bool = False
    """Whether its plans may have several replicas."""


_OURS: Mapping[str, PlannerEntry] = {
    "auto": PlannerEntry("isthmus.planners.auto:auto", holders=True, prices=True, packs=True, replicas=True),
    "certified": PlannerEntry("isthmus.planners.allocation.on_fleet:certified"),
    "chain": PlannerEntry("isthmus.planners.chain:chain", holders=True, prices=True, packs=True),
    "dtfm-genetic": PlannerEntry("isthmus.planners.placement.on_fleet:dtfm_genetic", replicas=True),
    "dtfm-genetic-code": PlannerEntry("isthmus.planners.placement.on_fleet:dtfm_genetic_code", replicas=True),
    "dtfm-kl": PlannerEntry("isthmus.planners.placement.on_fleet:dtfm_kl", replicas=True),
    "equal-compute": PlannerEntry("isthmus.planners.allocation.on_fleet:equal_compute"),
    "even": PlannerEntry("isthmus.planners.even:even", holders=True, packs=True),
    "islands": PlannerEntry("isthmus.planners.placement.on_fleet:islands", replicas=True),
    "op-fence": PlannerEntry("isthmus.planners.op_fence:op_fence"),
    "random": PlannerEntry("isthmus.planners.placement.on_fleet:random", replicas=True),
    "sky-heuristic": PlannerEntry("isthmus.planners.allocation.on_fleet:sky_heuristic"),
    "sky-optimal": PlannerEntry("isthmus.planners.allocation.on_fleet:sky_optimal"),
}
_WITH_HOLDERS = tuple(name for name, planner in _OURS.items() if planner.holders)
_PRICING = tuple(name for name, planner in _OURS.items() if planner.prices)

_SCHEDULED: Mapping[str, SyncPlanner] = {"dream": dream, "dreamddp": dream_dfs}
"""Sync modes that leave open in which step of a period a parameter is averaged."""


def can_price(name: str) -> bool:
    """True if the planner may minimise money. Built-in planners declare it; others always may."""
    return name not in _OURS or _OURS[name].prices


def check_constraints(name: str, constraints: Constraints) -> None:
    """UserError where one of our planners cannot do what the terms ask: names those that can."""
    if name not in _OURS:
        return  # a third party's plan is judged when it is there
    if constraints.objective == "cost" and not can_price(name):
        raise UserError(f"plan.objective: got 'cost', which planner {name!r} cannot minimise: choose {_or(_PRICING)}")
    if constraints.max_price is not None and not can_price(name):
        raise UserError(f"plan.max_price: planner {name!r} knows no prices: choose {_or(_PRICING)}")
    if constraints.data_holders and not _OURS[name].holders:
        field = "labels_stay" if constraints.labels_stay else "data_holder"
        raise UserError(
            f"plan.{field}: planner {name!r} puts any part of the model anywhere: choose {_or(_WITH_HOLDERS)}"
        )


def _or(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def planner_names() -> list[str]:
    """Every name that `plan` takes, sorted. Ours win over a third party's of the same name."""
    return sorted({*_OURS, *third_party(ENTRY_POINTS)})


def abilities(name: str) -> tuple[str, ...] | None:
    """What a planner of ours can do, of `ABILITIES`; None for another's, which is judged by its plan."""
    if name not in _OURS:
        return None
    entry = _OURS[name]
    able = (entry.replicas, entry.holders, entry.holders, entry.prices, entry.packs)
    return tuple(ability for ability, has in zip(ABILITIES, able, strict=True) if has)


def check_planner(name: str) -> None:
    """UserError for a name that is neither known nor `package.module:function`, which is not imported yet."""
    if ":" not in name and name not in planner_names():
        raise unknown_name("planner", name, [*planner_names(), "package.module:function"])


def describe(name: str) -> str:
    """One line on what a planner does. Raises UserError for an unknown name."""
    return (inspect.getdoc(_planner(name)) or "").partition("\n")[0]


def plan(name: str, problem: Problem, score: Score | None = None) -> Plan:
    """The plan that the planner makes. `score` tells `auto` the seconds per step of its last few candidates, better
    than the closed form does; no other planner asks.

    Where the search is ended early (`watching`), the best plan so far, without a certificate. Raises UserError for an
    unknown planner or terms that it does not respect, FleetTooSmall where nothing fits, SearchStopped where there is
    no plan yet.
    """
    planner = _planner(name)
    if name == "auto":
        planner = partial(cast("Callable[..., Plan]", planner), score=score)
    check_constraints(name, problem.constraints)
    with keeping(problem, name) as kept:
        try:
            return _made(name, problem, planner)
        except SearchStopped:
            best = kept.plan(name)
            if best is None:
                raise
    best = _with_constraints(name, problem, best)
    if beyond_limit(problem, best) is not None:
        raise SearchStopped("planning was interrupted before it had found a plan within the limit of table [plan]")
    return best


def _made(name: str, problem: Problem, planner: Planner) -> Plan:
    if name in _OURS:  # of a third party's it is not known whether it looks up while it works
        looked_at(0)
    try:
        packs = name in _OURS and _OURS[name].packs
        made = cast(object, planner(problem) if packs else over_surrogates(problem, planner))
    except IsthmusError:
        raise
    except Exception as error:
        if name in _OURS:
            raise
        raise UserError(f"planner {name!r} failed: {error!r}") from error
    if not isinstance(made, Plan):
        raise UserError(f"planner {name!r}: got a {type(made).__name__}, expected a Plan")
    made = _with_constraints(name, problem, made)
    return made if beyond_limit(problem, made) is None else _nearest(problem, made, planner)


def _with_constraints(name: str, problem: Problem, made: Plan) -> Plan:
    """The plan, scheduled. UserError where it breaks the terms."""
    for replica in made.replicas:
        broken = broken_constraint(problem, [s.device for s in replica.stages], [s.first for s in replica.stages[1:]])
        if broken is not None:
            raise UserError(f"planner {name!r}: {broken}")
    return scheduled(problem, made)


def _nearest(problem: Problem, made: Plan, planner: Planner) -> Plan:
    """Of a plan beyond the terms' limit: the best that the planner makes of what is limited. FleetTooSmall where that
    is beyond the limit too."""
    constraints = problem.constraints
    other = planner(problem.unlimited("cost" if constraints.max_step_s is None else "time"))
    other = msgspec.structs.replace(scheduled(problem, other), constraints=constraints, certificate=None)
    beyond = beyond_limit(problem, other)
    if beyond is None:
        return other
    reached = min(beyond, beyond_limit(problem, made) or beyond)
    where = f"which no plan that was found keeps to on fleet {problem.fleet.name!r}"
    if constraints.max_step_s is not None:
        limit, least = format_duration(constraints.max_step_s), format_duration(reached)
        raise FleetTooSmall(f"plan.max_step: got {limit}, {where}: the fastest takes {least}")
    least = f"the cheapest costs {reached:.4g} for 1,000 steps"
    raise FleetTooSmall(f"plan.max_price: got {constraints.max_price:g}, {where}: {least}")


def scheduled(problem: Problem, made: Plan) -> Plan:
    """The plan with what its replicas sum put in the steps where it costs least, if the policy leaves a choice."""
    if problem.sync.mode not in _SCHEDULED or len(made.replicas) < 2:
        return made
    dream_plans = dream_replicas(problem, made, _SCHEDULED[problem.sync.mode])
    proven = stated(problem, made.certificate)
    return dream_plans if proven is None else with_certificate(problem, dream_plans, proven)


def _planner(name: str) -> Planner:
    if name in _OURS:
        return cast("Planner", import_object("planner", _OURS[name].function))
    check_planner(name)
    loaded = import_object("planner", name) if ":" in name else load_third_party(third_party(ENTRY_POINTS)[name])
    if not callable(loaded):
        raise UserError(f"planner {name!r}: got a {type(loaded).__name__}, expected a function")
    return cast(Planner, loaded)
