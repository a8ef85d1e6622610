"""A link that drops in mid-run is avoided, recovers, is tried, and the run asks for another plan."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from isthmus.fleet import Fleet, FleetChange
from isthmus.job import prepare
from isthmus.planners import plan as make_plan
from isthmus.plans import Plan
from isthmus.protocol import adaptation
from isthmus.protocol.run_ports import PlanRequest
from isthmus.runtime.coordinator.plans import Plans
from isthmus.trace import Span

from .jobs import DIGITS, fleet_of, job_of

LINK = ("d0", "d1")
BYTES = 1 << 20


def _spans(step: int, seconds: float) -> Iterator[Span]:
    """Of a step of ten seconds: one message each, from its two ends."""
    for device, track, other in (("d0", "send", "d1"), ("d1", "receive", "d0")):
        yield Span(
            device=device,
            track=track,
            name="forward",
            start_s=10.0 * step,
            end_s=10.0 * step + seconds,
            step=step,  # type: ignore[arg-type]
            micro_batch=0,
            size_bytes=BYTES,
            wire_bytes=BYTES if track == "send" else 0,
            other=other,
        )


def test_plans_are_compared_by_the_simulated_step_where_one_is_given() -> None:
    prepared, fleet = prepare(job_of("mlp", {"layers": 4}, DIGITS, steps=1000)), fleet_of(2, 1e7)
    plan = make_plan("chain", prepared.problem(fleet))
    for steady_s in (None, lambda plan, on: on.link(*LINK).bandwidth_bytes_per_s + len(plan.stages)):
        plans = Plans(prepared, plan, fleet, lambda left: plan, emulate=False, steady_s=steady_s)
        _, figures = plans.make(PlanRequest(("d0", "d1"), must=False, believed=fleet))
        expected_s = plan.predicted.step_s if steady_s is None else steady_s(plan, fleet)
        assert figures.step_s == figures.other_step_s == pytest.approx(expected_s)


def test_a_link_that_recovered_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation, "RETRY_S", 0.0)
    made = job_of("mlp", {"layers": 4}, DIGITS, steps=1000)
    drop, back = FleetChange(step=0, factor=0.1, link=LINK), FleetChange(step=40, factor=1.0, link=LINK)
    runtime = msgspec.structs.replace(made.runtime, emulate=True, changes=(drop, back))
    prepared, fleet = prepare(msgspec.structs.replace(made, runtime=runtime)), fleet_of(2, 1e7)
    stated = fleet.link(*LINK).bandwidth_bytes_per_s
    believed: list[float] = []

    def replan(left: Fleet) -> Plan:
        believed.append(left.link(*LINK).bandwidth_bytes_per_s)
        return make_plan("chain", prepared.problem(left))

    plans = Plans(prepared, replan(fleet), fleet, replan, emulate=True)
    machine = plans.adaptation()

    def made_again() -> int:
        layout, figures = plans.make(PlanRequest(("d0", "d1"), believed=machine.believed))
        machine.made(layout.number, figures, must=True)
        return layout.number

    for step in range(20):
        machine.measured(step, list(_spans(step, 10 * BYTES / stated)))
    assert machine.asks(0.0)
    number = made_again()
    assert believed[-1] == pytest.approx(stated / 10)
    machine.began(number, 20, 0.0)
    assert machine.to_probe(0.0) == LINK
    assert machine.probed(LINK, plans.emulated(LINK, 20), 0.0) == [], "it is slow still"
    for step in range(20, 41):
        machine.measured(step, [])
    assert machine.to_probe(0.0) == LINK
    (note,) = machine.probed(LINK, plans.emulated(LINK, 41), 0.0)
    assert note.startswith("d0 -> d1 carries")
    assert machine.asks(0.0)
    made_again()
    assert believed[-1] == stated
