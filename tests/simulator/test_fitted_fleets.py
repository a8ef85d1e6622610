"""What a run's first steps say of its fleet: the factors that were put in come out."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import chain, make_fleet, make_plan

from isthmus.fleet import Fleet, Link, dump_fleet, parse_fleet
from isthmus.fleet.fleet import corrected
from isthmus.plans import Plan, PlanPeriod
from isthmus.protocol import RunSpec
from isthmus.protocol.drift import LEAST_BYTES, differs, fit_fleet
from isthmus.simulator import simulate
from isthmus.trace import Span, steady_step_s

STEPS = 8
STATED = make_fleet(3, Link(0.01, 10 * LEAST_BYTES))
factors = st.floats(0.05, 3.0)


def _plan(*milliseconds: tuple[int, int]) -> Plan:
    return make_plan(milliseconds, chain(len(milliseconds), 2 * LEAST_BYTES), micro_batches=3)


def _spec(first: int = 0, steps: int = STEPS) -> RunSpec:
    return RunSpec(steps=steps, micro_batches=3, micro_batch_size=1, start_step=first)


def _real(scales: dict[str, float], links: dict[tuple[str, str], float]) -> Fleet:
    speeds = {name: STATED.device(name).flops_per_s * scale for name, scale in scales.items()}
    return corrected(STATED, speeds, {p: STATED.link(*p).bandwidth_bytes_per_s * f for p, f in links.items()})


def _ran(plan: Plan, real: Fleet, first: int = 0, steps: int = STEPS, since_s: float = 0.0) -> list[Span]:
    spans = simulate(plan, real, _spec(first, steps)).spans
    return [msgspec.structs.replace(s, start_s=s.start_s + since_s, end_s=s.end_s + since_s) for s in spans]


@settings(max_examples=25)
@given(st.tuples(factors, factors, factors), st.sampled_from([0.2, 0.5, 1.0, 2.0]), st.randoms())
def test_factors_come_back(scales: tuple[float, float, float], link: float, order: random.Random) -> None:
    plan = _plan((20, 40), (30, 50), (10, 30))
    real = _real({f"d{k}": scale for k, scale in enumerate(scales)}, {("d0", "d1"): link})
    spans = _ran(plan, real)
    order.shuffle(spans)
    fitted = fit_fleet(STATED, [PlanPeriod(plan=plan, fleet=STATED, first_step=0)], spans)
    assert fitted is not None
    assert [d.scale for d in fitted.devices] == pytest.approx(scales, rel=1e-3)
    assert [d.flops_per_s for d in fitted.devices] == [d.flops_per_s for d in STATED.devices], "as stated"
    assert fitted.link("d0", "d1").bandwidth_bytes_per_s == pytest.approx(
        real.link("d0", "d1").bandwidth_bytes_per_s, rel=1e-3
    )
    assert fitted.link("d1", "d2") == STATED.link("d1", "d2")


# No ties: where two tasklets are ready at the same time, four digits decide which comes first.
@pytest.mark.parametrize("scales", [(0.31, 0.83, 0.457), (1.7, 0.219, 0.93), (0.053, 0.071, 0.0617)])
@pytest.mark.parametrize("link", [0.23, 1.0, 2.1])
def test_what_is_written_predicts_the_run(scales: tuple[float, float, float], link: float) -> None:
    plan = _plan((20, 40), (30, 50), (10, 30))
    real = _real({f"d{k}": scale for k, scale in enumerate(scales)}, {("d0", "d1"): link})
    fitted = fit_fleet(STATED, [PlanPeriod(plan=plan, fleet=STATED, first_step=0)], _ran(plan, real))
    assert fitted is not None
    written = parse_fleet(dump_fleet(fitted), "fitted")
    measured_s, stated_s, fitted_s = (steady_step_s(simulate(plan, f, _spec())) for f in (real, STATED, written))
    assert fitted_s == pytest.approx(measured_s, rel=0.005)
    assert abs(stated_s - measured_s) > 0.05 * measured_s


def test_every_plan_of_a_run_counts_and_steps_that_were_done_again_count_once() -> None:
    """The second plan goes on from step 4 on a device that the first did not use; steps 4 to 7 under the first one
    were lost."""
    real = _real({"d0": 0.5, "d1": 0.25, "d2": 0.1}, {})
    first, second = _plan((20, 40), (30, 50)), _plan((10, 20), (10, 20), (10, 20))
    wrong = _real({"d0": 0.01, "d1": 0.01}, {})
    spans = _ran(first, real, steps=4) + [s for s in _ran(first, wrong) if s.step >= 4]
    since_s = max(s.end_s for s in spans)
    spans += _ran(second, real, first=4, since_s=since_s)
    periods = [
        PlanPeriod(plan=first, fleet=STATED, first_step=0),
        PlanPeriod(plan=second, fleet=STATED, first_step=4, since_s=since_s),
    ]
    fitted = fit_fleet(STATED, periods, spans)
    assert fitted is not None
    assert [d.scale for d in fitted.devices] == pytest.approx([0.5, 0.25, 0.1], rel=1e-3)


def test_a_run_of_one_step_says_nothing() -> None:
    plan = _plan((20, 40), (30, 50))
    period = PlanPeriod(plan=plan, fleet=STATED, first_step=0)
    assert fit_fleet(STATED, [period], _ran(plan, STATED, steps=1)) is None
    assert fit_fleet(STATED, [period], []) is None


@pytest.mark.parametrize(
    ("scales", "links", "expected"),
    [
        ({"d0": 0.9}, {}, False),
        ({"d0": 0.7}, {}, True),
        ({}, {("d0", "d1"): 0.9}, False),
        ({}, {("d0", "d1"): 2.0}, True),
    ],
)
def test_whether_another_plan_may_be_better(
    scales: dict[str, float], links: dict[tuple[str, str], float], expected: bool
) -> None:
    assert differs(STATED, _real(scales, links)) == expected
