"""Ratio planners against literal transcriptions and brute force; codecs' bytes against what an encoder writes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import (
    every_cut,
    fits,
    fleet_of,
    operator,
    parameter,
    placeholder,
    problem_of,
    random_graph,
    simulated_s,
)
from test_verify import question_of
from tests.tiers import THOROUGH, represented_by

from isthmus import expected_loss
from isthmus.cost import (
    PlanLayout,
    Problem,
    SyncPolicy,
    build_replicas,
    layouts_of,
    plan_compression,
    preference,
    with_edges,
)
from isthmus.cost.compression import describe_ratios, ratio_planner_names
from isthmus.cost.compression.adatopk import ratio_that_shortens
from isthmus.cost.compression.just_enough import choices_within, just_enough, ladder
from isthmus.cost.compression.messages import packed_edges, sender_of, stage_messages_of
from isthmus.cost.stage_costs import StageFlops
from isthmus.cost.steptime import PipelineTime, pipeline
from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, Region
from isthmus.graph import OpGraph, Ref, cuts
from isthmus.planners import plan
from isthmus.plans import Compression, CompressionConfig, Constraints, Edge, Packing, Plan
from isthmus.plans.packing import DENSE
from isthmus.verification import Prover, verify

pytestmark = pytest.mark.thorough

NAMES = sorted(["adatopk", "adatopk-paper", "just-enough", "uniform", *DENSE])
SEEDS = range(60 if THOROUGH else 4)
CANDIDATES = (Packing(codec="bf16"), Packing(codec="topk", ratio=4.0), Packing(codec="topk", ratio=10.0))


def times_of(problem: Problem, made: Plan) -> PipelineTime:
    stages, edges = made.stages, made.replica.edges
    flops = [StageFlops(s.flops_forward, s.flops_backward) for s in stages]
    return pipeline(problem, [s.device for s in stages], flops, edges, made.replica.shared)


def some_plan(seed: int, *, operators: int = 6, devices: int = 3) -> tuple[Problem, Plan]:
    rng = random.Random(seed)
    problem = problem_of(random_graph(seed, operators), fleet_of([rng.uniform(1, 50) for _ in range(devices)], seed))
    return problem, plan("even", problem)


def packed_just_enough(problem: Problem, made: Plan) -> Plan:
    sender = sender_of(problem, made.replica)
    return with_edges(problem, made, [packed_edges(sender, just_enough(problem, sender, 1.0, CANDIDATES))])


def test_the_registry() -> None:
    assert ratio_planner_names() == NAMES
    assert all(describe_ratios(name).endswith(".") or ":" in describe_ratios(name) for name in ratio_planner_names())
    problem, made = some_plan(1)
    with pytest.raises(UserError, match="unknown ratio planner 'adatop': did you mean 'adatopk'"):
        plan_compression("adatop", problem, made, 10)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_refused(name: str) -> None:
    problem, made = some_plan(1)
    for ratio in (0.5, math.nan, math.inf):
        with pytest.raises(UserError, match=r"ratio: got .*, expected a finite number of at least 1"):
            plan_compression(name, problem, made, ratio)
    with pytest.raises(UserError, match="micro_batches: got 4, the problem has 5"):
        plan_compression(name, problem_of(problem.flow.graph, problem.fleet, micro_batches=5), made, 10)
    with pytest.raises(UserError, match="model: got 'random-1', the problem has 'random-2'"):
        plan_compression(name, some_plan(2)[0], made, 10)


def elements_of(problem: Problem, edge: Edge) -> list[int]:
    """Of each tensor that carries a gradient."""
    named = [name.partition(":") for name in edge.gradients]
    return [math.prod(problem.flow.by_name[op].outputs[int(i or 0)].shape_at(2)) for op, _, i in named]


def topk_bytes(elements: int, ratio: float) -> int:
    """Written out: bfloat16 values, and a bitmap or Elias and Fano's code."""
    kept = math.ceil(elements / ratio)
    low = int(math.log2(elements // kept)) if kept else 0
    code = math.ceil(kept * low / 8) + math.ceil((kept + (elements - 1) // 2**low) / 8) if kept else 0
    return 2 * kept + min(math.ceil(elements / 8), code)


@pytest.mark.parametrize("seed", range(12))
def test_uniform_packs_what_carries_gradients_and_nothing_else(seed: int) -> None:
    problem, made = some_plan(seed)
    packed = plan_compression("uniform", problem, made, 20.0)
    for before, edge in zip(made.replica.edges, packed.replica.edges, strict=True):
        sizes = elements_of(problem, before)
        wire = sum(min(4 * size, topk_bytes(size, 20)) for size in sizes)
        exact = before.forward_bytes - 4 * sum(sizes)  # ids
        assert edge.forward_wire_bytes == wire + exact
        assert edge.backward_wire_bytes == wire
        assert (edge.forward_bytes, edge.values) == (before.forward_bytes, before.values)
        if edge.forward_compression:
            assert (edge.forward_compression.codec, edge.forward_compression.ratio) == ("topk", 20.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(8))
def test_the_prediction_is_that_of_the_bytes_on_the_wire(name: str, seed: int) -> None:
    problem, made = some_plan(seed)
    packed = plan_compression(name, problem, made, 50.0)
    as_if = tuple(
        Edge(
            source=e.source,
            target=e.target,
            values=e.values,
            gradients=e.gradients,
            forward_bytes=e.forward_wire_bytes,
            backward_bytes=e.backward_wire_bytes,
        )
        for e in packed.replica.edges
    )
    flops = [StageFlops(s.flops_forward, s.flops_backward) for s in made.stages]
    times = pipeline(problem, [s.device for s in made.stages], flops, as_if, made.replica.shared)
    assert packed.predicted.step_s == pytest.approx(times.step_s(problem.micro_batches))
    assert packed.predicted.step_s <= made.predicted.step_s
    assert packed.certificate is None
    assert packed.notes[:-1] == made.notes
    count = sum(c is not None for e in packed.replica.edges for c in (e.forward_compression, e.backward_compression))
    assert f"packs {count} of" in packed.notes[-1]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ratio", [1.0, 7.5, 100.0])
def test_adatopk_is_equation_7(seed: int, ratio: float) -> None:
    problem, made = some_plan(seed)
    # Eq. 7 for each message, with c r for 3 r: r_i = max(1, c r R_i / max R), R = alpha + beta M
    seconds: dict[tuple[int, str], float] = {}
    for number, edge in enumerate(made.replica.edges):
        a, b = made.stages[edge.source].device, made.stages[edge.target].device
        there, back = problem.fleet.link(a, b), problem.fleet.link(b, a)
        seconds[number, "forward"] = there.latency_s + edge.forward_bytes / there.bandwidth_bytes_per_s
        if edge.backward_bytes:
            seconds[number, "backward"] = back.latency_s + edge.backward_bytes / back.bandwidth_bytes_per_s
    packed = plan_compression("adatopk", problem, made, ratio)
    harshest = ratio_that_shortens(ratio)
    for number, edge in enumerate(packed.replica.edges):
        sizes = elements_of(problem, edge)
        for direction, size, got in (
            ("forward", edge.forward_bytes, edge.forward_compression),
            ("backward", edge.backward_bytes, edge.backward_compression),
        ):
            if not size:
                continue
            expected = max(1, harshest * seconds[number, direction] / max(seconds.values()))
            wire = size - edge.backward_bytes + sum(min(4 * n, topk_bytes(n, expected)) for n in sizes)
            if wire < size and expected > 1:
                assert got is not None
                assert (got.codec, got.ratio, got.wire_bytes) == ("topk", pytest.approx(expected), wire)
            else:
                assert got is None


@pytest.mark.parametrize("ratio", [1.0, 2.0, 5.0, 33.0, 100.0, 1000.0, 12_345.0])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_adatopk_makes_the_slowest_message_shorter_by_the_ratio(ratio: float, element_bytes: int) -> None:
    found, elements = ratio_that_shortens(ratio, element_bytes), 1 << 34
    if found > 1:
        assert elements * element_bytes / topk_bytes(elements, found) == pytest.approx(ratio, rel=1e-4)
    else:
        assert ratio * topk_bytes(elements, 1.0) <= elements * element_bytes


def test_the_papers_factor_of_3_is_three_quarters_here() -> None:
    assert ratio_that_shortens(100) == pytest.approx(75.6, abs=0.1)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000))
def test_just_enough_is_the_mildest_choice_with_the_least_period(seed: int) -> None:
    problem, made = some_plan(seed, operators=5)
    messages = stage_messages_of(problem, sender_of(problem, made.replica))
    options = [[m.wire_bytes(c) for c in (None, *CANDIDATES)] for m in messages]
    stage_s = max(times_of(problem, made).compute_s)

    def period_s(choice: tuple[int, ...]) -> float:
        seconds = [
            options[i][c] / problem.fleet.link(m.source, m.target).bandwidth_bytes_per_s
            for i, (m, c) in enumerate(zip(messages, choice, strict=True))
        ]
        return max([stage_s, *seconds])

    choices = list(itertools.product(range(4), repeat=len(messages)))
    least_s = min(map(period_s, choices))
    found = packed_just_enough(problem, made)
    assert times_of(problem, found).bottleneck[0] == pytest.approx(least_s)
    # componentwise: a message that could do with a milder codec does
    good = [c for c in choices if period_s(c) <= least_s * (1 + 1e-9)]
    mildest = tuple(min(c[i] for c in good) for i in range(len(messages)))
    assert mildest in good
    expected = {m: (None, *CANDIDATES)[c] for m, c in zip(messages, mildest, strict=True)}
    for message, codec in expected.items():
        edge = found.replica.edges[message.edge]
        got = edge.backward_compression if message.backward else edge.forward_compression
        assert got == (message.packed(codec) if codec else None)


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_budget_is_kept_at_the_least_period(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = (0.0, 0.02, 0.03, 0.10)  # as if measured: of nothing, and of the candidates
    monkeypatch.setattr(expected_loss, "CODECS", {"bf16": losses[1]})
    monkeypatch.setattr(expected_loss, "TOPK", {1.0: 0.0, 4.0: losses[2], 10.0: losses[3]})
    problem, made = some_plan(seed, operators=5)
    sender = sender_of(problem, made.replica)
    messages, codecs = stage_messages_of(problem, sender), (None, *CANDIDATES)

    def judged(choice: tuple[int, ...]) -> tuple[float, float]:
        """(period in seconds, expected increase)."""
        seconds = [m.wire_s(problem, codecs[c]) for m, c in zip(messages, choice, strict=True)]
        pairs = [(m, c, codecs[c]) for m, c in zip(messages, choice, strict=True)]
        packs = [c for m, c, codec in pairs if codec is not None and m.packed(codec)]
        return max([sender.slowest_s, *seconds]), sum(losses[c] for c in packs)

    every = [judged(c) for c in itertools.product(range(4), repeat=len(messages))]
    for budget in (0.0, 0.07, 0.17, 1.0):
        asked = CompressionConfig(method="just-enough", loss_budget=budget)
        limited = dataclasses.replace(problem, constraints=Constraints(compression=asked))
        chosen = just_enough(limited, sender, 1.0, CANDIDATES)
        period_s, increase = judged(tuple(codecs.index(chosen[m]) for m in messages))
        assert increase <= budget
        assert period_s == pytest.approx(min(s for s, cost in every if cost <= budget))
        assert increase == pytest.approx(min(cost for s, cost in every if s <= period_s * (1 + 1e-9)))
        again = plan("even", limited)
        assert expected_loss.increase_of(again.replicas) <= budget and "; expected loss +" in again.notes[-1]


@pytest.mark.parametrize("seed", range(6))
def test_replicas_share_one_loss_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least time to a loss of all choices of both replicas whose mean increase, by share of the batch, is within
    it."""
    monkeypatch.setattr(expected_loss, "CODECS", {"bf16": 0.01, "int8": 0.02, "int4": 0.05})
    monkeypatch.setattr(expected_loss, "TOPK", {1.0: 0.0, 10.0: 0.2, 100.0: 0.3})
    rng = random.Random(seed)
    graph = random_graph(seed, 6)
    problem = problem_of(graph, fleet_of([rng.uniform(1, 50) for _ in range(4)], seed), micro_batches=5)
    names, middle = problem.fleet.names, cuts(problem.flow)[len(cuts(problem.flow)) // 2].position
    layouts = [PlanLayout(names[:2], (middle,), 4), PlanLayout(names[2:], (middle,), 1)]
    dense = build_replicas(problem, layouts, planner="test")
    for budget in (0.0, 0.03, 0.1, 0.5):
        asked = CompressionConfig(method="just-enough", loss_budget=budget)
        limited = dataclasses.replace(problem, constraints=Constraints(compression=asked))
        made = build_replicas(limited, layouts, planner="test")
        choices: list[list[tuple[float, tuple[Edge, ...]]]] = []
        for replica in dense.replicas:
            sender = sender_of(problem, replica)
            every = [packed_edges(sender, found) for found in choices_within(problem, sender, 100.0, budget)]
            choices.append([(expected_loss.packed_increase(edges), edges) for edges in every])
        times = [
            with_edges(problem, dense, [first, second]).predicted.step_s * expected_loss.more_steps(increase)
            for a, first in choices[0]
            for b, second in choices[1]
            if (increase := 0.8 * a + 0.2 * b) <= budget + 1e-12
        ]
        assert expected_loss.increase_of(made.replicas) <= budget + 1e-12
        assert preference(limited, made)[0] == pytest.approx(min(times))


@pytest.mark.parametrize("devices", represented_by([2, 3], 2))
@pytest.mark.parametrize("seed", represented_by(SEEDS[::2], SEEDS[0]))
def test_no_plan_within_a_budget_takes_longer_to_a_loss_than_one_that_packs_all_alike(seed: int, devices: int) -> None:
    """Nor than that one's layout, packed within the budget."""
    rng, budget = random.Random(seed), (0.02, 0.2, 0.0)[seed % 3]
    memory = [100 + rng.randint(300, 1500) for _ in range(devices)]
    fleet = fleet_of([rng.uniform(1, 50) for _ in range(devices)], seed, memory=memory)
    problem = problem_of(random_graph(seed, 4), fleet, micro_batches=4, sync=SyncPolicy(mode="local", period=8))

    def made(compression: CompressionConfig | None) -> tuple[Problem, Plan]:
        asked = dataclasses.replace(problem, constraints=Constraints(compression=compression))
        return asked, plan("auto", asked)

    asked, mixed = made(CompressionConfig(method="just-enough", loss_budget=budget))
    assert expected_loss.increase_of(mixed.replicas) <= budget
    for alike in (None, *(CompressionConfig(method=codec) for codec in DENSE)):
        _, uniform = made(alike)
        repacked = build_replicas(asked, layouts_of(uniform), planner="test")
        assert preference(asked, mixed)[0] <= preference(asked, repacked)[0] * (1 + 1e-9)
        increase = expected_loss.increase_of(uniform.replicas)
        if increase <= budget:
            time_s = uniform.predicted.step_s * expected_loss.more_steps(increase)
            assert preference(asked, mixed)[0] <= time_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", sorted({*SEEDS, 36}))  # 36: one planner finds nothing, and no codec is in the budget
def test_no_bound_within_a_budget_is_above_the_best_pipeline(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all orders, cuts and choices of codecs whose increase is within it."""
    monkeypatch.setattr(expected_loss, "CODECS", {"bf16": 0.01, "int8": 0.02, "int4": 0.05})
    monkeypatch.setattr(expected_loss, "TOPK", {1.0: 0.0, 10.0: 0.2})
    rng, budget = random.Random(seed), (0.0, 0.03, 0.1, 0.5)[seed % 4]
    fleet = fleet_of([rng.uniform(1, 50) for _ in range(2)], seed, memory=[rng.randint(200, 900) for _ in range(2)])
    asked = CompressionConfig(method="just-enough", ratio=10.0, loss_budget=budget)
    problem = problem_of(random_graph(seed, 3), fleet, micro_batches=5, constraints=Constraints(compression=asked))
    dense, times = problem.uncompressed(), list[float]()
    for count in (1, 2):
        for order in itertools.permutations(fleet.names, count):
            for placed in every_cut(dense, order):
                if fits(placed):
                    layout = PlanLayout(order, placed.bounds[1:-1], 5, placed.recompute)
                    times += _steps_within(dense, build_replicas(dense, [layout], planner="test"), budget)
    if times:
        found = plan("auto", problem)
        prover, step_s = Prover(question_of(problem), priced=False), simulated_s(problem, found)
        assert prover.run(2 * step_s, 1e6, bool, lambda _: None) <= step_s * (1 + 1e-9)
        assert not verify(found, question_of(problem)).differences


def _steps_within(problem: Problem, made: Plan, budget: float) -> Iterator[float]:
    sender = sender_of(problem, made.replica)
    messages = stage_messages_of(problem, sender)
    codecs = (None, *(Packing(codec=name) for name in DENSE), Packing(codec="topk", ratio=10.0))
    for choice in itertools.product(codecs, repeat=len(messages)):
        edges = packed_edges(sender, dict(zip(messages, choice, strict=True)))
        if expected_loss.packed_increase(edges) <= budget:
            yield with_edges(problem, made, [edges]).predicted.step_s


def test_a_plan_beyond_the_budget_is_refused_by_the_check() -> None:
    problem, made = some_plan(1)
    asked = CompressionConfig(method="just-enough", loss_budget=0.0)
    limited = dataclasses.replace(problem, constraints=Constraints(compression=asked))
    beyond = msgspec.structs.replace(plan_compression("int4", problem, made, 1.0), constraints=limited.constraints)
    assert "constraints.compression.loss_budget" in {d.field for d in verify(beyond, question_of(limited)).differences}


@pytest.mark.long
def test_a_plan_packs_the_replica_over_slow_links_alone() -> None:
    """No device holds the model; int4 alone brings a message over the slow link in the time of a stage."""
    ops = [placeholder("tokens", 4), placeholder("labels", 1)]
    for k in range(3):
        ops.append(parameter(f"w{k}", 500))
        ops.append(operator(f"op{k}", f"op{k - 1}" if k else "tokens", f"w{k}", flops=100, width=256))
    ops.append(operator("loss", "op2", "labels", flops=1))
    graph = OpGraph(name="chain", mode="train", ops=tuple(ops), loss=Ref("loss"))
    slow, fast = Link(0.0, 250.0), Link(0.0, 1e9)
    devices = [Device(name=n, region=n[0], flops_per_s=1e3, memory_bytes=11_500) for n in ("a0", "a1", "b0", "c0")]
    links = Links(default=slow, intra=fast)
    fleet = Fleet(name="near-and-far", devices=tuple(devices), links=links)
    averaged = SyncPolicy(mode="local", period=50)

    def made(compression: CompressionConfig | None) -> Plan:
        return plan(
            "auto",
            problem_of(graph, fleet, micro_batches=16, sync=averaged, constraints=Constraints(compression=compression)),
        )

    found = made(CompressionConfig(method="just-enough", loss_budget=0.02))
    codecs = {
        tuple(s.device for s in r.stages): {
            c and c.codec for e in r.edges for c in (e.forward_compression, e.backward_compression)
        }
        for r in found.replicas
    }
    assert {frozenset(devices): codec == {"int4"} for devices, codec in codecs.items()} == {
        frozenset(("a0", "a1")): False,
        frozenset(("b0", "c0")): True,
    }
    alike = made(CompressionConfig(method="int4"))
    assert found.predicted.step_s == pytest.approx(alike.predicted.step_s, rel=0.02)
    assert found.predicted.step_s < 0.8 * made(None).predicted.step_s
    assert 0 < expected_loss.increase_of(found.replicas) < 0.6 * expected_loss.increase_of(alike.replicas)


def test_what_was_not_measured_has_no_expected_loss() -> None:
    assert expected_loss.expected_increase(Packing(codec="sparse2bit", ratio=20.0)) == math.inf
    assert expected_loss.expected_increase(Packing(codec="topk", ratio=1e6)) == math.inf
    dense = [expected_loss.CODECS[name] for name in DENSE]
    assert dense == sorted(dense) and list(expected_loss.TOPK.values()) == sorted(expected_loss.TOPK.values())
    with pytest.raises(ValueError, match="loss_budget: got a budget with method 'int8', expected method 'just-enough'"):
        CompressionConfig(method="int8", loss_budget=0.1)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(2, 60))
def test_a_shared_uplink_is_relieved_as_far_as_codecs_can(seed: int, uplink: float) -> None:
    rng = random.Random(seed)
    devices = tuple(
        Device(name=f"d{i}", region=f"r{i % 2}", flops_per_s=rng.uniform(5, 50), memory_bytes=1 << 40) for i in range(4)
    )
    sites = tuple(Region(region=r, uplink_bytes_per_s=uplink) for r in ("r0", "r1"))
    fleet = Fleet(name="sites", devices=devices, links=Links(default=Link(0.0, 50.0)), region_info=sites)
    problem = problem_of(random_graph(seed, 7), fleet)
    made = plan("even", problem)
    found = packed_just_enough(problem, made)
    messages = stage_messages_of(problem, sender_of(problem, made.replica))
    shortest = {m: min(m.wire_bytes(c) for c in (None, *CANDIDATES)) for m in messages}
    busy: dict[str, float] = {}
    for m, size in shortest.items():
        if fleet.device(m.source).region != fleet.device(m.target).region:
            region = fleet.device(m.source).region
            busy[region] = busy.get(region, 0.0) + size / uplink
    links = [size / fleet.link(m.source, m.target).bandwidth_bytes_per_s for m, size in shortest.items()]
    least_s = max([*times_of(problem, made).compute_s, *busy.values(), *links])
    assert times_of(problem, found).bottleneck[0] <= least_s * (1 + 1e-6)


def test_the_ladder_ends_at_the_ratio_asked() -> None:
    assert [c.ratio for c in ladder(70)] == [1, 1, 1, 10, 20, 50, 70]
    assert [c.codec for c in ladder(3)] == ["bf16", "int8", "int4"]
    sizes = [c.bytes_per_element() for c in ladder(1000)]
    assert sizes == sorted(sizes, reverse=True)


def test_just_enough_leaves_a_plan_alone_that_computes_longest() -> None:
    problem = problem_of(random_graph(3, 8), fleet_of([0.01, 0.01, 0.01], 3))
    made = plan("even", problem)
    found = plan_compression("just-enough", problem, made, 1000)
    assert found.replica == made.replica
    assert found.predicted == made.predicted


@pytest.mark.parametrize("seed", range(6))
def test_several_replicas_are_packed_each(seed: int) -> None:
    rng = random.Random(seed)
    fleet = fleet_of([rng.uniform(20, 50) for _ in range(4)], seed)
    problem, names = problem_of(random_graph(seed, 8), fleet, micro_batches=6), fleet.names
    layouts = [
        PlanLayout(names[:2], (rng.choice([c.position for c in cuts(problem.flow)]),), 4),
        PlanLayout(names[2:3], (), 2),
    ]
    made = build_replicas(problem, layouts, planner="hand")
    packed = plan_compression("uniform", problem, made, 10)
    assert packed.predicted.sync_s == made.predicted.sync_s
    assert packed.replicas[1] == made.replicas[1]
    (edge,) = packed.replicas[0].edges
    assert edge.forward_wire_bytes < edge.forward_bytes or edge.backward_bytes < 24
    assert [r.micro_batches for r in packed.replicas] == [r.micro_batches for r in made.replicas]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "auto", "delayed"])
def test_what_is_packed_is_noted_once(schedule: str) -> None:
    problem, _ = some_plan(1)
    asked = Constraints(compression=CompressionConfig(method="int4"))
    made = plan("even", dataclasses.replace(problem, schedule=schedule, constraints=asked))
    assert sum("compression 'int4'" in note for note in made.notes) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ratio": 0.5, "wire_bytes": 1}, "ratio: got 0.5"),
        ({"wire_bytes": -1}, "wire_bytes: got -1"),
        ({"codec": "top-k", "wire_bytes": 1}, "compression: unknown codec 'top-k': did you mean 'topk'"),
    ],
)
def test_a_compression_that_cannot_be_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        msgspec.convert({"codec": "topk", **fields}, Compression)
