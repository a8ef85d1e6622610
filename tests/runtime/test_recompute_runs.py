"""A model that fits a fleet only if stages recompute is planned, verified, simulated and trained as the plain one."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from isthmus.errors import FleetTooSmall, UserError
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Fleet
from isthmus.job import Job, PlanConfig, Prepared, prepare
from isthmus.planners import plan as make_plan
from isthmus.planners import planner_names
from isthmus.plans import Plan
from isthmus.protocol import RunSpec
from isthmus.simulator import simulate
from isthmus.verification import Question, StateBytes, verify

from .jobs import TEXT, final_weights, fleet_of, job_of, plain_run

GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 2, "heads": 2}
MICRO_BATCHES = 8
DEVICES = 3


def gpipe_job() -> Job:
    """GPipe holds all micro-batches between forward and backward, so memory decides what fits."""
    job = job_of("gpt", GPT, TEXT, batch_size=16, micro_batches=MICRO_BATCHES, clip_norm=1.0)
    return msgspec.structs.replace(job, schedule="gpipe", plan=PlanConfig(memory_headroom=0))


@functools.cache
def prepared() -> Prepared:
    return prepare(gpipe_job())


def forbidding() -> Prepared:
    return msgspec.structs.replace(
        prepared(), job=msgspec.structs.replace(gpipe_job(), plan=PlanConfig(recompute=False, memory_headroom=0))
    )


@functools.cache
def small_fleet() -> Fleet:
    """Together the devices hold the model's state and half of what the micro-batches of a step save."""
    fleet = fleet_of(DEVICES)
    memories = [stage.memory for stage in make_plan("even", prepared().problem(fleet)).stages]
    kept, state = sum(m.activations for m in memories), sum(m.total - m.activations for m in memories)
    devices = tuple(msgspec.structs.replace(d, memory_bytes=(state + kept // 2) // DEVICES) for d in fleet.devices)
    return msgspec.structs.replace(fleet, devices=devices)


@functools.cache
def planned(planner: str = "chain") -> Plan:
    return msgspec.structs.replace(make_plan(planner, prepared().problem(small_fleet())), certificate=None)


def test_it_fits_only_with_stages_that_recompute() -> None:
    with pytest.raises(FleetTooSmall):
        make_plan("chain", forbidding().problem(small_fleet()))
    stages = planned().stages
    assert any(stage.recompute for stage in stages)
    for stage in stages:
        assert stage.memory.total <= small_fleet().device(stage.device).memory_bytes
        assert (stage.memory.recomputed > 0) == stage.recompute
        assert any(f"{stage.device} runs" in n and "forward twice" in n for n in planned().notes) == stage.recompute


@pytest.mark.parametrize("name", [n for n in planner_names() if n != "sky-optimal"])
def test_every_planner_makes_a_plan_that_verifies_or_says_that_it_has_none(name: str) -> None:
    problem = prepared().problem(small_fleet())
    try:
        made = planned(name)
    except UserError:
        blind = ("even", "dtfm-genetic", "dtfm-genetic-code", "dtfm-kl", "random")
        assert name in blind, "cuts that do not look at memory"
        return
    question = Question(
        graph=problem.flow.graph,
        fleet=problem.fleet,
        micro_batch_size=problem.micro_batch_size,
        micro_batches=problem.micro_batches,
        schedule=problem.schedule,
        state=StateBytes(gradient=problem.state.gradient_bytes, optimizer=problem.state.optimizer_bytes),
    )
    verdict = verify(made, question)
    assert verdict.holds(), verdict.differences
    recomputes = any(stage.recompute for replica in made.replicas for stage in replica.stages)
    forbidden = verify(msgspec.structs.replace(made, certificate=None), replace(question, recompute=False))
    assert any(d.field.endswith("recompute") for d in forbidden.differences) == recomputes


def test_the_simulator_runs_the_forward_twice() -> None:
    made, fleet = planned(), small_fleet()
    trace = simulate(made, fleet, RunSpec(steps=1, micro_batches=MICRO_BATCHES, micro_batch_size=2))
    for stage in made.stages:
        spans = [s for s in trace.spans if s.track == "compute" and s.device == stage.device]
        (f,) = {round((s.end_s - s.start_s) * 1e12) for s in spans if s.name == "F"}
        (b,) = {round((s.end_s - s.start_s) * 1e12) for s in spans if s.name == "B"}
        without = prepared().problem(fleet).cumulative_flops[stage.last + 1]
        without -= prepared().problem(fleet).cumulative_flops[stage.first]
        assert f + b == pytest.approx(without + (f if stage.recompute else 0), rel=1e-3)  # at 1 TFLOP/s


def test_it_trains_as_the_plain_model(tmp_path: Path) -> None:
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    outcome = run_plan(prepared(), planned(), small_fleet(), tmp_path, RunOptions(emulate=False), watcher)
    assert outcome.outcome == "done"
    module, expected = plain_run(prepared().job, prepared())
    assert losses == pytest.approx(expected, rel=1e-6)
    own, saved = dict(module.named_parameters()), final_weights(tmp_path)
    for name, value in own.items():
        assert (saved[name] - value).norm() <= 1e-6 * value.norm(), name
