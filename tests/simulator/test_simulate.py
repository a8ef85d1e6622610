"""Closed forms, and each option's effect."""

from collections import Counter

import pytest
from msgspec import structs
from plans import chain, make_edge, make_fleet, make_plan

from isthmus.errors import UserError
from isthmus.fleet import Fleet, Link, corrected
from isthmus.plans import Plan, SharedParameter
from isthmus.protocol import RunSpec
from isthmus.simulator import Fault, Overheads, SimulationOptions, simulate, simulate_run
from isthmus.trace import Span, Trace, busy_share, link_bytes, steady_step_s, step_times
from isthmus_testing.virtual_runs import period_s


def spec(**fields: int) -> RunSpec:
    return RunSpec(**{"steps": 3, "micro_batches": 6, "micro_batch_size": 1, **fields})


def spans(trace: Trace, name: str, track: str = "compute", device: str = "") -> list[Span]:
    return [s for s in trace.spans if s.name == name and s.track == track and device in ("", s.device)]


def end_s(trace: Trace) -> float:
    return max(span.end_s for span in trace.spans)


def test_one_stage_is_the_sum_of_its_work():
    trace = simulate(make_plan([(100, 200)]), make_fleet(1), spec(), SimulationOptions(update_s=0.5))
    assert step_times(trace) == pytest.approx({0: 2.3, 1: 2.3, 2: 2.3})  # 6 * (0.1 + 0.2) + 0.5
    assert period_s(trace, "d0") == pytest.approx(0.3)
    assert busy_share(trace) == pytest.approx({"d0": 1.0})


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_equal_stages_fill_and_drain(stages: int):
    trace = simulate(make_plan([(100, 200)] * stages), make_fleet(stages), spec())
    assert steady_step_s(trace) == pytest.approx((6 + stages - 1) * 0.3)
    assert busy_share(trace)["d0"] == pytest.approx(6 / (6 + stages - 1))


def test_the_slower_of_two_stages_sets_the_period():
    trace = simulate(make_plan([(100, 100), (300, 300)], micro_batches=20), make_fleet(2), spec(micro_batches=20))
    assert period_s(trace, "d0") == pytest.approx(0.6)
    assert period_s(trace, "d1") == pytest.approx(0.6)
    assert steady_step_s(trace) == pytest.approx(0.1 + 20 * 0.6 + 0.1)


def test_a_slow_link_sets_the_period_to_bytes_over_bandwidth():
    plan = make_plan([(1, 2)] * 2, chain(2, 500_000), in_flight=(8, 8))
    trace = simulate(plan, make_fleet(2, Link(0.01, 1e6)), spec(micro_batches=20))
    assert period_s(trace, "d0") == pytest.approx(0.5)
    assert steady_step_s(trace) == pytest.approx(0.001 + 20 * 0.5 + 0.01 + 0.003 + 0.5 + 0.01 + 0.002)


def test_latency_is_hidden_by_enough_micro_batches_in_flight():
    def trace(latency_s: float, in_flight: int) -> Trace:
        plan = make_plan([(10, 20)] * 4, in_flight=[in_flight] * 4)
        return simulate(plan, make_fleet(4, Link(latency_s, 1e9)), spec(steps=1, micro_batches=160))

    near, far, starved = trace(0, 64), trace(0.2, 64), trace(0.2, 4)
    for device in ("d0", "d3"):
        assert period_s(far, device) == pytest.approx(period_s(near, device), rel=0.03)
        assert period_s(near, device) == pytest.approx(0.03, rel=0.03)
    # Only the fill and the flush pay: six hops.
    assert end_s(far) - end_s(near) == pytest.approx(6 * 0.2, rel=0.03)
    assert end_s(starved) > 4 * end_s(far)


