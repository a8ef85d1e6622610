"""The planners by name: ours, those that other packages register under `isthmus.planners`, and the user's own.

A planner is a function from a `Problem` to a `Plan`; the first line of its docstring describes it. Ours are imported
when they are called: together that takes most of a second, and who goes on with a plan needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from isthmus.cost import Problem, broken_constraint, build_replicas, layouts_of
from isthmus.cost.price import beyond_limit
from isthmus.errors import FleetTooSmall, IsthmusError, UserError, unknown_name
from isthmus.extensions import import_object, load_third_party, third_party
from isthmus.option_docs import first_line
from isthmus.planners.observer import SearchStopped, keeping, looked_at
from isthmus.planners.operators import with_operators
from isthmus.planners.search.one_pipeline import improved_by_moves
from isthmus.planners.surrogates import over_surrogates
from isthmus.planners.sync.baselines import dream_dfs
from isthmus.planners.sync.dream import dream
from isthmus.planners.sync.problem import SyncPlanner
from isthmus.planners.sync.replicas import dream_replicas
from isthmus.plans import Constraints, Plan
from isthmus.units import format_duration

if TYPE_CHECKING:
    from isthmus.planners.search.improvement import Score

Planner = Callable[[Problem], Plan]

ENTRY_POINTS = "isthmus.planners"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Abilities of a planner beside one fast pipeline."""

    replicas: bool = False  # several pipelines that share the batch
    holders: bool = False  # the first stage is put where the data are
    labels_stay: bool = False  # the last stage too, on the device of the first if need be: a U-shape
    prices: bool = False  # the price of a step is minimised, or kept within a limit
    compression: bool = False
    """Messages are priced as each plan packs them; for others by two problems in which all plans pack alike."""


ABILITIES: Mapping[str, str] = {  # the name for people of each field of `Capabilities`
    "replicas": "replicas",
    "holders": "data holders",
    "labels_stay": "labels stay",
    "prices": "price",
    "compression": "compression",
}


class PlannerEntry(NamedTuple):
    function: str  # `module:function`
    can: Capabilities = Capabilities()


_ONE_WITH_TERMS = Capabilities(holders=True, labels_stay=True, prices=True, compression=True)
_EQUAL_REPLICAS = Capabilities(replicas=True)
_LAYERS, _PLACED = "isthmus.planners.baselines.allocation.on_fleet", "isthmus.planners.placement.on_fleet"

_OURS: Mapping[str, PlannerEntry] = {
    "auto": PlannerEntry("isthmus.planners.search.auto:auto", msgspec.structs.replace(_ONE_WITH_TERMS, replicas=True)),
    "chain": PlannerEntry("isthmus.planners.search.one_pipeline:chain", _ONE_WITH_TERMS),
    "dtfm-genetic": PlannerEntry(f"{_PLACED}:dtfm_genetic", _EQUAL_REPLICAS),
    "dtfm-genetic-code": PlannerEntry(f"{_PLACED}:dtfm_genetic_code", _EQUAL_REPLICAS),
    "dtfm-kl": PlannerEntry(f"{_PLACED}:dtfm_kl", _EQUAL_REPLICAS),
    "equal-compute": PlannerEntry(f"{_LAYERS}:equal_compute"),
    "even": PlannerEntry(
        "isthmus.planners.baselines.even:even", Capabilities(holders=True, labels_stay=True, compression=True)
    ),
    "op-fence": PlannerEntry("isthmus.planners.baselines.op_fence:op_fence"),
    "random": PlannerEntry(f"{_PLACED}:random", _EQUAL_REPLICAS),
    "sky-heuristic": PlannerEntry(f"{_LAYERS}:sky_heuristic"),
    "sky-optimal": PlannerEntry(f"{_LAYERS}:sky_optimal"),
}
MOVED, MOST_MOVED = ("auto", "chain"), 6
"""The planners whose pipelines are improved where weight gradients are computed apart, and up to how many devices."""
_ANYTHING = Capabilities(replicas=True, holders=True, labels_stay=True, prices=True)
"""Capabilities of other packages' planners: their plans are judged when they are there."""


_SCHEDULED: Mapping[str, SyncPlanner] = {"dream": dream, "dreamddp": dream_dfs}
"""Sync modes that leave open in which step of a period a parameter is averaged."""


def capabilities(name: str) -> Capabilities:
    """Return the capabilities that one of our planners declares; those of others are not limited."""
    return _OURS[name].can if name in _OURS else _ANYTHING


def check_constraints(name: str, constraints: Constraints) -> None:
    """UserError where one of our planners cannot do what the terms ask: names those that can do all of it."""
    asked = list(_demands(name, constraints))
    for capability, refusal in asked:
        if not getattr(capabilities(name), capability):
            able = [repr(other) for other, entry in _OURS.items() if all(getattr(entry.can, c) for c, _ in asked)]
            raise UserError(f"{refusal}: choose {', '.join(able[:-1])}{' or ' if able[1:] else ''}{able[-1]}")


