"""Steps that overlap take n periods: the closed form, and the machines on a virtual clock."""

import pytest
from msgspec.structs import replace
from plans import chain, make_fleet, make_plan, names

from isthmus.cost.limits import MemoryRoom, in_flight_limits
from isthmus.cost.steptime import EdgeTime, PipelineTime, prediction
from isthmus.fleet import Link
from isthmus.plans import Plan, Schedule
from isthmus.protocol import RunSpec
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import steady_step_s, step_times

SIZE = 500_000


class _Asked:
    """What limits need of a problem."""

    schedule = "delayed"

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches


def times_of(stages: int, link: Link) -> PipelineTime:
    wire_s = SIZE / link.bandwidth_bytes_per_s
    hop_s = link.latency_s + wire_s
    edges = tuple(EdgeTime(s, s + 1, hop_s, hop_s, wire_s, wire_s) for s in range(stages - 1))
    return PipelineTime(
        devices=tuple(names(stages)),
        forward_s=(0.1,) * stages,
        backward_s=(0.2,) * stages,
        edges=edges,
        shared_s=0.0,
        steps=2,
    )


def plan_of(stages: int, micro_batches: int, in_flight: tuple[int, ...]) -> Plan:
    plan = make_plan([(100, 200)] * stages, chain(stages, SIZE), micro_batches=micro_batches, in_flight=in_flight)
    delayed = replace(plan.replica, schedule=Schedule("delayed", in_flight))
    return replace(plan, replicas=(delayed,))


@pytest.mark.parametrize(
    ("stages", "micro_batches", "link", "bound"),
    [
        (4, 6, Link(0.0, 1e12), True),
        (4, 6, Link(0.05, 1e12), True),
        (4, 12, Link(0.05, SIZE / 0.6), True),
        (2, 4, Link(0.02, SIZE / 0.1), True),
        (8, 4, Link(0.5, 1e12), False),
    ],
)
def test_no_step_fills_or_drains(stages: int, micro_batches: int, link: Link, bound: bool) -> None:
    """`bound`: a step hides the round trip, so that nothing but the slowest stage or link counts."""
    times = times_of(stages, link)
    rooms = [MemoryRoom(capacity=1, fixed=0, each=0)] * stages
    limits = in_flight_limits(_Asked(micro_batches), times, rooms)  # type: ignore[arg-type]
    trace = simulate(
        plan_of(stages, micro_batches, limits),
        make_fleet(stages, link),
        RunSpec(steps=9, micro_batches=micro_batches, micro_batch_size=1),
        SimulationOptions(clips=True),
    )
    predicted = prediction(times, limits, micro_batches)
    assert trace.period == 2
    if bound:
        assert predicted.step_s == pytest.approx(micro_batches * times.bottleneck[0])
        assert steady_step_s(trace) == pytest.approx(predicted.step_s, rel=0.01)
    else:
        assert predicted.step_s > 1.1 * micro_batches * times.bottleneck[0]
        assert steady_step_s(trace) == pytest.approx(predicted.step_s, rel=0.01)


def test_few_in_flight_throttle_it_and_an_evaluation_waits_for_the_step() -> None:
    limits = (2, 2, 1)
    times = times_of(3, Link(0.0, 1e12))
    options = SimulationOptions(update_s=0.0)
    spec = RunSpec(steps=6, micro_batches=4, micro_batch_size=1, eval_every=3, eval_micro_batches=4)
    trace = simulate(plan_of(3, 4, limits), make_fleet(3, Link(0.0, 1e12)), spec, options)
    assert prediction(times, limits, 4).step_s == pytest.approx(4 * times.round_trips_s[0] / 2)
    assert step_times(trace)[1] == pytest.approx(4 * times.round_trips_s[0] / 2, rel=0.05)
    first_eval_s = min(s.start_s for s in trace.spans if s.name == "E")
    assert first_eval_s >= max(s.end_s for s in trace.spans if s.name == "B" and s.step <= 2 and s.device == "d0")
    train = [s.step for s in sorted(trace.spans, key=lambda s: s.start_s) if s.name == "F" and s.device == "d0"]
    assert train == sorted(train)
