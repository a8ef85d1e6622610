"""What `verify` reads from a captured model is what the cuts and the cost model say of it: ties, buffers that are
written, counted losses, views, and operators without a position."""

from __future__ import annotations

import random

import pytest
from in_process import capture_of, random_cut
from zoo import model

from isthmus.cost import Problem, build_plan, parameter_state
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, cuts
from isthmus.verification import Question, state_bytes, verify
from isthmus.verification.reading import GraphReading


@pytest.mark.parametrize("name", ["gpt-tied", "UsedThrice", "Written", "Counted"])
def test_plans_of_captured_models_pass(name: str) -> None:
    captured = capture_of(*model(name))
    size = captured.train.batch or 3
    devices = tuple(Device(name=f"d{k}", region="r", flops_per_s=1e6 * (k + 1), memory_bytes=1 << 30) for k in range(6))
    fleet = Fleet(name="six", devices=devices, links=Links(default=Link(0.01, 1e5)))
    question = Question(
        graph=captured.train,
        fleet=fleet,
        micro_batch_size=size,
        micro_batches=4,
        schedule="1f1b",
        state=state_bytes("adamw", narrow=True),
    )
    assert GraphReading(question).places == tuple(cut.position for cut in cuts(Flow(captured.train)))
    problem = Problem(
        flow=Flow(captured.train),
        fleet=fleet,
        micro_batch_size=size,
        micro_batches=4,
        state=parameter_state("adamw", narrow=True),
    )
    for seed in range(5):
        boundaries = random_cut(captured, random.Random(seed))
        plan = build_plan(problem, fleet.names[: len(boundaries) + 1], boundaries, planner="random")
        found = verify(plan, question)
        assert found.holds(), (boundaries, found.differences)
