"""Compressed plans run: the losses of the same codecs without processes, and the bytes that plan and simulator say."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.api.make_plan import simulation_options
from isthmus.cost import (
    PlanLayout,
    Problem,
    build_plan,
    build_replicas,
    plan_compression,
    repeat_compression,
    with_edges,
)
from isthmus.cost.compression.messages import packed_edges, sender_of, stage_messages_of
from isthmus.data import DataSpec, SampleOrder, load_dataset
from isthmus.errors import UserError
from isthmus.experiments import RunOptions, Watcher, run_plan, run_spec
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared, prepare
from isthmus.plans import Compression, Edge, Packing, Plan
from isthmus.runtime.coordinator.stage_assignments import check_feedback
from isthmus.simulator import simulate
from isthmus.trace import Trace, link_bytes
from tests.tiers import represented_by
from tests.training.in_process import Pipeline, weights_of

from .jobs import DIGITS, TEXT, final_weights, fleet_of, job_of, random_cut

GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 3, "heads": 2}
UNET: dict[str, object] = {"channels": 1, "classes": 10, "width": 8, "depth": 2}


def packing_of(plan: Plan, source: int, target: int) -> Packing | None:
    for edge in plan.replica.edges:
        packed: Compression | None = edge.forward_compression if source < target else edge.backward_compression
        if {source, target} == {edge.source, edge.target}:
            return packed.packing if packed else None
    return None


def in_one_process(job: Job, prepared: Prepared, plan: Plan) -> tuple[dict[str, Tensor], list[float]]:
    """Final state and the loss of each step, by the same codecs."""
    captured, t = prepared.captured, job.training
    weights = weights_of(prepared.build, captured, t.seed)
    twin = Pipeline(captured, plan.boundaries(), weights, job.engine(), lambda a, b: packing_of(plan, a, b))
    data = load_dataset(job.used_data, "train")
    order = SampleOrder(len(data), t.seed, t.shuffle)

    losses: list[float] = []
    for step in range(t.steps):
        starts = [step * t.batch_size + m * job.micro_batch_size for m in range(t.micro_batches)]
        samples = [order.indices(start, job.micro_batch_size) for start in starts]
        batches = [data.batch(indices, list(data.columns)) for indices in samples]
        losses.append(twin.step(step, batches, [indices.tolist() for indices in samples])[0])
        twin.update(step)
    return twin.state(), losses


def mixed(problem: Problem, plan: Plan) -> Plan:
    """Another codec on every message."""
    kinds = [Packing(codec="topk", ratio=20.0), Packing(codec="int8"), Packing(codec="bf16"), None]
    turn, edges = itertools.count(), list[tuple[Edge, ...]]()
    for replica in plan.replicas:
        sender = sender_of(problem, replica)
        edges.append(packed_edges(sender, {m: kinds[next(turn) % 4] for m in stage_messages_of(problem, sender)}))
    return with_edges(problem, plan, edges)


def sent(trace: Trace) -> dict[tuple[str, str], int]:
    """Bytes of values and gradients by link."""
    spans = tuple(s for s in trace.spans if s.name in ("forward", "backward"))
    return link_bytes(Trace(source=trace.source, run=trace.run, spans=spans))


@pytest.mark.parametrize(
    ("model", "method"), represented_by([("gpt", "mixed"), ("unet", "adatopk")], ("unet", "adatopk"))
)
def test_a_run_equals_its_twin_and_sends_what_plan_and_simulator_say(model: str, method: str, tmp_path: Path) -> None:
    options, data = (GPT, TEXT) if model == "gpt" else (UNET, DIGITS)
    job = job_of(model, options, data, clip_norm=1.0, eval_every=1, eval_samples=4)
    prepared, fleet = prepare(job), fleet_of(3)
    problem = prepared.problem(fleet)
    dense = build_plan(problem, fleet.names, random_cut(prepared, 3, seed=2, once=True), planner="test")
    plan = mixed(problem, dense) if method == "mixed" else plan_compression(method, problem, dense, 10.0)
    assert sum(e.forward_wire_bytes for e in plan.replica.edges) < sum(e.forward_bytes for e in plan.replica.edges)
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    outcome = run_plan(prepared, plan, fleet, tmp_path, RunOptions(emulate=False), watcher)
    assert outcome.outcome == "done"

    state, expected = in_one_process(job, prepared, plan)
    assert losses == pytest.approx(expected, rel=1e-6)
    saved = final_weights(tmp_path)
    for name in (n for n in saved if not n.startswith("optimizer.")):
        assert torch.allclose(saved[name], state[name], rtol=1e-6, atol=1e-7), name

    spans = tuple(s for s in outcome.spans if s.name in ("forward", "backward"))
    for edge in plan.replica.edges:
        a, b = plan.stages[edge.source].device, plan.stages[edge.target].device
        for name, size, source, target in (
            ("forward", edge.forward_wire_bytes, a, b),
            ("backward", edge.backward_wire_bytes, b, a),
        ):
            for track, ends in (("send", (source, target)), ("receive", (target, source))):
                sizes = [s.size_bytes for s in spans if (s.track, s.name, s.device, s.other) == (track, name, *ends)]
                count = job.training.steps * job.training.micro_batches
                assert sizes.count(size) >= count, (edge, track, name)
                # Evaluations are of the model as it is.
                assert set(sizes) == ({size, edge.forward_bytes} if name == "forward" else {size})
    measured = Trace(source="runtime", run="r", spans=spans)
    assert sent(measured) == sent(simulate(plan, fleet, run_spec(prepared), simulation_options(prepared, plan)))


@pytest.mark.long
def test_what_a_samples_gradients_left_out_follows_in_the_next_pass(tmp_path: Path) -> None:
    """Three passes over 23 samples; the same run without feedback goes elsewhere."""
    text = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 16, "max_bytes": 384, "holdout": 0.05})
    job = job_of("gpt", GPT, text, steps=9)
    prepared, fleet = prepare(job), fleet_of(2)
    assert prepared.samples.train == 23
    problem = prepared.problem(fleet)
    dense = build_plan(problem, fleet.names, random_cut(prepared, 2, seed=1, once=True), planner="test")
    packed = plan_compression("uniform", problem, dense, 10.0)
    plan = plan_compression("uniform", problem, dense, 10.0, feedback=True)
    assert repeat_compression(problem, dense, plan).replicas == plan.replicas
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    run_plan(prepared, plan, fleet, tmp_path, RunOptions(emulate=False), watcher)
    expected, plain = in_one_process(job, prepared, plan)[1], in_one_process(job, prepared, packed)[1]
    assert losses == pytest.approx(expected, rel=1e-6)
    first = prepared.samples.train // job.training.batch_size
    assert losses[:first] == pytest.approx(plain[:first], rel=1e-6)
    assert losses[-1] != pytest.approx(plain[-1], rel=1e-6)


class TestRefusedFeedback:
    def planned(self, steps: int, memory_bytes: int = 1 << 30) -> tuple[Prepared, Plan, Fleet]:
        prepared, fleet = prepare(job_of("gpt", GPT, TEXT, steps=steps)), fleet_of(2)
        problem = prepared.problem(fleet)
        dense = build_plan(problem, fleet.names, random_cut(prepared, 2, seed=1, once=True), planner="test")
        small = tuple(msgspec.structs.replace(d, memory_bytes=memory_bytes) for d in fleet.devices)
        plan = plan_compression("uniform", problem, dense, 10.0, feedback=True)
        return prepared, plan, msgspec.structs.replace(fleet, devices=small)

    def test_for_one_pass(self) -> None:
        with pytest.raises(UserError, match=r"see none of the .* samples twice, expected more than one pass"):
            check_feedback(*self.planned(steps=2))

    def test_beyond_the_devices_memory(self) -> None:
        check_feedback(*self.planned(steps=10_000))
        with pytest.raises(UserError, match=r"device 'd1' keeps \d+ bytes, the gradients of \d+ samples"):
            check_feedback(*self.planned(steps=10_000, memory_bytes=1 << 20))

    def test_of_values(self) -> None:
        _, plan, _ = self.planned(steps=2)
        (edge,) = plan.replica.edges
        with pytest.raises(UserError, match=r"forward_compression\.feedback: got true, expected false"):
            msgspec.structs.replace(edge, forward_compression=edge.backward_compression)


def test_a_model_that_diverges_is_told_with_the_stage_that_did(tmp_path: Path) -> None:
    job = job_of("gpt", GPT, TEXT, steps=20)
    job = msgspec.structs.replace(job, optimizer=(msgspec.structs.replace(job.optimizer[0], lr=1e30),))
    prepared, fleet = prepare(job), fleet_of(2)
    problem = prepared.problem(fleet)
    dense = build_plan(problem, fleet.names, random_cut(prepared, 2, seed=1, once=True), planner="test")
    plan = plan_compression("uniform", problem, dense, 10.0)
    outcome = run_plan(prepared, plan, fleet, tmp_path, RunOptions(emulate=False), Watcher())
    assert outcome.outcome == "diverged"
    assert " of stage 0 on device 'd0'" in outcome.reason


def test_every_replica_packs_as_its_own_edges_say(tmp_path: Path) -> None:
    job = job_of("gpt", GPT, TEXT)
    prepared, fleet = prepare(job), fleet_of(4)
    problem = prepared.problem(fleet)
    layouts = [
        PlanLayout(fleet.names[:2], tuple(random_cut(prepared, 2, seed=1)), 2),
        PlanLayout(fleet.names[2:], tuple(random_cut(prepared, 2, seed=3)), 2),
    ]
    plan = mixed(problem, build_replicas(problem, layouts, planner="test"))
    codecs = [edge.forward_compression for replica in plan.replicas for edge in replica.edges]
    assert len({c.codec for c in codecs if c is not None}) == len(codecs) == 2
    outcome = run_plan(prepared, plan, fleet, tmp_path, RunOptions(emulate=False), Watcher())
    assert outcome.outcome == "done"
    for replica in plan.replicas:
        (edge,) = replica.edges
        a, b = (stage.device for stage in replica.stages)
        for name, ends, size in (
            ("forward", (a, b), edge.forward_wire_bytes),
            ("backward", (b, a), edge.backward_wire_bytes),
        ):
            spans = [s for s in outcome.spans if (s.track, s.name, s.device, s.other) == ("send", name, *ends)]
            assert {s.size_bytes for s in spans} == {size}
