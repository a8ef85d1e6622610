"""Local search over whole plans of several replicas.

Replicas that were cut each for itself can gain from each other: cut alike they average with fewer partners, and a
device whose link averages quickly may be worth a stage although it only slows its pipeline down. Every trial is a whole
plan, judged by its closed form, so on large models only the few moves that pay most often are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from isthmus.cost import PlanLayout, Problem, broken_constraint, build_replicas, preference
from isthmus.errors import FleetTooSmall
from isthmus.planners.observer import keep
from isthmus.planners.search.local_search import first_improvement
from isthmus.planners.search.threshold_search import TOLERANCE
from isthmus.plans import Plan

MOST_PLACES = 64
"""Places to cut up to which single cuts and devices move."""
MOST_TRIALS = 400
"""Plans times operators, in thousands: bounds the time, the same on every machine."""

Layouts = tuple[PlanLayout, ...]


class LayoutTrial(NamedTuple):
    layouts: Layouts
    plan: Plan | None
    """None where it does not fit."""


def shifted(problem: Problem, layouts: Sequence[PlanLayout], places: Sequence[int]) -> Plan:
    """First improvement until no move helps or the trials are spent. `places` are the legal ones, 0 and the end among
    them. FleetTooSmall where already the first layouts do not fit."""

    def trials(now: LayoutTrial) -> Iterator[LayoutTrial]:
        return (_trial(problem, other) for other in _moves(now.layouts, problem.fleet.names, places))

    start = LayoutTrial(
        tuple(x._replace(recompute=None) for x in layouts), build_replicas(problem, layouts, planner="auto")
    )
    best = first_improvement(
        start,
        trials,
        lambda trial: _judged(problem, trial),
        most=MOST_TRIALS * 1_000 // len(problem.flow.operators),
        tolerance=TOLERANCE,
    )
    assert best.plan is not None, "what does not fit improves nothing"
    return best.plan


def _trial(problem: Problem, layouts: Layouts) -> LayoutTrial:
    homes = [name for layout in layouts for name in set(layout.order)]
    if len(set(homes)) < len(homes) or any(_ill_placed(problem, layout) for layout in layouts):
        return LayoutTrial(
            layouts, None
        )  # what is at both ends of a pipeline may have been moved from one of them only
    try:
        return LayoutTrial(layouts, keep(build_replicas(problem, layouts, planner="auto")))
    except FleetTooSmall:
        return LayoutTrial(layouts, None)


def _judged(problem: Problem, trial: LayoutTrial) -> float:
    return preference(problem, trial.plan)[0] if trial.plan is not None else float("inf")


def _ill_placed(problem: Problem, layout: PlanLayout) -> bool:
    if any(a == b for a, b in itertools.pairwise(layout.order)):
        return True
    return broken_constraint(problem, layout.order, layout.boundaries) is not None


def _moves(layouts: Layouts, names: Sequence[str], places: Sequence[int]) -> Iterator[Layouts]:
    yield from _alike(layouts)
    yield from _shares(layouts)
    yield from _fewer(layouts)
    if len(places) > MOST_PLACES:
        return
    unused = [name for name in names if all(name not in layout.order for layout in layouts)]
    for r, layout in enumerate(layouts):
        for changed in (
            _cuts(layout, places),
            _orders(layout, unused),
            _longer(layout, unused, places),
            _shorter(layout),
        ):
            yield from (_with(layouts, r, other) for other in changed)
    yield from _exchanges(layouts)


def _alike(layouts: Layouts) -> Iterator[Layouts]:
    """A replica copies another's cuts."""
    for (r, mine), other in itertools.product(enumerate(layouts), layouts):
        if len(other.order) == len(mine.order) and other.boundaries != mine.boundaries:
            yield _with(layouts, r, mine._replace(boundaries=other.boundaries))


def _shares(layouts: Layouts) -> Iterator[Layouts]:
    """A micro-batch goes from one replica to another."""
    for r, s in itertools.permutations(range(len(layouts)), 2):
        if layouts[s].micro_batches > 1:
            given = _with(layouts, s, layouts[s]._replace(micro_batches=layouts[s].micro_batches - 1))
            yield _with(given, r, layouts[r]._replace(micro_batches=layouts[r].micro_batches + 1))


def _fewer(layouts: Layouts) -> Iterator[Layouts]:
    """A replica's micro-batches go to another, and its devices are free."""
    for r, s in itertools.permutations(range(len(layouts)), 2):
        more = layouts[r]._replace(micro_batches=layouts[r].micro_batches + layouts[s].micro_batches)
        kept = _with(layouts, r, more)
        yield (*kept[:s], *kept[s + 1 :])


def _cuts(layout: PlanLayout, places: Sequence[int]) -> Iterator[PlanLayout]:
    """One cut moves to the next place on either side."""
    ends = [0, *(places.index(b) for b in layout.boundaries), len(places) - 1]
    for k in range(1, len(ends) - 1):
        for moved in (ends[k] - 1, ends[k] + 1):
            if ends[k - 1] < moved < ends[k + 1]:
                cut = (*layout.boundaries[: k - 1], places[moved], *layout.boundaries[k:])
                yield layout._replace(boundaries=cut)


def _orders(layout: PlanLayout, unused: Sequence[str]) -> Iterator[PlanLayout]:
    """Two devices of the pipeline swap, or one makes room for an unused one."""
    for i, j in itertools.combinations(range(len(layout.order)), 2):
        order = list(layout.order)
        order[i], order[j] = order[j], order[i]
        yield layout._replace(order=tuple(order))
    for i, name in itertools.product(range(len(layout.order)), unused):
        yield layout._replace(order=(*layout.order[:i], name, *layout.order[i + 1 :]))


def _longer(layout: PlanLayout, unused: Sequence[str], places: Sequence[int]) -> Iterator[PlanLayout]:
    """A stage is split and one half given to an unused device."""
    ends = [0, *layout.boundaries, places[-1]]
    for k, (start, end) in enumerate(itertools.pairwise(ends)):
        for place, name, at in itertools.product(places, unused, (k, k + 1)):
            if start < place < end:
                yield layout._replace(
                    order=(*layout.order[:at], name, *layout.order[at:]),
                    boundaries=tuple(sorted((*layout.boundaries, place))),
                )


def _shorter(layout: PlanLayout) -> Iterator[PlanLayout]:
    """A stage goes to a neighbour."""
    for k, cut in itertools.product(range(len(layout.order)), range(len(layout.boundaries))):
        if cut in (k - 1, k):
            yield layout._replace(
                order=(*layout.order[:k], *layout.order[k + 1 :]),
                boundaries=(*layout.boundaries[:cut], *layout.boundaries[cut + 1 :]),
            )


def _exchanges(layouts: Layouts) -> Iterator[Layouts]:
    """Two devices of different replicas swap."""
    for r, s in itertools.combinations(range(len(layouts)), 2):
        for i, j in itertools.product(range(len(layouts[r].order)), range(len(layouts[s].order))):
            first, second = list(layouts[r].order), list(layouts[s].order)
            first[i], second[j] = second[j], first[i]
            swapped = _with(layouts, r, layouts[r]._replace(order=tuple(first)))
            yield _with(swapped, s, layouts[s]._replace(order=tuple(second)))


def _with(layouts: Layouts, number: int, layout: PlanLayout) -> Layouts:
    return (*layouts[:number], layout, *layouts[number + 1 :])
