"""Two stages of a replica on one device: they share its lane, and what they exchange crosses no link."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import chain, make_edge, make_fleet, make_plan

from isthmus.errors import UserError
from isthmus.fleet import Link
from isthmus.plans import Plan, ReplicaSync, SharedParameter, SyncGroup
from isthmus.protocol import RunSpec
from isthmus.simulator import Fault, SimulationOptions, simulate, simulate_run
from isthmus.trace import Trace, step_times


def there_and_back(
    milliseconds: list[tuple[int, int]], *, micro_batches: int = 6, in_flight: list[int] | str = "1f1b"
) -> Plan:
    """The last stage is on the device of the first, which also sends it something."""
    count = len(milliseconds)
    edges = (*chain(count), make_edge(0, count - 1, gradients=False)) if count > 2 else chain(count)
    lent = [SharedParameter(name="w", owner=0, users=(count - 1,), size_bytes=100, gradient_bytes=100)]
    plan = make_plan(milliseconds, edges, micro_batches=micro_batches, in_flight=in_flight, shared=lent)
    (replica,) = plan.replicas
    stages = (*replica.stages[:-1], msgspec.structs.replace(replica.stages[-1], device=replica.stages[0].device))
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=stages),))


def spec(plan: Plan, steps: int = 2) -> RunSpec:
    return RunSpec(steps=steps, micro_batches=plan.micro_batches, micro_batch_size=1)


def computing(trace: Trace, device: str) -> list[tuple[float, float]]:
    return sorted((s.start_s, s.end_s) for s in trace.spans if s.device == device and s.track == "compute")


def test_the_period_is_that_of_both_stages_together():
    plan = there_and_back([(2, 4), (3, 5), (1, 2)], micro_batches=40, in_flight=[8, 6, 4])
    step_s = step_times(simulate(plan, make_fleet(3), spec(plan)))[1]
    # d0 computes 9 ms of each micro-batch and is never idle but at the ends.
    assert 40 * 0.009 <= step_s <= 40 * 0.009 + 0.03


def test_what_stays_on_the_device_crosses_no_link():
    plan = there_and_back([(2, 4), (3, 5), (1, 2)])
    trace = simulate(plan, make_fleet(3, Link(0.5, 1e3)), spec(plan))
    sent = {(s.device, s.other) for s in trace.spans if s.track == "send"}
    assert sent == {("d0", "d1"), ("d1", "d0")}


@given(
    durations=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=3, max_size=4),
    micro_batches=st.integers(1, 7),
    seed=st.integers(0, 3),
    jitter=st.sampled_from([0.0, 0.4]),
    limits=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
def test_a_device_does_one_thing_at_a_time_and_everything_once(
    durations: list[tuple[int, int]], micro_batches: int, seed: int, jitter: float, limits: list[int]
):
    plan = there_and_back(durations, micro_batches=micro_batches, in_flight=limits[: len(durations)])
    options = SimulationOptions(seed=seed, jitter=jitter, clips=True, update_s=0.001)
    run = simulate_run(plan, make_fleet(len(durations), Link(0.003, 1e4)), spec(plan), options)
    assert run.finish.outcome == "done"
    assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(computing(run.trace, "d0")))
    for name in ("F", "B"):
        done = [s for s in run.trace.spans if s.name == name and s.track == "compute" and s.device == "d0"]
        assert len(done) == 2 * 2 * micro_batches  # steps, stages


def test_a_device_of_two_stages_takes_part_in_a_sum_once():
    one = there_and_back([(2, 4), (3, 5), (1, 2)], micro_batches=2)
    (replica,) = one.replicas
    others = [f"d{k}" for k in (2, 3, 2)]
    other = msgspec.structs.replace(
        replica,
        stages=tuple(
            msgspec.structs.replace(stage, device=device) for stage, device in zip(replica.stages, others, strict=True)
        ),
    )
    groups = (SyncGroup(devices=("d0", "d2"), size_bytes=1000), SyncGroup(devices=("d1", "d3"), size_bytes=1000))
    plan = msgspec.structs.replace(one, replicas=(replica, other), sync=ReplicaSync(groups=groups), micro_batches=4)
    run = simulate_run(plan, make_fleet(4, Link(0.001, 1e5)), spec(plan))
    assert run.finish.outcome == "done"
    sent = [s for s in run.trace.spans if s.track == "send" and s.name == "average"]
    assert len(sent) == 2 * 2 * 2 * 2  # steps, groups, reduce and hand out, directions


def interleaved(devices: int, passes: int, micro_batches: int) -> Plan:
    """Each device has `passes` stages. Together they take 8 ms forward, 16 ms backward."""
    plan = make_plan([(8 // passes, 16 // passes)] * (devices * passes), micro_batches=micro_batches)
    (replica,) = plan.replicas
    stages = tuple(msgspec.structs.replace(s, device=f"d{k % devices}") for k, s in enumerate(replica.stages))
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=stages),))


@pytest.mark.parametrize("passes", [1, 2, 4, 8])
def test_interleaved_stages_shorten_the_fill(passes: int):
    """As in Megatron-LM's interleaved schedule: devices are idle for (p - 1) / v micro-batches."""
    devices = micro_batches = 2
    plan = interleaved(devices, passes, micro_batches)
    step_s = step_times(simulate(plan, make_fleet(devices), spec(plan)))[1]
    assert step_s == pytest.approx(0.024 * (micro_batches + (devices - 1) / passes))


def test_losing_the_device_loses_both_stages():
    plan = there_and_back([(2, 4), (3, 5), (1, 2)])
    options = SimulationOptions(faults=(Fault(device="d0", time_s=0.01),))
    run = simulate_run(plan, make_fleet(3), spec(plan), options)
    assert run.finish.outcome == "lost" and "d0" in run.finish.reason


def test_neighbours_on_one_device_are_one_stage():
    plan = there_and_back([(2, 4), (3, 5)])
    with pytest.raises(UserError, match="no neighbours"):
        simulate(plan, make_fleet(2), spec(plan))
