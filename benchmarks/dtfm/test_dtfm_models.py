"""The GPT-3 graphs of the end-to-end benchmark are sums of captured ones; its peers are what can be counted by hand."""

from __future__ import annotations

import math

import pytest
from gpt3 import Shape, captured_parts, gpt3, graph_of, parts_of
from peers import Training, megatron, ring_s, zero3

from isthmus.cost import Problem, build_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Affine, Flow, cuts

SMALL = Shape("small", 4, 64, 2)
LINK = Link(latency_s=0.5, bandwidth_bytes_per_s=1e6)


def fleet_of(count: int, link: Link = LINK) -> Fleet:
    devices = tuple(Device(name=f"d{k}", region="r", flops_per_s=1e9, memory_bytes=1 << 40) for k in range(count))
    return Fleet(name="test", devices=devices, links=Links(default=link))


def training(devices: int, link: Link = LINK) -> Training:
    parts = parts_of(SMALL, checkpointed=True)
    return Training(shape=SMALL, parts=parts, batch=8, fleet=fleet_of(devices, link))


@pytest.mark.long
def test_a_repeated_layer_is_what_a_deeper_capture_has() -> None:
    captured = captured_parts(SMALL.width, SMALL.heads, SMALL.layers)
    assert parts_of(SMALL, checkpointed=False) == list(captured)


def test_checkpointing_computes_attention_and_mlp_twice_and_keeps_their_inputs() -> None:
    plain, checkpointed = (parts_of(SMALL, checkpointed=c) for c in (False, True))
    for before, after in zip(plain[1:-1], checkpointed[1:-1], strict=True):
        assert after.backward == before.backward + before.forward
        assert after.kept_bytes == Affine(2048 * SMALL.width * 2)
    assert (plain[0], plain[-1]) == (checkpointed[0], checkpointed[-1])


def test_the_graph_has_the_sums_of_its_parts_and_can_be_cut_between_them() -> None:
    parts = parts_of(SMALL, checkpointed=False)
    graph = graph_of(SMALL, parts)
    # A gradient for all of them, but for the token ids: 12 width^2 + 13 width a layer, and what stands around.
    around = 2 * 50_257 * SMALL.width + 2048 * SMALL.width + 2 * SMALL.width
    assert graph.parameter_bytes == 2 * (SMALL.layers * (12 * SMALL.width**2 + 13 * SMALL.width) + around)
    flow = Flow(graph)
    places = [cut.position for cut in cuts(flow)]
    assert places == list(range(1, len(parts)))
    stream = 2048 * SMALL.width * 2
    for cut in cuts(flow):
        assert (cut.forward_bytes(flow, 3), cut.backward_bytes(flow, 3)) == (3 * stream, 3 * stream)
    plan = build_plan(
        Problem(flow=flow, fleet=fleet_of(2), micro_batch_size=1, micro_batches=4), ["d0", "d1"], [5], planner="hand"
    )
    flops = sum(stage.flops_forward + stage.flops_backward for stage in plan.stages)
    assert flops == sum((part.forward + part.backward).at(1) for part in parts)


def test_a_ring_waits_for_all_hops_but_the_shortest() -> None:
    # Four members of a ring: three latencies, and three quarters of the bytes over each link.
    assert ring_s(fleet_of(4), ["d0", "d1", "d2", "d3"], 4e6, 1) == pytest.approx(3 * 0.5 + 3.0)
    assert ring_s(fleet_of(4), ["d0", "d1", "d2", "d3"], 4e6, 2) == pytest.approx(2 * (3 * 0.5 + 3.0))
    assert ring_s(fleet_of(4), ["d0"], 4e6, 2) == 0


def test_megatron_on_links_that_cost_nothing_is_compute_and_the_bubble() -> None:
    free = training(8, Link(latency_s=0.0, bandwidth_bytes_per_s=1e30))
    whole_s = free.work_s(free.parts)
    # Tensor and data parallelism divide all work evenly and have no bubble.
    assert megatron(free, free.fleet.names).step_s == pytest.approx(8 * whole_s / 8)


def test_megatron_on_slow_links_is_a_pipeline_that_waits_for_its_messages() -> None:
    slow = training(2)
    # Two stages of two layers each; the second, with the head, is the longer one.
    first_s, second_s = (slow.work_s(part) for part in slow.stages(2))
    exchange_s = 0.5 + slow.stream_bytes / 1e6
    fill_s = first_s + second_s + 2 * exchange_s
    pipeline_s = fill_s + 7 * max(second_s + exchange_s, fill_s / 2)
    replicas_s = 4 * (first_s + second_s) + 2 * (0.5 + 4 * sum(p.parameters for p in slow.parts) / 2 / 1e6)
    found = megatron(slow, slow.fleet.names)
    assert found.step_s == pytest.approx(min(pipeline_s, replicas_s))


def test_what_does_not_fit_is_never() -> None:
    devices = tuple(Device(name=f"d{k}", region="r", flops_per_s=1e9, memory_bytes=1000) for k in range(2))
    fleet = Fleet(name="tiny", devices=devices, links=Links(default=LINK))
    tiny = Training(shape=SMALL, parts=parts_of(SMALL, checkpointed=True), batch=8, fleet=fleet)
    assert math.isinf(megatron(tiny, fleet.names).step_s)
    assert math.isinf(zero3(tiny, fleet.names).step_s)


def test_zero3_hides_what_it_gathers_behind_its_own_sequences() -> None:
    quick, slow = (training(4, Link(0.5, bandwidth)) for bandwidth in (1e30, 1e5))
    assert zero3(quick, quick.fleet.names).step_s == pytest.approx(2 * quick.work_s(quick.parts))
    moved = 8 * sum(part.parameters for part in slow.parts) * 3 / 4 / 1e5
    latencies_s = 3 * 3 * 0.5 * len(slow.parts)
    assert zero3(slow, slow.fleet.names).step_s == pytest.approx(moved + latencies_s)


def test_a_deeper_graph_has_more_of_the_same_layer() -> None:
    deep, shallow = (gpt3(SMALL._replace(layers=n), checkpointed=True) for n in (8, 4))
    attention, mlp = parts_of(SMALL, checkpointed=True)[1:3]
    assert deep.parameter_bytes - shallow.parameter_bytes == 4 * 2 * (attention.parameters + mlp.parameters)