def _demands(name: str, constraints: Constraints) -> Iterator[tuple[str, str]]:
    """Yield each capability that these terms need, and the refusal where a planner lacks it."""
    if constraints.objective == "cost":
        yield "prices", f"plan.objective: got 'cost', which planner {name!r} cannot minimise"
    if constraints.max_price is not None:
        yield "prices", f"plan.max_price: planner {name!r} knows no prices"
    if constraints.labels_stay:
        yield "labels_stay", f"plan.labels_stay: planner {name!r} puts any part of the model anywhere"
    if constraints.data_holders:
        yield "holders", f"plan.data_holder: planner {name!r} puts any part of the model anywhere"


def planner_names() -> list[str]:
    """Every name that `plan` takes, sorted. Ours win over a third party's of the same name."""
    return sorted({*_OURS, *third_party(ENTRY_POINTS)})


def abilities(name: str) -> tuple[str, ...] | None:
    """Return the abilities of our planner, as people call them; None for another's, which is judged by its plan."""
    if name not in _OURS:
        return None
    can = _OURS[name].can
    return tuple(called for field, called in ABILITIES.items() if getattr(can, field))


def check_planner(name: str) -> None:
    """UserError for a name that is neither known nor one of a function, `package.module:function`, that is there."""
    if ":" in name:
        _planner(name)
    elif name not in planner_names():
        raise unknown_name("planner", name, [*planner_names(), "package.module:function"])


def describe(name: str) -> str:
    """One line on what a planner does. Raises UserError for an unknown name."""
    return first_line(_planner(name))


def plan(name: str, problem: Problem, score: Score | None = None) -> Plan:
    """The plan that the planner makes. `score` tells `auto` and `chain` the seconds per step of their last few
    candidates, better than the closed form does; no other planner asks.

    Where the search is ended early (`watching`), the best plan so far, without a certificate. Raises UserError for an
    unknown planner or terms that it does not respect, FleetTooSmall where nothing fits, SearchStopped where there is
    no plan yet. Planners lay out `1f1b`: where weight gradients are computed apart, the same stages are timed anew, and
    nothing is proven.
    """
    if problem.constraints.lacking:
        return with_operators(problem, lambda free: plan(name, free, score), improves=name in MOVED)
    if problem.schedule in ("zero-bubble", "auto"):
        return _priced_apart(problem, plan(name, replace(problem, schedule="1f1b"), score), score or _by_formula)
    planner = _planner(name)
    if name in MOVED:
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
        packs = capabilities(name).compression
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
    """Return in place of a plan beyond the terms' limit the planner's best by the limited quantity. FleetTooSmall where
    that is beyond the limit too."""
    constraints = problem.constraints
    other = planner(problem.unlimited("cost" if constraints.max_step_s is None else "time"))
    other = msgspec.structs.replace(scheduled(problem, other), constraints=constraints)
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


def _by_formula(plan: Plan) -> float:
    return plan.predicted.step_s


def _priced_apart(problem: Problem, made: Plan, score: Score) -> Plan:
    """The stages of a `1f1b` plan with weight gradients apart, where the problem asks for it or, under `auto`, where a
    step gets shorter by the scorer. On a small fleet cuts and devices of one pipeline then move as long as that helps,
    by the formula."""
    apart, choice = replace(problem, schedule="zero-bubble"), problem.schedule == "auto"
    layouts = [layout._replace(recompute=None) for layout in layouts_of(made)]
    made_s = score(made) if choice else 0.0
    whole = f"1f1b takes {format_duration(made_s)}"
    try:
        split = build_replicas(apart, layouts, planner=made.planner)
        if made.planner in MOVED and len(layouts) == 1 and len(problem.fleet.names) <= MOST_MOVED:
            split = improved_by_moves(apart, split)
        split = scheduled(apart, split)
    except FleetTooSmall:
        if not choice:
            raise
        return _noted(made, (f"schedule auto: {whole}, and weight gradients apart do not fit",))
    split_s = score(split) if choice else 0.0
    words = f"schedule auto: {whole}, zero-bubble {format_duration(split_s)}"
    if choice and split_s >= made_s:
        return _noted(made, (words,))
    devices = len(problem.fleet.names)
    split = msgspec.structs.replace(split, notes=(*split.notes[:devices], *made.notes[devices:]))
    return _noted(split, (words,)) if choice else split


def _noted(made: Plan, notes: tuple[str, ...]) -> Plan:
    return msgspec.structs.replace(made, notes=(*made.notes, *notes))


def scheduled(problem: Problem, made: Plan) -> Plan:
    """The plan with what its replicas sum put in the steps where it costs least, if the policy leaves a choice."""
    if len(made.replicas) < 2 and problem.sync.mode != "every-step":
        words = f"sync.mode {problem.sync.mode!r} averages nothing: this plan has one replica"
        return made if words in made.notes else _noted(made, (words,))
    if problem.sync.mode not in _SCHEDULED:
        return made
    return dream_replicas(problem, made, _SCHEDULED[problem.sync.mode])


def _planner(name: str) -> Planner:
    if name in _OURS:
        return cast("Planner", import_object("planner", _OURS[name].function))
    if ":" in name:
        loaded = import_object("planner", name)
    else:
        check_planner(name)
        loaded = load_third_party(third_party(ENTRY_POINTS)[name])
    if not callable(loaded):
        raise UserError(f"planner {name!r}: got a {type(loaded).__name__}, expected a function")
    return cast(Planner, loaded)
