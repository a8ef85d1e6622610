"""Weight gradients apart from input gradients: the bits of a whole backward, and what is kept in between."""

from __future__ import annotations

import functools
import random
import weakref

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, random_cut, weights_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from zoo import CASES, MODELS, model

from isthmus.graph import Flow, Ref, cuts
from isthmus.graph.captured import Captured
from isthmus.training.engine import EngineConfig
from isthmus.training.split_backward import SplitEngine

CONFIG = EngineConfig(micro_batches=3, micro_batch_size=2)


@functools.cache
def captured(name: str) -> Captured:
    build, columns = model(name)
    return capture_of(build, columns)


@pytest.mark.parametrize("name", [*MODELS, *CASES])
def test_the_bits_are_those_of_a_whole_backward(name: str) -> None:
    """Loss, gradients, buffers and a second step, with weight gradients as late as can be."""
    build, columns = model(name)
    data = [batches(columns, CONFIG.micro_batches, CONFIG.micro_batch_size, seed) for seed in range(2)]
    cut = random_cut(captured(name), random.Random(name))
    whole, split = (
        Pipeline(captured(name), cut, weights_of(build, captured(name)), CONFIG, split=apart) for apart in (False, True)
    )
    for number, batch in enumerate(data):
        loss, expected = whole.step(number, copies(batch))
        found, gradients = split.step(number, copies(batch))
        assert found == loss
        assert gradients.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(gradients[key], value), key
            assert gradients[key].stride() == value.stride(), key
    before = whole.state()
    assert all(torch.equal(value, before[key]) for key, value in split.state().items())


def test_the_backward_frees_what_weight_gradients_do_not_need() -> None:
    """What autograd saves in the forward is there until B; then as much as the plan says; behind W nothing."""
    build, columns = model("gpt")
    graph = captured("gpt")
    legal = [cut.position for cut in cuts(Flow(graph.train)) if len(cut.values) == 1]
    pipeline = Pipeline(graph, [legal[len(legal) // 3]], weights_of(build, graph), CONFIG, split=True)
    first, engine = pipeline.engines
    assert isinstance(engine, SplitEngine)
    (batch,) = batches(columns, 1, CONFIG.micro_batch_size)
    inputs = {Ref(pipeline.placeholders[c]): batch[c] for c in first.train.columns}
    given = first.forward(0, 0, inputs)
    taken = {c.value: given[c.value] for c in engine.train.receives}
    taken |= {Ref(pipeline.placeholders[c]): batch[c] for c in engine.train.columns}
    alive: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        alive.append(weakref.ref(copy))
        return copy

    def saved() -> int:
        return sum(reference() is not None for reference in alive)

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.forward(0, 0, taken)
    kept = saved()
    engine.backward(0, [])
    waiting = saved()
    assert 0 < waiting < kept / 2
    engine.weight_gradients(0)
    assert saved() == 0