def test_messages_take_their_time_on_the_link():
    plan = make_plan([(100, 100)] * 2, chain(2, 20_000_000), in_flight=(2, 2))
    trace = simulate(plan, make_fleet(2, Link(0.05, 100e6 / 8)), spec(steps=1, micro_batches=2))
    first, second = spans(trace, "forward", "receive", "d1")
    assert first.end_s == pytest.approx(0.1 + 1.65)
    assert second.end_s == pytest.approx(0.1 + 1.65 + 1.6)
    assert (first.start_s, second.start_s) == pytest.approx((0.15, 1.75))
    (sent, *_) = spans(trace, "forward", "send")
    assert (sent.device, sent.other, sent.size_bytes, sent.micro_batch) == ("d0", "d1", 20_000_000, 0)
    assert (sent.start_s, sent.end_s) == pytest.approx((0.1, 1.7))
    assert (first.device, first.other) == ("d1", "d0")


def test_speeds_overheads_and_measured_durations():
    plan, fleet = make_plan([(100, 200)]), make_fleet(1)

    def step_s(on: Fleet = fleet, **fields: object) -> float:
        return steady_step_s(simulate(plan, on, spec(), SimulationOptions(**fields)))

    slower = corrected(fleet, {"d0": 0.5 * fleet.device("d0").flops_per_s}, {})
    assert step_s(slower) == pytest.approx(6 * 0.6)
    assert step_s(overheads=Overheads(tasklet_s=0.01)) == pytest.approx(6 * 0.32)
    assert step_s(durations={(0, "B"): 0.3, (0, "update"): 0.7}, update_s=9) == pytest.approx(6 * 0.4 + 0.7)


def test_headers_and_message_overhead_are_paid_on_the_wire():
    options = SimulationOptions(header_bytes=100, overheads=Overheads(message_s=0.2))
    plan = make_plan([(0, 0)] * 2, chain(2, 400), micro_batches=1)
    trace = simulate(plan, make_fleet(2, Link(0, 1000)), spec(micro_batches=1), options)
    assert steady_step_s(trace) == pytest.approx(2 * (0.5 + 0.2))
    assert {(s.size_bytes, s.wire_bytes) for s in trace.spans if s.track == "send"} == {(400, 500)}


def test_the_bytes_of_every_parcel():
    shared = [
        SharedParameter(name=n, owner=0, users=(0, 2), size_bytes=size, gradient_bytes=size)
        for n, size in (("w", 1000), ("v", 50))
    ]
    edges = [make_edge(0, 1, 10), make_edge(1, 2, 20), make_edge(0, 2, 3, gradients=False)]
    plan = make_plan([(1, 1)] * 3, edges, shared=shared)
    trace = simulate(plan, make_fleet(3), spec(steps=2), SimulationOptions(counts=True, clips=True))
    count, norms = 16, 64
    per_step = {
        ("d0", "d1"): 6 * 10 + norms,
        ("d1", "d0"): 6 * 10 + norms,
        ("d1", "d2"): 6 * 20 + norms,
        ("d2", "d1"): 6 * 20 + norms + count,
        ("d0", "d2"): 6 * 3 + 1050 + norms,
        ("d2", "d0"): 1050 + norms + count,
    }
    assert link_bytes(trace) == {pair: 2 * size for pair, size in per_step.items()}


def test_evaluations_and_checkpoints():
    plan = make_plan([(100, 200)] * 2, chain(2, 10), in_flight=(6, 6))
    run = spec(steps=2, eval_every=1, eval_micro_batches=4)
    options = SimulationOptions(save_s=5, eval_edges={(0, 1): 7}, durations={(0, "E"): 0.05})
    trace = simulate(plan, make_fleet(2), run, options)
    assert Counter(s.step for s in spans(trace, "E", device="d1")) == {1: 4, 2: 4}
    assert {round(s.end_s - s.start_s, 9) for s in spans(trace, "E", device="d0")} == {0.05}
    assert {round(s.end_s - s.start_s, 9) for s in spans(trace, "E", device="d1")} == {0.1}
    assert [(s.step, s.end_s - s.start_s) for s in spans(trace, "save", device="d0")] == [(2, pytest.approx(5))]
    assert link_bytes(trace) == {("d0", "d1"): 2 * (6 * 10 + 4 * 7), ("d1", "d0"): 2 * 6 * 10}


