"""The results of a plan and of a run, as frozen values: the source of tables, of pictures and of `--json`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from isthmus.cost import step_price
from isthmus.cost.sync import messages
from isthmus.fleet import Fleet
from isthmus.plans import Certificate, Constraints, Plan, Prediction, Replica, Stage
from isthmus.trace import Span, Trace, busy_share, hidden_share, in_periods, link_bytes, steady_step_s


class UsedLink(NamedTuple):
    """A directed link that the plan uses, by worker id, and its longest message."""

    source: int
    target: int
    size_bytes: float
    seconds: float
    what: str


def link_uses_of(plan: Plan, fleet: Fleet, number: Mapping[str, int]) -> list[UsedLink]:
    """One per directed pair of slots, given each device's; of several messages the slowest."""
    found: dict[tuple[int, int], UsedLink] = {}

    def add(source: str, target: str, size_bytes: float, what: str) -> None:
        if not size_bytes or source == target or source not in number or target not in number:
            return
        pair = number[source], number[target]
        seconds = fleet.link(source, target).transfer_s(size_bytes)
        if pair not in found or seconds > found[pair].seconds:
            found[pair] = UsedLink(*pair, size_bytes, seconds, what)

    for replica in plan.replicas:
        names = [stage.device for stage in replica.workers]
        for edge in replica.worker_edges:
            add(names[edge.source], names[edge.target], edge.forward_bytes, "activations per micro-batch")
            add(names[edge.target], names[edge.source], edge.backward_bytes, "gradients per micro-batch")
        for shared, owner, user in replica.shared_uses:
            add(names[owner], names[user], shared.size_bytes, "a shared parameter per step")
            add(names[user], names[owner], shared.gradient_bytes, "a shared parameter's gradient per step")
    for group in plan.sync.groups:
        for a, b, size_bytes in itertools.chain.from_iterable(messages(group)):
            add(a, b, size_bytes, f"of {plan.sync.averages} that are summed")
    return list(found.values())


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """The message of one stage to another for each micro-batch, and its time: latency + bytes / bandwidth."""

    direction: str  # `forward` (activations) or `backward` (gradients)
    target: str
    size_bytes: int
    duration_s: float


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One stage. FLOPs and seconds are for one micro-batch."""

    replica: int
    device: str
    region: str
    hardware: str  # the device's hardware, for people; empty where the fleet does not name it
    first: int
    last: int
    first_op: str
    last_op: str
    parameter_bytes: int
    flops: int
    forward_s: float
    backward_s: float
    memory_bytes: int
    memory_available_bytes: int
    in_flight: int
    recompute: bool  # whether `backward_s` begins with the forward once more
    sends: tuple[Transfer, ...]
    copy_of: int | None = None
    """The stage of which this is a copy, that does the micro-batches of another holder's data."""


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A plan on its fleet."""

    model: str
    fleet: str
    planner: str
    schedule: str
    micro_batch_size: int
    micro_batches: int
    stages: tuple[StageSummary, ...]
    predicted: Prediction
    price_per_1000_steps: float
    """Devices and egress, in the fleet's unit, for steps as predicted; 0 where nothing has a price."""
    samples_per_s: float  # FusionLLM Eq. 4: the batch over T, of the closed form
    eq4_samples_per_s: float  # the same with T of Eq. 3, as the paper has it
    flops_per_s: float  # the model's FLOPs in a step over T, without what is computed twice
    constraints: Constraints
    certificate: Certificate | None
    notes: tuple[str, ...]

    def as_json(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self)


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the steady steps, 0 to 1, during which a device's compute lane was at work."""

    device: str
    predicted_busy: float
    measured_busy: float
    sends_hidden: float | None = None
    """Share of the time of its sends during which it computed; None where it sent nothing."""
    copies_hidden: float | None = None
    """The same of copies between its accelerator and the host; None where there were none."""


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """Tensor bytes per steady step over one link, and their rate while something was being sent.

    A rate is None where nothing was sent, or in no time.
    """

    source: str
    target: str
    predicted_bytes: int
    measured_bytes: int
    predicted_bytes_per_s: float | None
    measured_bytes_per_s: float | None


class DeviceMemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of all stages of a device."""

    device: str
    stages: tuple[str, ...]  # their numbers; with that of the replica before it, where there are several
    predicted_bytes: int
    peak_bytes: int  # peak of the tensors of an accelerator; on the CPU, the growth of the process
    reserved_bytes: int  # peak of the memory that torch's allocator took from an accelerator; on the CPU, the peak
    resident: bool  # whether they are those of a process on the CPU, which the prediction does not say

    @property
    def excess(self) -> float:
        """Peak over prediction, less 1."""
        return self.peak_bytes / self.predicted_bytes - 1 if self.predicted_bytes else 0.0


class PlanComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One of a run's plans: seconds per step as it predicted, and as was measured while it was in force."""

    devices: tuple[str, ...]
    first_step: int  # the first and the last of its steps, counted from 1
    last_step: int
    measured_step_s: float
    predicted_step_s: float  # the simulator's prediction, on the fleet as it was believed to be when the plan was made
    error: float
    closed_form_step_s: float


class ComparisonSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction and measurement of a run under its last plan. Errors are (predicted - measured) / measured."""

    model: str
    fleet: str
    planner: str
    measured_step_s: float
    predicted_step_s: float  # the simulator's prediction: the same statistic as `measured_step_s`, of its trace
    error: float
    closed_form_step_s: float
    closed_form_error: float
    eq3_step_s: float  # FusionLLM Eq. 3
    eq3_error: float
    devices: tuple[DeviceUse, ...]
    links: tuple[LinkUse, ...]
    plans: tuple[PlanComparison, ...] = ()  # the plans of a run, in order
    memory: tuple[DeviceMemoryUse, ...] = ()
    """Memory of a run's stages under the last of its plans, as far as their devices reported it."""
    too_slow: tuple[str, ...] = ()
    """For each emulated device for which this computer was too slow, how much time was lost."""

    def as_json(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self)


def prediction_error(predicted_s: float, measured_s: float) -> float:
    """Relative error; above 0 where the run was faster than predicted."""
    return (predicted_s - measured_s) / measured_s


def plan_summary(plan: Plan, fleet: Fleet) -> PlanSummary:
    """The plan's stages with what its fleet makes of them. UserError when a device is not in the fleet."""
    predicted = plan.predicted
    flops = sum(r.micro_batches * _model_flops(stage) for r in plan.replicas for stage in r.stages)
    return PlanSummary(
        model=plan.model,
        fleet=plan.fleet,
        planner=plan.planner,
        schedule=plan.replicas[0].schedule.name,
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.micro_batches,
        stages=tuple(
            stage for number, replica in enumerate(plan.replicas) for stage in _stages(number, replica, fleet)
        ),
        predicted=predicted,
        samples_per_s=_rate(plan.batch, predicted.expected_s),
        eq4_samples_per_s=_rate(plan.batch, predicted.eq3_step_s),
        flops_per_s=_rate(flops, predicted.expected_s),
        price_per_1000_steps=1000 * step_price(plan, fleet, predicted.expected_s).total,
        constraints=plan.constraints,
        certificate=plan.certificate,
        notes=plan.notes,
    )


def _model_flops(stage: Stage) -> int:
    """Return the FLOPs of one micro-batch."""
    return stage.flops_backward + (0 if stage.recompute else stage.flops_forward)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _stages(number: int, replica: Replica, fleet: Fleet) -> Iterable[StageSummary]:
    for index, (number_in, stage) in enumerate(zip(replica.stage_of, replica.workers, strict=True)):
        device = fleet.device(stage.device)
        flops_per_s = device.sustained_flops_per_s
        yield StageSummary(
            replica=number,
            device=device.name,
            region=device.region,
            hardware=device.hardware,
            first=stage.first,
            last=stage.last,
            first_op=stage.first_op,
            last_op=stage.last_op,
            parameter_bytes=stage.parameter_bytes,
            flops=stage.flops_forward + stage.flops_backward,
            forward_s=stage.flops_forward / flops_per_s,
            backward_s=stage.flops_backward / flops_per_s,
            memory_bytes=stage.memory.total,
            memory_available_bytes=device.memory_bytes,
            in_flight=replica.schedule.in_flight[number_in],
            recompute=stage.recompute,
            sends=tuple(_sends(index, replica, fleet)),
            copy_of=number_in if index >= len(replica.stages) else None,
        )


def _sends(index: int, replica: Replica, fleet: Fleet) -> Iterable[Transfer]:
    """Activations first. A message of no bytes is not sent, nor one that stays on its device."""
    edges = replica.worker_edges
    there = [("forward", edge.target, edge.forward_wire_bytes) for edge in edges if edge.source == index]
    back = [("backward", edge.source, edge.backward_wire_bytes) for edge in edges if edge.target == index]
    for direction, other, size_bytes in there + back:
        source, target = replica.workers[index].device, replica.workers[other].device
        if size_bytes and source != target:
            link = fleet.link(source, target)
            yield Transfer(
                direction=direction, target=target, size_bytes=size_bytes, duration_s=link.transfer_s(size_bytes)
            )


