"""The closed form, memory and limits on two small pipelines that can be computed by hand."""

from __future__ import annotations

import msgspec
import pytest

from isthmus.cost import (
    EdgeTime,
    MemoryRoom,
    ParameterState,
    PipelineTime,
    Problem,
    build_plan,
    in_flight_limits,
    parameter_state,
    place,
    step_price,
)
from isthmus.cost.steptime import FedPipeline, prediction
from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import Device, Fleet, Link, Links, Region, Route, corrected
from isthmus.graph import Affine, Flow, Op, OpGraph, Ref, TensorSpec


def values(count: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(dtype, (Affine(1), count), (count, 1))


def weight(name: str, count: int, *, trained: bool = True, dtype: str = "float32") -> Op:
    return Op(
        name=name, kind="parameter", target=name, outputs=(TensorSpec(dtype, (count,), (1,)),), requires_grad=(trained,)
    )


def operator(name: str, *args: str, flops: int, saved: int, width: int, trained: bool = True) -> Op:
    return Op(
        name=name,
        kind="operator",
        target="aten.test.default",
        args=tuple(Ref(a) for a in args),
        outputs=(values(width),),
        requires_grad=(trained,),
        flops_forward=Affine(flops),
        flops_backward=Affine(2 * flops),
        saved_bytes=Affine(saved),
        module=f"layer.{name}",
    )


def skipping_graph(dtype: str = "float32") -> OpGraph:
    """a -> b -> c, a also feeds c; `tied` is used by a and c; `mask` is free; `index` carries no gradient."""
    ops = (
        Op(name="x", kind="placeholder", target="x", outputs=(values(1, "int64"),), requires_grad=(False,)),
        weight("tied", 10, dtype=dtype),
        weight("frozen", 100, trained=False, dtype=dtype),
        Op(
            name="mask",
            kind="operator",
            target="aten.ones.default",
            outputs=(TensorSpec("float32", (3,), (1,)),),
            requires_grad=(False,),
            flops_forward=Affine(0, 10**9),
            saved_bytes=Affine(0, 10**9),
        ),
        operator("a", "x", "tied", flops=100, saved=8, width=4),
        operator("index", "x", flops=0, saved=0, width=2, trained=False),
        operator("b", "a", "frozen", "mask", flops=200, saved=16, width=2),
        operator("c", "b", "a", "index", "tied", "mask", flops=300, saved=24, width=1),
    )
    return OpGraph(name="skip", mode="train", ops=ops, loss=Ref("c"))


def three_devices(memory: int = 1 << 30) -> Fleet:
    devices = tuple(
        Device(name=n, region="here", flops_per_s=s, memory_bytes=memory)
        for n, s in (("p", 100.0), ("q", 200.0), ("r", 300.0))
    )
    links = {
        ("p", "q"): Link(0.5, 16.0),
        ("q", "p"): Link(0.25, 32.0),
        ("p", "r"): Link(1.0, 8.0),
        ("r", "p"): Link(0.75, 64.0),
        ("q", "r"): Link(0.1, 4.0),
        ("r", "q"): Link(0.2, 8.0),
    }
    routes = tuple(Route(a, b, link) for (a, b), link in links.items())
    return Fleet(name="three", devices=devices, links=Links(devices=routes))


def problem(fleet: Fleet | None = None, **more: object) -> Problem:
    fields = {"micro_batch_size": 2, "micro_batches": 4, **more}
    return Problem(flow=Flow(skipping_graph()), fleet=fleet or three_devices(), **fields)  # type: ignore[arg-type]


def much_faster(fleet: Fleet) -> Fleet:
    return corrected(fleet, {d.name: 100 * d.flops_per_s for d in fleet.devices}, {})


def test_edges_carry_each_value_straight_to_its_user_and_gradients_where_due() -> None:
    placed = place(problem(), ["p", "q", "r"], [2, 3])
    edges = [(e.source, e.target, e.values, e.gradients, e.forward_bytes, e.backward_bytes) for e in placed.edges]
    assert edges == [
        (0, 1, ("a",), ("a",), 32, 32),
        (0, 2, ("a", "index"), ("a",), 48, 32),
        (1, 2, ("b",), ("b",), 16, 16),
    ]
    assert [(s.name, s.owner, s.users, s.size_bytes) for s in placed.shared] == [("tied", 0, (2,), 40)]


def test_the_closed_form_is_fill_plus_periods_plus_shared() -> None:
    times = place(problem(), ["p", "q", "r"], [2, 3]).times
    compute = (6.0, 6.0, 6.0)  # 2 samples x 3 (forward and backward) x FLOPs / speed; the free mask is not charged
    assert times.compute_s == pytest.approx(compute)
    forward = (0.5 + 32 / 16) + (1.0 + 48 / 8) + (0.1 + 16 / 4)
    backward = (0.25 + 32 / 32) + (0.75 + 32 / 64) + (0.2 + 16 / 8)
    assert times.fill_s == pytest.approx(18 + forward + backward)
    assert times.bottleneck == (pytest.approx(6.0), "device p")
    shared = (1.0 + 40 / 8) + (0.75 + 40 / 64)
    assert times.shared_s == pytest.approx(shared)
    assert times.step_s(4) == pytest.approx(18 + forward + backward + 3 * 6 + shared)


def test_a_links_bytes_count_in_the_period_but_its_latency_does_not() -> None:
    times = place(problem(much_faster(three_devices())), ["p", "q", "r"], [2, 3]).times
    assert times.bottleneck == (pytest.approx(48 / 8), "link p -> r")


def test_eq3_counts_all_receives_of_a_stage_with_latency() -> None:
    times = place(problem(), ["p", "q", "r"], [2, 3]).times
    receive_q = (0.5 + 2) + (0.25 + 1)
    receive_r = (1 + 6) + (0.75 + 0.5) + (0.1 + 4) + (0.2 + 2)
    assert times.eq3_step_s(4) == pytest.approx(18 + receive_q + receive_r + 3 * receive_r)


def test_the_round_trip_is_the_longest_path_not_the_sum() -> None:
    edges = (EdgeTime(0, 1, 1.0, 1.0, 0.0, 0.0), EdgeTime(0, 2, 5.0, 0.0, 0.0, 0.0), EdgeTime(1, 2, 1.0, 2.0, 0.0, 0.0))
    times = PipelineTime(devices=("a", "b", "c"), forward_s=(1, 1, 1), backward_s=(2, 2, 2), edges=edges, shared_s=0)
    # F0 ends at 1; F1 2..3; F2 waits for a at 6, ends at 7, B2 9; gradient to 1 at 11, B1 13; to 0 at 14, B0 16
    assert times.round_trips_s == (16, 9, 3)
    assert times.throttled_period_s((2, 8, 8), 100) == 8
    assert times.throttled_period_s((2, 8, 8), 2) == 3  # all micro-batches in flight: nothing to wait for


def test_the_last_stage_is_not_held_up_by_its_limit_where_holders_parts_add_up_to_less_than_one() -> None:
    way = PipelineTime(devices=("a", "z"), forward_s=(0.1, 0.5), backward_s=(0.1, 0.5), edges=(), shared_s=0)
    times = FedPipeline(
        devices=way.devices,
        forward_s=way.forward_s,
        backward_s=way.backward_s,
        edges=(),
        shared_s=0,
        ways=(way, way, way),
        shares=(1 / 6, 4 / 6, 1 / 6),
        copied=frozenset({0}),
    )
    assert times.bottleneck[0] < times.round_trips_s[1]
    assert prediction(times, (6, 1), 6).bottleneck == "device z"


def test_1f1b_holds_what_hides_the_round_trip_as_far_as_memory_goes() -> None:
    edges = (EdgeTime(0, 1, 10.0, 10.0, 0.0, 0.0),)
    times = PipelineTime(devices=("a", "b"), forward_s=(1, 1), backward_s=(1, 1), edges=edges, shared_s=0)
    assert times.round_trips_s == (24, 2)
    for batches, memory, expected in (
        (100, (99, 99), (13, 1)),
        (6, (99, 99), (6, 1)),
        (100, (4, 1), (4, 1)),
        (1, (9, 9), (1, 1)),
    ):
        rooms = [MemoryRoom(capacity=most, fixed=0, each=1) for most in memory]
        assert in_flight_limits(problem(micro_batches=batches), times, rooms) == expected
    gpipe = problem(micro_batches=7, schedule="gpipe")
    assert in_flight_limits(gpipe, times, [MemoryRoom(1, 0, 1)] * 2) == (7, 7)


def test_memory_counts_owner_user_frozen_and_received() -> None:
    state = parameter_state("adamw")
    made = build_plan(problem(state=state, micro_batches=1), ["p", "q", "r"], [2, 3], planner="test")
    memories = [(s.memory.weights, s.memory.gradients, s.memory.optimizer, s.memory.activations) for s in made.stages]
    assert memories == [
        (40, 40, 80, 2 * 8),
        (400, 0, 0, 2 * 16 + 32),
        (40, 40, 0, 2 * 24 + 48 + 16),  # borrows `tied`: value and gradient, no optimizer state
    ]
    assert [s.parameter_bytes for s in made.stages] == [40, 400, 40]


def test_parameter_state_per_optimizer_and_precision() -> None:
    assert parameter_state("sgd") == ParameterState(master_bytes=0, gradient_bytes=4, optimizer_bytes=0)
    assert parameter_state("SGD", momentum=True).optimizer_bytes == 4
    assert parameter_state("adamw").optimizer_bytes == 8
    assert parameter_state("adamw", narrow=True) == ParameterState(master_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    with pytest.raises(UserError, match="unknown optimizer 'adamv': did you mean"):
        parameter_state("adamv")


def test_bfloat16_keeps_a_master_copy_where_the_parameter_is_owned() -> None:
    half = Problem(
        flow=Flow(skipping_graph("bfloat16")),
        fleet=three_devices(),
        micro_batch_size=2,
        micro_batches=1,
        state=parameter_state("adamw", narrow=True),
    )
    owner, _, user = build_plan(half, ["p", "q", "r"], [2, 3], planner="test").stages
    assert (owner.memory.weights, owner.memory.gradients, owner.memory.optimizer) == (10 * (2 + 4), 40, 80)
    assert (user.memory.weights, user.memory.gradients, user.memory.optimizer) == (20, 40, 0)


def test_what_does_not_fit_is_named_with_the_missing_bytes() -> None:
    message = "stage 1 on device q needs 464 B with 1 micro-batches in flight, offers 400 B: 64 B short"
    with pytest.raises(FleetTooSmall, match=message):
        build_plan(problem(three_devices(400)), ["p", "q", "r"], [2, 3], planner="test")


def test_memory_for_fewer_micro_batches_throttles_the_prediction() -> None:
    roomy = build_plan(problem(micro_batches=9), ["p", "q", "r"], [2, 3], planner="test")
    keeping = problem(three_devices(530), micro_batches=9, recompute=False)
    tight = build_plan(keeping, ["p", "q", "r"], [2, 3], planner="test")
    assert roomy.replica.schedule.in_flight[1] > tight.replica.schedule.in_flight[1] == 2
    assert tight.predicted.bottleneck == "memory of device q (2 micro-batches in flight)"
    gained = tight.predicted.step_s - roomy.predicted.step_s
    assert gained == pytest.approx(8 * (tight.predicted.period_s - roomy.predicted.period_s))


def test_notes_say_what_each_device_does() -> None:
    made = build_plan(problem(), ["r", "p"], [3], planner="test", notes={"q": "it is resting"})
    assert made.notes == (
        "p runs operators 3..3 (layer.c), 50.0% of the FLOPs at 100 FLOPS, 18 s per micro-batch",
        "q is left out: it is resting",
        "r runs operators 0..2 (layer.a .. layer.b), 50.0% of the FLOPs at 300 FLOPS, 6 s per micro-batch",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batches": 0}, "micro_batches: got 0, expected at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size: got 0"),
        ({"schedule": "2f2b"}, "unknown schedule '2f2b'"),
    ],
)
def test_a_wrong_problem_is_the_users_error(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        problem(**fields)


def test_an_order_must_match_the_cuts_and_name_each_device_once() -> None:
    with pytest.raises(UserError, match="got 1 devices for 2 stages"):
        place(problem(), ["p"], [2])
    with pytest.raises(UserError, match="no two neighbours on the same device"):
        place(problem(), ["p", "p"], [2])


def sites(*found: Region) -> Fleet:
    """The three devices in two regions: p alone, q and r together."""
    fleet = three_devices()
    p, q, r = fleet.devices
    devices = (
        msgspec.structs.replace(p, region="away", price_per_hour=36.0),
        q,
        msgspec.structs.replace(r, price_per_hour=7.2),
    )
    return msgspec.structs.replace(fleet, devices=devices, region_info=found)


def test_links_that_leave_a_site_share_its_uplink() -> None:
    fleet = sites(Region(region="away", uplink_bytes_per_s=7.0))
    times = place(problem(much_faster(fleet)), ["p", "q", "r"], [2, 3]).times
    # p sends 32 bytes to q and 48 to r; neither link alone is faster than the uplink.
    assert times.bottleneck == (pytest.approx((32 + 48) / 7), "uplink of away")
    assert times.edges[1].forward_wire_s == pytest.approx(48 / 7)
    # What stays inside the other site, and what comes back to p, does not take p's uplink.
    assert dict(times.uplinks_s) == {"away": pytest.approx(80 / 7)}


def test_a_step_is_paid_by_the_hour_and_by_the_bytes_that_leave_a_site() -> None:
    fleet = sites(Region(region="away", egress_price_per_gb=2e6), Region(region="here", egress_price_per_gb=1e6))
    plan = build_plan(problem(fleet), ["p", "q", "r"], [2, 3], planner="hand")
    price = step_price(plan, fleet, step_s=100.0)
    assert price.devices == pytest.approx(43.2 * 100 / 3600)
    forward, backward, shared = 4 * (32 + 48), 4 * (32 + 32), 40  # bytes of a step from p and to p; `tied` each way
    assert price.egress == pytest.approx(((forward + shared) * 2e6 + (backward + shared) * 1e6) / 1e9)
    assert price.total == price.devices + price.egress
    assert step_price(plan, fleet).devices == pytest.approx(43.2 * plan.predicted.step_s / 3600)