def test_leases_hide_the_coordinators_distance():
    def step_s(lease_ahead: int) -> float:
        run = spec(steps=6, lease_ahead=lease_ahead)
        return steady_step_s(simulate(make_plan([(50, 50)]), make_fleet(1), run, options))

    options = SimulationOptions(control_latency_s=0.2)
    assert step_s(1) == pytest.approx(0.6 + 2 * 0.2)
    assert step_s(2) == pytest.approx(0.6)


def test_times_count_from_the_opening_of_the_first_item():
    trace = simulate(make_plan([(50, 50)]), make_fleet(1), spec(), SimulationOptions(control_latency_s=0.2))
    assert min(s.start_s for s in trace.spans) == pytest.approx(0.2)


def test_a_lost_device_ends_the_run():
    plan, fleet = make_plan([(100, 200)] * 3), make_fleet(3)
    fault = Fault(device="d1", time_s=3.05)
    whole = simulate(plan, fleet, spec())
    run = simulate_run(plan, fleet, spec(), SimulationOptions(faults=(fault,)))
    assert run.finish.outcome == "lost"
    assert "'d1'" in run.finish.reason
    assert run.coordinator.phase == "over"
    assert max(s.end_s for s in run.trace.spans if s.device == "d1") <= 3.05
    assert end_s(run.trace) <= 3.05, "its neighbours stop at once: there is nothing to do without it"
    assert 3.05 < run.seconds < 5
    before = [s for s in whole.spans if s.end_s <= 3.05]
    assert [s for s in run.trace.spans if s.end_s <= 3.05] == before


def test_what_a_lost_device_had_put_on_the_wire_still_arrives_and_nothing_more():
    plan = make_plan([(100, 100), (20, 20)], chain(2, 1000), in_flight=(6, 6))
    fleet = make_fleet(2, Link(0.5, 5000))
    fault = Fault(device="d0", time_s=0.45)
    trace = simulate(plan, fleet, spec(), SimulationOptions(faults=(fault,)))
    # Sent by 0.3, then by 0.5: after the loss.
    assert [(s.micro_batch, s.end_s) for s in spans(trace, "forward", "receive", "d1")] == [(0, pytest.approx(0.8))]
    assert len(spans(trace, "B", device="d1")) == 1
    assert spans(trace, "backward", "receive") == []
    assert len(spans(trace, "backward", "send")) == 1


def test_a_loss_after_the_end_changes_nothing():
    plan, fleet = make_plan([(100, 200)] * 2), make_fleet(2)
    late = SimulationOptions(faults=(Fault(device="d1", time_s=1e6),))
    found = simulate_run(plan, fleet, spec(), late)
    assert structs.replace(found, without_effect=()) == simulate_run(plan, fleet, spec())


def two_on_one_device() -> Plan:
    plan = make_plan([(1, 1)] * 2)
    (replica,) = plan.replicas
    stages = (replica.stages[0], replica.stages[0])
    return structs.replace(plan, replicas=(structs.replace(replica, stages=stages),))


def test_refusals():
    plan, fleet = make_plan([(1, 1)] * 2), make_fleet(2)
    with pytest.raises(UserError, match=r"device in --fault 'd7'"):
        simulate(plan, fleet, spec(), SimulationOptions(faults=(Fault(device="d7", time_s=1),)))
    with pytest.raises(UserError, match="stages 0 and 1 are both on device 'd0'"):
        simulate(two_on_one_device(), fleet, spec())
    with pytest.raises(UserError, match="unknown device 'd1'"):
        simulate(plan, make_fleet(1), spec())
    with pytest.raises(UserError, match="jitter: got -1"):
        SimulationOptions(jitter=-1)
    with pytest.raises(UserError, match="durations: stage 3, F: got nan"):
        SimulationOptions(durations={(3, "F"): float("nan")})
