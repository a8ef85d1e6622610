from __future__ import annotations

import json

import msgspec
import pytest
from synthetic_pipeline import make_fleet, make_plan, play

from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.fleet.fleet import corrected
from isthmus.plans import Plan
from isthmus.report import comparison_summary, plan_summary, prediction_error
from isthmus.trace import Span, Trace, steady_step_s


def test_plan_json(plan: Plan, fleet: Fleet) -> None:
    document = json.loads(plan_summary(plan, fleet).as_json())
    assert document["model"] == "gpt-test"
    assert document["predicted"]["eq3_step_s"] == 1.5
    assert document["certificate"]["question"] == "contiguous partitions"
    assert [stage["device"] for stage in document["stages"]] == list(fleet.names)
    second = document["stages"][1]
    assert second["forward_s"] == pytest.approx(0.03)
    assert second["memory_bytes"] == 116 * 1024**2
    assert second["in_flight"] == 3
    # Activations go on to oslo over 20 ms and 100 Mbit/s, gradients back inside lisbon.
    assert [(s["direction"], s["target"]) for s in second["sends"]] == [("forward", "oslo-2"), ("backward", "lisbon-0")]
    assert second["sends"][0]["duration_s"] == pytest.approx(0.02 + 500_000 / 12.5e6)


def test_measured_speed_scales_compute(plan: Plan, fleet: Fleet) -> None:
    slower = corrected(fleet, {"oslo-2": 0.5 * fleet.device("oslo-2").flops_per_s}, {})
    stages = plan_summary(plan, slower).stages
    assert [stage.backward_s for stage in stages] == pytest.approx([0.06, 0.06, 0.12, 0.06])


def test_no_gradient_means_no_transfer_back(plan: Plan, fleet: Fleet) -> None:
    (replica,) = plan.replicas
    edges = tuple(msgspec.structs.replace(edge, backward_bytes=0) for edge in replica.edges)
    frozen = msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, edges=edges),))
    assert [s.direction for stage in plan_summary(frozen, fleet).stages for s in stage.sends] == ["forward"] * 3


def test_unknown_device(plan: Plan) -> None:
    with pytest.raises(UserError, match="unknown device"):
        plan_summary(plan, make_fleet(2))


def test_comparison_json(predicted: Trace, measured: Trace, plan: Plan) -> None:
    document = json.loads(comparison_summary(predicted, measured, plan).as_json())
    before, after = steady_step_s(predicted), steady_step_s(measured)
    assert document["predicted_step_s"] == before
    assert document["measured_step_s"] == after
    assert document["error"] == pytest.approx((before - after) / after)
    assert document["error"] < 0, "jitter only ever slows the run down"
    assert document["closed_form_step_s"] == 1.13
    assert document["eq3_error"] == pytest.approx((1.5 - after) / after)
    assert {use["device"] for use in document["devices"]} == {stage.device for stage in plan.stages}
    assert all(0 < use["predicted_busy"] < 1 and 0 < use["measured_busy"] < 1 for use in document["devices"])


def test_busy_share_of_the_steady_steps(predicted: Trace, measured: Trace, plan: Plan) -> None:
    (use, *_) = comparison_summary(predicted, measured, plan).devices
    # 8 micro-batches of 90 ms and an update of 30 ms in each step.
    assert use.predicted_busy == pytest.approx(0.75 / steady_step_s(predicted), rel=1e-6)


def test_links(predicted: Trace, measured: Trace, plan: Plan) -> None:
    links = {(use.source, use.target): use for use in comparison_summary(predicted, measured, plan).links}
    assert len(links) == 6
    slow = links["lisbon-1", "oslo-2"]
    assert slow.predicted_bytes == slow.measured_bytes == 8 * 500_000
    assert slow.predicted_bytes_per_s == pytest.approx(12.5e6)
    assert slow.measured_bytes_per_s is not None
    assert 12.5e6 / 1.1 < slow.measured_bytes_per_s < 12.5e6


def test_an_evaluation_changes_neither_bytes_per_step_nor_step_time(plan: Plan, fleet: Fleet) -> None:
    plain = play(plan, fleet, steps=7)
    with_evaluation = play(plan, fleet, steps=7, eval_after=3)
    summary = comparison_summary(plain, with_evaluation, plan)
    assert summary.error == pytest.approx(0, abs=1e-9)
    assert all(use.predicted_bytes == use.measured_bytes for use in summary.links)


def test_rate_where_messages_overlap_and_where_none_took_time(plan: Plan) -> None:
    def send(other: str, start_s: float, end_s: float) -> Span:
        return Span(
            device="lisbon-0",
            track="send",
            name="forward",
            start_s=start_s,
            end_s=end_s,
            step=0,
            size_bytes=1000,
            other=other,
        )

    work = [
        Span(device="lisbon-0", track="compute", name=name, start_s=at, end_s=at + 1, step=0)
        for name, at in (("F", 0.0), ("update", 9.0))
    ]
    sends = [send("lisbon-1", 0, 2), send("lisbon-1", 1, 3), send("lisbon-1", 5, 6), send("oslo-2", 1, 1)]
    trace = Trace(source="runtime", run="overlap", spans=(*work, *sends))
    one, other = comparison_summary(trace, trace, plan).links
    assert one.measured_bytes_per_s == pytest.approx(3000 / 4)
    assert (other.target, other.measured_bytes_per_s) == ("oslo-2", None)


def test_error_is_relative_to_what_was_measured() -> None:
    assert prediction_error(0.9, 1.0) == pytest.approx(-0.1)
    assert prediction_error(3.0, 2.0) == pytest.approx(0.5)


def test_no_finished_step(plan: Plan, predicted: Trace) -> None:
    with pytest.raises(UserError, match="no training step"):
        comparison_summary(predicted, Trace(source="runtime", run="none", spans=()), plan)


def test_two_replicas(fleet: Fleet) -> None:
    half = make_plan(fleet.thin(2), 4)
    (first,) = half.replicas
    others = tuple(
        msgspec.structs.replace(stage, device=name)
        for stage, name in zip(first.stages, [n for n in fleet.names if n not in fleet.thin(2).names], strict=True)
    )
    both = msgspec.structs.replace(half, replicas=(first, msgspec.structs.replace(first, stages=others)))
    stages = plan_summary(both, fleet).stages
    assert [stage.replica for stage in stages] == [0, 0, 1, 1]
    assert stages[2].sends[0].target == stages[3].device
