"""Several replicas on the virtual clock: each a pipeline of its own, then their gradients are averaged."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import make_plan

from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.plans import OuterOptimizer, Plan, ReplicaSync, SyncGroup
from isthmus.protocol import RunSpec
from isthmus.simulator import SimulationOptions, simulate, simulate_run
from isthmus.trace import step_times

LATENCY_S, BANDWIDTH = 0.05, 1e6


def fleet_of(count: int) -> Fleet:
    devices = tuple(Device(name=f"d{i}", region="r", flops_per_s=1e3, memory_bytes=1) for i in range(count))
    return Fleet(name="test", devices=devices, links=Links(default=Link(LATENCY_S, BANDWIDTH)))


def replicated(milliseconds: list[tuple[int, int]], shares: list[int], sync_bytes: int) -> Plan:
    """Equal pipelines on devices of their own; stage s of all averages `sync_bytes`."""
    one, stages = make_plan(milliseconds), len(milliseconds)

    def on_own_devices(number: int, share: int) -> object:
        moved = tuple(
            msgspec.structs.replace(stage, device=f"d{number * stages + s}") for s, stage in enumerate(one.stages)
        )
        return msgspec.structs.replace(one.replica, stages=moved, micro_batches=share)

    return msgspec.structs.replace(
        one,
        micro_batches=sum(shares),
        replicas=tuple(on_own_devices(number, share) for number, share in enumerate(shares)),
        sync=ReplicaSync(
            groups=tuple(
                SyncGroup(devices=tuple(f"d{n * stages + s}" for n in range(len(shares))), size_bytes=sync_bytes)
                for s in range(stages)
            )
        ),
    )


def spec(plan: Plan, steps: int = 3) -> RunSpec:
    return RunSpec(steps=steps, micro_batches=plan.micro_batches, micro_batch_size=1)


def test_replicas_with_nothing_to_average_run_as_if_alone():
    both = replicated([(2, 4), (3, 6)], [4, 4], 0)
    alone = make_plan([(2, 4), (3, 6)], micro_batches=4)
    both = msgspec.structs.replace(both, sync=ReplicaSync())
    together = simulate(both, fleet_of(4), spec(both, steps=1))
    single = simulate(alone, fleet_of(2), spec(alone, steps=1))
    for first in (0, 2):
        names = {f"d{first + s}": f"d{s}" for s in range(2)}
        mine = [
            msgspec.structs.replace(span, device=names[span.device], other=names.get(span.other, ""))
            for span in together.spans
            if span.device in names
        ]
        assert sorted(mine, key=repr) == sorted(single.spans, key=repr)


def test_each_replica_does_its_share_of_the_batch():
    plan = replicated([(2, 4)], [5, 2, 1], 1000)
    trace = simulate(plan, fleet_of(3), spec(plan, steps=2))
    done = {d: sum(s.device == d and s.name == "F" and s.step == 1 for s in trace.spans) for d in ("d0", "d1", "d2")}
    assert done == {"d0": 5, "d1": 2, "d2": 1}


def test_two_replicas_exchange_half_there_and_half_back():
    plan = replicated([(10, 20)], [4, 4], 1_000_000)
    times = step_times(simulate(plan, fleet_of(2), spec(plan)))
    # 4 x 30 ms, then 0.5 MB at 1 MB/s each way, reduced and handed out
    assert times[1] == pytest.approx(0.12 + 2 * (0.5 + LATENCY_S))


def test_nobody_updates_before_the_slowest_replica_is_ready():
    plan = replicated([(10, 20)], [1, 9], 1000)
    trace = simulate(plan, fleet_of(2), spec(plan, steps=1))
    ready_s = max(span.end_s for span in trace.spans if span.name == "B")
    assert all(span.start_s > ready_s for span in trace.spans if span.name == "update")


def test_a_run_of_another_length_than_the_shares_is_refused():
    plan = replicated([(2, 4)], [1, 2], 8)
    with pytest.raises(UserError, match="micro_batches: got 4, expected 3"):
        simulate(plan, fleet_of(2), RunSpec(steps=1, micro_batches=4, micro_batch_size=1))


@given(
    shares=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    elements=st.integers(1, 10**6),
    stages=st.integers(1, 3),
    seed=st.integers(0, 5),
    jitter=st.floats(0, 0.5),
)
def test_every_shard_travels_once_each_way(shares: list[int], elements: int, stages: int, seed: int, jitter: float):
    plan = replicated([(2, 4)] * stages, shares, 4 * elements)
    count = len(shares)
    options = SimulationOptions(seed=seed, jitter=jitter)
    run = simulate_run(plan, fleet_of(stages * count), spec(plan, steps=2), options)
    assert run.finish.outcome == "done"
    sent = [s for s in run.trace.spans if s.track == "send" and s.name == "average"]
    assert len(sent) == 2 * stages * 2 * count * (count - 1)  # steps, stages, reduce and hand out, ordered pairs
    assert sum(s.size_bytes for s in sent) == 2 * stages * 2 * (count - 1) * 4 * elements


class TestDelay:
    """Two replicas, 4 x 30 ms a step, exchange deltas of 0.5 MB at 1 MB/s after every second step."""

    def planned(self, delay: int) -> Plan:
        plan = replicated([(10, 20)], [4, 4], 500_000)
        groups = tuple(msgspec.structs.replace(g, iterations=(1,)) for g in plan.sync.groups)
        sync = ReplicaSync(averages="deltas", period=2, outer=OuterOptimizer(delay=delay), groups=groups)
        return msgspec.structs.replace(plan, sync=sync)

    @pytest.mark.parametrize(
        ("delay", "exposed_s"),
        [(0, 2 * (0.25 + LATENCY_S)), (1, 2 * (0.25 + LATENCY_S) - 0.12), (2, 2 * (0.25 + LATENCY_S) - 0.24)],
    )
    def test_an_exchange_takes_what_the_steps_of_its_delay_do_not_hide(self, delay: int, exposed_s: float):
        plan = self.planned(delay)
        trace = simulate(plan, fleet_of(2), spec(plan, steps=8))
        updates = sorted(s.start_s for s in trace.spans if s.name == "update" and s.device == "d0")
        assert updates[7] - updates[5] == pytest.approx(0.24 + exposed_s)

    @given(
        delay=st.integers(0, 4),
        period=st.integers(1, 4),
        shares=st.lists(st.integers(1, 3), min_size=2, max_size=3),
        seed=st.integers(0, 9),
    )
    def test_any_delay_ends_with_all_sums_made(self, delay: int, period: int, shares: list[int], seed: int):
        plan = replicated([(10, 20), (5, 5)], shares, 4000)
        groups = tuple(msgspec.structs.replace(g, iterations=(n % period,)) for n, g in enumerate(plan.sync.groups))
        sync = ReplicaSync(
            averages="deltas", period=period, outer=OuterOptimizer(delay=min(delay, period)), groups=groups
        )
        plan = msgspec.structs.replace(plan, sync=sync)
        options = SimulationOptions(jitter=0.5, seed=seed)
        wanted = msgspec.structs.replace(spec(plan, steps=3 * period), eval_every=2, eval_micro_batches=1, save_every=2)
        run = simulate_run(plan, fleet_of(2 * len(shares)), wanted, options)
        assert run.finish.outcome == "done"
        sent = [s for s in run.trace.spans if s.track == "send" and s.name == "average"]
        assert len(sent) == 3 * len(groups) * 2 * len(shares) * (len(shares) - 1)