def comparison_summary(predicted: Trace, measured: Trace, plan: Plan) -> ComparisonSummary:
    """Both traces beside the plan's closed forms. UserError when a trace holds no finished training step."""
    predicted_s, measured_s = steady_step_s(predicted), steady_step_s(measured)
    closed_s, eq3_s = plan.predicted.step_s, plan.predicted.eq3_step_s
    return ComparisonSummary(
        model=plan.model,
        fleet=plan.fleet,
        planner=plan.planner,
        measured_step_s=measured_s,
        predicted_step_s=predicted_s,
        error=prediction_error(predicted_s, measured_s),
        closed_form_step_s=closed_s,
        closed_form_error=prediction_error(closed_s, measured_s),
        eq3_step_s=eq3_s,
        eq3_error=prediction_error(eq3_s, measured_s),
        devices=_devices(_steady(predicted), _steady(measured), plan),
        links=_links(_steady(predicted), _steady(measured), plan),
    )


def _steady(trace: Trace) -> Trace:
    """The trace without its first step, which also warms up, unless it has no other."""
    steps = {span.step for span in trace.spans if span.track == "compute" and span.name == "F"}
    kept = steps - {min(steps)} or steps
    return msgspec.structs.replace(trace, spans=tuple(span for span in trace.spans if span.step in kept))


def _devices(predicted: Trace, measured: Trace, plan: Plan) -> tuple[DeviceUse, ...]:
    before, after = busy_share(predicted), busy_share(measured)
    sends, copies = hidden_share(measured, ("send",)), hidden_share(measured, ("down", "up"))
    order = _device_order(plan)
    names = sorted({*order, *before, *after}, key=lambda name: order.get(name, len(order)))
    return tuple(
        DeviceUse(
            device=name,
            predicted_busy=before.get(name, 0.0),
            measured_busy=after.get(name, 0.0),
            sends_hidden=sends.get(name),
            copies_hidden=copies.get(name),
        )
        for name in names
    )


def _links(predicted: Trace, measured: Trace, plan: Plan) -> tuple[LinkUse, ...]:
    before, after = _bytes_per_step(predicted), _bytes_per_step(measured)
    before_rate, after_rate = _rates(predicted), _rates(measured)
    order = _device_order(plan)
    pairs = sorted({*before, *after}, key=lambda pair: (*(order.get(name, len(order)) for name in pair), pair))
    return tuple(
        LinkUse(
            source=pair[0],
            target=pair[1],
            predicted_bytes=before.get(pair, 0),
            measured_bytes=after.get(pair, 0),
            predicted_bytes_per_s=before_rate.get(pair),
            measured_bytes_per_s=after_rate.get(pair),
        )
        for pair in pairs
    )


def _device_order(plan: Plan) -> dict[str, int]:
    names = (stage.device for replica in plan.replicas for stage in replica.workers)
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _bytes_per_step(trace: Trace) -> dict[tuple[str, str], int]:
    """The mean over a period of averaging, the median of periods: an evaluation between two steps, which also sends,
    does not count."""
    by_step: dict[int, list[Span]] = {}
    for span in trace.spans:
        by_step.setdefault(span.step, []).append(span)
    per_step = [link_bytes(msgspec.structs.replace(trace, spans=tuple(by_step[step]))) for step in sorted(by_step)]
    pairs = dict.fromkeys(pair for step in per_step for pair in step)
    periods = in_periods(per_step, trace.period)
    return {
        pair: statistics.median_low(sum(step.get(pair, 0) for step in steps) // len(steps) for steps in periods)
        for pair in pairs
    }


def _rates(trace: Trace) -> dict[tuple[str, str], float]:
    """Bytes per second on each link while it was sending: messages that overlap share their time."""
    sends: dict[tuple[str, str], list[Span]] = {}
    for span in trace.spans:
        if span.track == "send":
            sends.setdefault((span.device, span.other), []).append(span)
    rates: dict[tuple[str, str], float] = {}
    for pair, spans in sends.items():
        seconds, until = 0.0, float("-inf")
        for span in sorted(spans, key=lambda span: span.start_s):
            seconds += max(0.0, span.end_s - max(span.start_s, until))
            until = max(until, span.end_s)
        if seconds > 0:
            rates[pair] = sum(span.size_bytes for span in spans) / seconds
    return rates
