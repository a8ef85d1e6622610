"""The price of a step: the devices' time, and the bytes that leave their sites."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import msgspec

from isthmus.cost.problem import Problem
from isthmus.cost.sync import messages
from isthmus.expected_loss import increase_of, more_steps
from isthmus.fleet import Fleet
from isthmus.plans import Plan, Replica

GB = 10**9
ROUNDING = 1 + 1e-9
SECONDS_PER_HOUR = 3600.0


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of money in the currency of the fleet's prices."""

    devices: float  # every device that the plan uses is paid for the whole step, idle or not
    egress: float

    @property
    def total(self) -> float:
        return self.devices + self.egress


def step_price(plan: Plan, fleet: Fleet, step_s: float | None = None) -> Price:
    """The price of one step that takes `step_s`, by default what the plan predicts. UserError for an unknown device."""
    hours = (plan.predicted.step_s if step_s is None else step_s) / SECONDS_PER_HOUR
    return Price(
        devices=hours * sum(fleet.device(name).price_per_hour for name in plan.used),
        egress=sum(
            size_bytes / GB * fleet.region_info_of(fleet.device(source).region).egress_price_per_gb
            for source, target, size_bytes in _sent(plan)
            if fleet.device(source).region != fleet.device(target).region
        ),
    )


def preference(problem: Problem, plan: Plan, step_s: float | None = None) -> tuple[float, float]:
    """The problem's objective and its tie-breaker: (seconds, 0), or (price of a step, seconds).

    A step takes `step_s`, by default what the plan predicts. Within a loss budget the first is that of all steps that
    make up for the plan's codecs, per step without codecs. Of a plan beyond the terms' limit the first is infinite, the
    second what is limited, by the prediction.
    """
    beyond = beyond_limit(problem, plan)
    if beyond is not None:
        return math.inf, beyond
    asked, seconds = problem.constraints.compression, plan.predicted.step_s if step_s is None else step_s
    steps = 1.0 if asked is None or asked.loss_budget is None else more_steps(increase_of(plan.replicas))
    if problem.constraints.objective == "time":
        return steps * seconds, 0.0
    return steps * step_price(plan, problem.fleet, seconds).total, seconds


def beyond_limit(problem: Problem, plan: Plan) -> float | None:
    """The plan's seconds per step, or its price of 1,000 steps, where the terms allow less."""
    constraints = problem.constraints
    if constraints.max_step_s is not None and plan.predicted.step_s > constraints.max_step_s * ROUNDING:
        return plan.predicted.step_s
    if constraints.max_price is not None:
        price = 1000 * step_price(plan, problem.fleet).total
        return price if price > constraints.max_price * ROUNDING else None
    return None


def is_priced(fleet: Fleet) -> bool:
    """True if any device or region of the fleet has a price."""
    return any(d.price_per_hour for d in fleet.devices) or any(site.egress_price_per_gb for site in fleet.region_info)


def _sent(plan: Plan) -> Iterator[tuple[str, str, float]]:
    """(source, target, bytes per step) of everything that crosses a link; of sums, the mean over a period."""
    for replica in plan.replicas:
        yield from _sent_inside(replica, dict(zip(plan.constraints.feeders, plan.constraints.shares, strict=True)))
    for group in plan.sync.groups:
        share = len(group.iterations) / plan.sync.period
        for source, target, size_bytes in itertools.chain.from_iterable(messages(group)):
            yield source, target, size_bytes * share


def _sent_inside(replica: Replica, shares: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """Yield the messages inside a replica. The edges of a holder's copies carry its own micro-batches."""
    names = [stage.device for stage in replica.workers]
    for edge in replica.worker_edges:
        ends = names[edge.source], names[edge.target]
        count = replica.micro_batches * min((shares[name] for name in ends if name in shares), default=1.0)
        yield ends[0], ends[1], edge.forward_wire_bytes * count
        yield ends[1], ends[0], edge.backward_wire_bytes * count
    for parameter, owner, user in replica.shared_uses:
        yield names[owner], names[user], parameter.size_bytes
        yield names[user], names[owner], parameter.gradient_bytes
