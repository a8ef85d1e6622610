"""Many pipelines as candidates of the closed form (`cost.kernel`): cuts of one model on devices of one fleet.

A step only gets longer with the pipeline's share m of the micro-batches, so how many it ends within a time is a count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from isthmus.cost import kernel
from isthmus.cost.cut_table import CutTable
from isthmus.cost.kernel import Bools, Floats, Ints, MessageTimes
from isthmus.cost.network import FleetNetwork
from isthmus.cost.problem import Problem
from isthmus.cost.steady import StageTasks
from isthmus.plans.schedule import STEPS_AT_ONCE

ROUNDING = 1e-12  # relative: so much later is still in time


@dataclass(frozen=True)
class Pipelines:
    """Pipelines of equally many stages. First axis: the pipeline."""

    order: Ints  # [pipelines, stages]: devices
    ends: Ints  # [pipelines, stages + 1]: block boundaries
    fill_s: Floats  # shared parameters included
    busy_s: Floats  # seconds of the slowest stage, link or uplink per micro-batch
    round_trip_s: Floats  # [pipelines, stages]
    held: Floats  # [pipelines, stages]: micro-batches that memory allows in flight
    most: Floats  # largest share that fits: the least of `held` under gpipe
    rate: Floats  # money per second of the devices
    sent: Floats  # money for what leaves regions, per micro-batch

    def fitting(self) -> Ints:
        """Rows whose stages hold one micro-batch at least."""
        return np.flatnonzero(self.held.min(axis=1) >= 1)

    def __getitem__(self, rows: Ints) -> Pipelines:
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def step_s(self, micro_batches: int) -> Floats:
        """[pipelines]: seconds of a step with so many micro-batches; infinite where they do not fit."""
        fits = (self.held.min(axis=1) >= 1) & (self.most >= micro_batches)
        return np.where(fits, self.at_most_s(micro_batches), np.inf)

    def at_most_s(self, micro_batches: int) -> Floats:
        """[pipelines]: the same if a share that is too large fitted."""
        period_s = kernel.period_s(self.busy_s, self.round_trip_s, self.held, micro_batches)
        return kernel.step_s(self.fill_s, period_s, micro_batches)

    def at_least_s(self, micro_batches: int) -> Floats:
        """[pipelines]: the same if memory throttled none."""
        return kernel.step_s(self.fill_s, self.busy_s, micro_batches)

    def put(self, rows: Ints, other: Pipelines) -> Pipelines:
        """With these rows replaced."""
        made = {field.name: getattr(self, field.name).copy() for field in fields(self)}
        for name, values in made.items():
            values[rows] = getattr(other, name)
        return replace(self, **made)

    def counts(self, rows: Ints, time_s: Floats, most: int) -> Ints:
        """Micro-batches up to `most` that each of these pipelines ends within its time."""
        spare_s = time_s * (1 + ROUNDING) - self.fill_s[rows]
        busy_s = np.maximum(self.busy_s[rows], 1e-300)
        allowed = np.minimum(self.most[rows], most)
        high = np.where(spare_s >= 0, 1 + np.floor(np.minimum(spare_s / busy_s, most)), 0.0)
        high = np.minimum(high, allowed)
        held, round_trip_s = self.held[rows], self.round_trip_s[rows]
        late = (held < high[:, None]).any(axis=1)
        if late.any():
            high[late] = self._throttled(spare_s[late], high[late], held[late], round_trip_s[late])
        return high.astype(np.int64)

    @staticmethod
    def _throttled(spare_s: Floats, high: Floats, held: Floats, round_trip_s: Floats) -> Floats:
        """The most m up to `high` with (m - 1) * round_trip / held in time wherever fewer than m are held."""
        in_time = 1 + np.floor(spare_s[:, None] * held / np.maximum(round_trip_s, 1e-300))
        # Up to `held` a stage throttles nothing; beyond, no more than are in time.
        return np.minimum(high, np.maximum(held, in_time).min(axis=1))


@dataclass(frozen=True)
class OverlappingPipelines(Pipelines):
    """Pipelines with two steps under way at once (`delayed`). Their `fill_s` is the longest round trip, and shared
    parameters."""

    def at_most_s(self, micro_batches: int) -> Floats:
        most = kernel.AT_ONCE * micro_batches
        period_s = kernel.period_s(self.busy_s, self.round_trip_s, self.held, most)
        return kernel.overlapping_step_s(self.fill_s, self.busy_s, period_s, micro_batches)

    def at_least_s(self, micro_batches: int) -> Floats:
        return kernel.overlapping_step_s(self.fill_s, self.busy_s, self.busy_s, micro_batches)

    def counts(self, rows: Ints, time_s: Floats, most: int) -> Ints:
        time_s = time_s * (1 + ROUNDING)
        busy_s, held = np.maximum(self.busy_s[rows], 1e-300), self.held[rows]
        spare_s = kernel.AT_ONCE * time_s - self.fill_s[rows]
        in_time = np.where(spare_s >= 0, 1 + np.floor(np.minimum(spare_s / busy_s, most)), 0.0)
        in_time = np.minimum(in_time, np.floor(np.minimum(np.maximum(time_s, 0) / busy_s, most)))
        # Up to half of `held` a stage throttles nothing.
        throttled = np.floor(time_s[:, None] * held / np.maximum(self.round_trip_s[rows], 1e-300))
        return np.minimum(in_time, np.maximum(held // kernel.AT_ONCE, throttled).min(axis=1)).astype(np.int64)


def most_in_flight(problem: Problem) -> int:
    """Return the micro-batches of all steps that may be under way at once."""
    return STEPS_AT_ONCE.get(problem.schedule, 1) * problem.micro_batches


@dataclass(frozen=True)
class Trials:
    """Pipelines to be timed: cut `cuts[k]` of the table, with stage s on device `order[k, s]`."""

    table: CutTable
    cuts: Ints
    order: Ints

    def __getitem__(self, rows: Ints) -> Trials:
        return Trials(self.table, self.cuts[rows], self.order[rows])


@dataclass(frozen=True)
class Sent:
    """The messages of trials, whichever stages recompute."""

    messages: Sequence[MessageTimes]
    uplinks_s: Sequence[Floats]
    shared_s: Floats
    price: Floats

    @staticmethod
    def of(network: FleetNetwork, trials: Trials) -> Sent:
        return Sent(
            list(_messages(network, trials)),
            list(_uplinks_s(network, trials)),
            _shared_s(network, trials),
            _price(network, trials),
        )


def timed(
    problem: Problem, network: FleetNetwork, trials: Trials, recompute: Bools | None = None, sent: Sent | None = None
) -> Pipelines:
    """These pipelines; in pipeline k stage s recomputes where `recompute[k, s]`. Some may not fit: `fitting`.

    Of two stages on one device each has the memory for itself: their step is a lower bound.
    """
    sent = sent or Sent.of(network, trials)
    table, cuts, order = trials.table, trials.cuts, trials.order
    again = np.zeros(order.shape, dtype=bool) if recompute is None else recompute
    speed = network.speed[order]
    forward_s = table.forward_work[cuts] / speed
    backward_s = table.backward_work[cuts] / speed + again * forward_s
    held = held_at_most(problem, network, trials, again)
    overlap = problem.schedule == "delayed"
    throttled = overlap or (problem.schedule != "gpipe" and bool((held < problem.micro_batches).any()))
    trips_s = kernel.round_trips_s(forward_s, backward_s, sent.messages) if throttled else np.zeros(order.shape)
    alone_s = trips_s.max(axis=1) if overlap else kernel.fill_s(forward_s, backward_s, sent.messages)
    return (OverlappingPipelines if overlap else Pipelines)(
        order=order,
        ends=table.ends[cuts],
        fill_s=alone_s + sent.shared_s,
        busy_s=kernel.busiest_s(order, forward_s + backward_s, sent.messages, sent.uplinks_s),
        round_trip_s=trips_s,
        held=held,
        most=held.min(axis=1) if problem.schedule == "gpipe" else np.full(len(order), np.inf),
        rate=rate_of(network, order),
        sent=sent.price,
    )


def stage_tasks(
    problem: Problem, network: FleetNetwork, trials: Trials, micro_batches: int, recompute: Bools | None = None
) -> StageTasks:
    """These pipelines as tasks and messages, with the most in flight that plans may have (`limits.in_flight_limits`)
    for so many micro-batches: below one where a stage does not fit. `recompute` is that of `timed`."""
    table, cuts, order = trials.table, trials.cuts, trials.order
    again = np.zeros(order.shape, dtype=bool) if recompute is None else recompute
    speed = network.speed[order]
    forward_s = table.forward_work[cuts] / speed
    backward_s = table.backward_work[cuts] / speed + again * forward_s
    messages, held = list(_messages(network, trials)), held_at_most(problem, network, trials, again)
    if problem.schedule == "gpipe":
        held = np.where(held < micro_batches, 0, held)
    else:
        held[:, -1] = np.minimum(held[:, -1], 1)
    held = np.minimum(held, micro_batches)
    return StageTasks(forward_s, backward_s, held, messages, list(_shared(network, trials)))


def joined(several: Sequence[Pipelines]) -> Pipelines:
    """All of them, of equally many stages."""
    found = {field.name: np.concatenate([getattr(p, field.name) for p in several]) for field in fields(Pipelines)}
    return replace(several[0], **found)


def held_at_most(problem: Problem, network: FleetNetwork, trials: Trials, again: Bools) -> Floats:
    """[pipelines, stages]: micro-batches for which a stage has memory; below 0 where its state does not fit."""
    table, cuts = trials.table, trials.cuts
    saved = table.saved_bytes[cuts]
    free = network.memory[trials.order] - table.fixed_bytes[cuts] - again * saved
    each = np.where(again, table.column_bytes[cuts], saved) + table.received_bytes[cuts]
    return kernel.held(free, each, float(most_in_flight(problem)))


def _messages(network: FleetNetwork, trials: Trials) -> Iterator[MessageTimes]:
    table, cuts = trials.table, trials.cuts
    for source, target in table.sending:
        there, back = trials.order[:, source], trials.order[:, target]
        forward, backward = table.forward[cuts, source, target], table.backward[cuts, source, target]
        forward_wire_s, backward_wire_s = forward * network.byte_s[there, back], backward * network.byte_s[back, there]
        yield MessageTimes(
            source,
            target,
            forward_s=forward_wire_s + (forward > 0) * network.latency[there, back],
            backward_s=backward_wire_s + (backward > 0) * network.latency[back, there],
            forward_wire_s=forward_wire_s,
            backward_wire_s=backward_wire_s,
            sent=forward > 0,
        )


def _shared(network: FleetNetwork, trials: Trials) -> Iterator[MessageTimes]:
    """Yield the messages of parameters: what two stages share travels as one."""
    table, cuts = trials.table, trials.cuts
    for owner, user in table.sharing:
        there, back = trials.order[:, owner], trials.order[:, user]
        size = table.shared[cuts, owner, user]
        wire_s = size * network.byte_s[there, back]
        back_wire_s = table.shared_gradient[cuts, owner, user] * network.byte_s[back, there]
        yield MessageTimes(
            owner,
            user,
            forward_s=wire_s + network.latency[there, back],
            backward_s=back_wire_s + network.latency[back, there],
            forward_wire_s=wire_s,
            backward_wire_s=back_wire_s,
            sent=size > 0,
        )


def _shared_s(network: FleetNetwork, trials: Trials) -> Floats:
    """[pipelines]: shared parameters, value and gradient, once per step."""
    table, cuts, total = trials.table, trials.cuts, np.zeros(len(trials.cuts))
    for owner, user in table.sharing:
        there, back = trials.order[:, owner], trials.order[:, user]
        latency = network.latency[there, back] + network.latency[back, there]
        total += table.shared_count[cuts, owner, user] * latency
        total += table.shared[cuts, owner, user] * network.byte_s[there, back]
        total += table.shared_gradient[cuts, owner, user] * network.byte_s[back, there]
    return total


def _uplinks_s(network: FleetNetwork, trials: Trials) -> Iterator[Floats]:
    """Per site with a shared uplink: seconds that one micro-batch's bytes occupy it."""
    table, cuts = trials.table, trials.cuts
    for members, bytes_per_s in network.uplinks:
        home, size = members[trials.order], np.zeros(len(cuts))
        for source, target in table.sending:
            size += table.forward[cuts, source, target] * (home[:, source] & ~home[:, target])
            size += table.backward[cuts, source, target] * (home[:, target] & ~home[:, source])
        yield size / bytes_per_s


def rate_of(network: FleetNetwork, order: Ints) -> Floats:
    """[pipelines] money per second of the devices. One that has two stages is paid once."""
    if not network.rate.any():
        return np.zeros(len(order))
    first = np.ones(order.shape, dtype=bool)
    for stage in range(1, order.shape[1]):
        first[:, stage] = (order[:, :stage] != order[:, stage, None]).all(axis=1)
    return np.asarray((network.rate[order] * first).sum(axis=1))


def _price(network: FleetNetwork, trials: Trials) -> Floats:
    table, cuts, total = trials.table, trials.cuts, np.zeros(len(trials.cuts))
    for source, target in table.sending if network.byte_price.any() else ():
        there, back = trials.order[:, source], trials.order[:, target]
        total += table.forward[cuts, source, target] * network.egress[there, back]
        total += table.backward[cuts, source, target] * network.egress[back, there]
    return total
