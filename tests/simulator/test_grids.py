"""The schedules, as drawings: one row per stage, one column per unit of time."""

import re

import pytest
from plans import make_fleet, make_plan, names

from isthmus.fleet import Link
from isthmus.plans import schedule
from isthmus.protocol import RunSpec
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import Trace

UNIT_MS = 1000
EPSILON = Link(1e-6, 1e30)
"""Just enough latency that what is computed here is known before what is computed elsewhere."""

GPIPE = """
    stage 0  F0 F1 F2 F3 .  .  B0 B1 .  B2 .  B3
    stage 1     F0 F1 F2 F3 B0 B1 .  B2 .  B3
    stage 2        F0 B0 F1 B1 F2 B2 F3 B3
"""
ONE_IN_FLIGHT = """
    stage 0  F0 .  .  B0 F1 .  .  B1
    stage 1     F0 B0       F1 B1
"""
LONG_BACKWARD = """
    stage 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
    stage 1     F0 B0 B0 F1 B1 B1 F2 B2 B2
"""

ZERO_BUBBLE = """
    stage 0  F0 F1 F2 .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    stage 1     F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 .  B3 W3
    stage 2        F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3
"""


def rows(drawing: str) -> list[list[str]]:
    """The cells of each row that starts with `stage`; an idle cell is empty whether it is drawn as a dot or not."""
    lines = re.findall(r"^ *stage \d  (.*)$", drawing, re.MULTILINE)
    cells = [[line[k : k + 3].strip(" .") for k in range(0, len(line), 3)] for line in lines]
    return [row[: max(k for k, cell in enumerate(row) if cell) + 1] for row in cells]


def grid(trace: Trace, stages: int) -> list[list[str]]:
    table: list[list[str]] = []
    for device in names(stages):
        cells: dict[int, str] = {}
        for span in trace.spans:
            if span.device == device and span.name in ("F", "B", "W"):
                for column in range(round(span.start_s), round(span.end_s)):
                    assert column not in cells, "the compute lane does one thing at a time"
                    cells[column] = f"{span.name}{span.micro_batch}"
        table.append([cells.get(column, "") for column in range(max(cells) + 1)])
    return table


@pytest.mark.parametrize("seed", range(4))
def test_1f1b_is_as_drawn_in_the_schedules_documentation(seed: int):
    """Whichever of simultaneous events comes first."""
    plan = make_plan([(UNIT_MS, UNIT_MS)] * 4, micro_batches=6, in_flight="1f1b")
    trace = simulate(plan, make_fleet(4), spec(6), SimulationOptions(seed=seed))
    assert grid(trace, 4) == rows(schedule.__doc__ or "")[:4]


def test_gpipe_keeps_all_micro_batches_and_still_prefers_backward():
    plan = make_plan([(UNIT_MS, UNIT_MS)] * 3, micro_batches=4, in_flight="gpipe")
    assert grid(simulate(plan, make_fleet(3, EPSILON), spec(4)), 3) == rows(GPIPE)


def test_one_micro_batch_in_flight_is_no_pipeline():
    plan = make_plan([(UNIT_MS, UNIT_MS)] * 2, in_flight=(1, 1))
    assert grid(simulate(plan, make_fleet(2), spec(2)), 2) == rows(ONE_IN_FLIGHT)


def test_backward_takes_twice_as_long():
    plan = make_plan([(UNIT_MS, 2 * UNIT_MS)] * 2, in_flight="1f1b")
    assert grid(simulate(plan, make_fleet(2), spec(3)), 2) == rows(LONG_BACKWARD)


def test_weight_gradients_wait_until_nothing_else_is_ready():
    """Within the limits of 1F1B: a micro-batch is held until its W is done. The first stage returns no gradient."""
    plan = make_plan([(UNIT_MS, 2 * UNIT_MS)] * 3, micro_batches=4, weights=[0, UNIT_MS, UNIT_MS])
    assert grid(simulate(plan, make_fleet(3), spec(4)), 3) == rows(ZERO_BUBBLE)
    whole = make_plan([(UNIT_MS, 2 * UNIT_MS)] * 3, micro_batches=4)
    assert max(map(len, grid(simulate(whole, make_fleet(3), spec(4)), 3))) > len(rows(ZERO_BUBBLE)[0])


def spec(micro_batches: int) -> RunSpec:
    return RunSpec(steps=1, micro_batches=micro_batches, micro_batch_size=1)
