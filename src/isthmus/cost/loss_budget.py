"""A loss budget is the whole plan's: replicas over fast links leave it to those over slow ones.

The expected loss of a plan is the mean over its samples, so a replica's increase counts by its share of the batch, and
one that packs nothing leaves its part to others. The step is that of the slowest replica:

    the least T with  sum over r of m_r * (the least increase of replica r with a step of at most T)  <=  budget * n
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from isthmus.cost.compression.expected_loss import packed_increase
from isthmus.cost.compression.just_enough import measured_choices
from isthmus.cost.compression.messages import Sender, packed_edges
from isthmus.cost.compression.registry import with_asked_feedback
from isthmus.cost.limits import in_flight_limits
from isthmus.cost.placement import Placement, rooms
from isthmus.cost.steptime import pipeline, prediction


class _Packed(NamedTuple):
    """One replica under one choice of codecs."""

    step_s: float
    cost: float
    """Expected increase times its micro-batches."""
    placed: Placement


def within_budget(placed: Sequence[Placement]) -> list[Placement]:
    """The replicas of a plan with the codecs of the shortest step that its loss budget allows. As they are where no
    budget is asked for, or there is one replica, which has spent all of it."""
    asked = placed[0].problem.constraints.compression
    if asked is None or asked.loss_budget is None or len(placed) < 2:
        return list(placed)
    options = [list(_options(p)) for p in placed]
    most = asked.loss_budget * sum(p.problem.micro_batches for p in placed)
    times = sorted({option.step_s for some in options for option in some})

    def mildest(time_s: float) -> list[_Packed]:
        """Of each replica that has one in time."""
        in_time = ([o for o in some if o.step_s <= time_s] for some in options)
        return [min(some, key=lambda o: (o.cost, o.step_s)) for some in in_time if some]

    def allowed(time_s: float) -> bool:
        found = mildest(time_s)
        return len(found) == len(options) and sum(o.cost for o in found) <= most

    return [option.placed for option in mildest(times[bisect_left(times, True, key=allowed)])]


def _options(placed: Placement) -> Iterator[_Packed]:
    """Those that `just-enough` makes for some period, and messages as they are."""
    problem = placed.problem
    asked = problem.constraints.compression
    assert asked is not None, "a budget is one of compression"
    sender = Sender(placed.order, placed.edges, max(placed.times.device_s.values()))
    for packings in measured_choices(problem, sender, asked.ratio):
        edges = with_asked_feedback(asked, packed_edges(sender, packings))
        times = pipeline(problem, placed.order, placed.flops, edges, placed.shared)
        made = replace(placed, edges=edges, times=times)
        step_s = prediction(times, in_flight_limits(problem, times, rooms(made)), problem.micro_batches).step_s
        yield _Packed(step_s, problem.micro_batches * packed_increase(edges), made)
