"""A cut model computes what the plain module computes: bit for bit where every sum keeps its order."""

from __future__ import annotations

import functools
import random
import weakref

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, module_of, random_cut, weights_of
from tests.tiers import represented_by
from tests.training.reference import reference_loss, reference_step
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from zoo import CASES, MODELS, SENTENCE, Dropouts, X, model

from isthmus.graph import Ref
from isthmus.graph.captured import Captured
from isthmus.training.engine import EngineConfig

CONFIG = EngineConfig(micro_batches=3, micro_batch_size=2)
CUTS = 3
SLOW = {"Recurrent", "Encoder", "hf-bert", "hf-llama", "unet"}
FUSED_IN_EVAL = {"Encoder"}
"""Eager evaluation runs a fused kernel where gradients are off."""


@functools.cache
def captured(name: str) -> Captured:
    build, columns = model(name)
    return capture_of(build, columns)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], *, bitwise: bool) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if bitwise:
            assert torch.equal(got[name], value), name
        else:
            assert (got[name] - value).norm() <= 1e-6 * value.norm() + 1e-12, name


@pytest.mark.parametrize("seed", represented_by(range(CUTS), 0))
@pytest.mark.parametrize("name", represented_by([*MODELS, *CASES], *({*MODELS, *CASES} - SLOW)))
def test_loss_gradients_and_buffers_equal_the_plain_module(name: str, seed: int):
    build, columns = model(name)
    data = batches(columns, CONFIG.micro_batches, CONFIG.micro_batch_size, seed)
    cut = random_cut(captured(name), random.Random(seed))
    pipeline = Pipeline(captured(name), cut, weights_of(build, captured(name)), CONFIG)
    module = module_of(build)

    loss, gradients = pipeline.step(0, copies(data))
    expected_loss, expected = reference_step(module, copies(data), CONFIG)

    assert loss == expected_loss
    assert_equal(gradients, expected, bitwise=pipeline.sums_in_order)
    buffers = dict(module.named_buffers())
    written = {n: v for n, v in pipeline.state().items() if n in buffers}
    assert_equal(written, {n: buffers[n] for n in written}, bitwise=True)

    expected_loss = reference_loss(module, copies(data))
    exact = name not in FUSED_IN_EVAL
    assert pipeline.evaluate(copies(data)) == (expected_loss if exact else pytest.approx(expected_loss, rel=1e-6))


@pytest.mark.parametrize("name", [*MODELS, *CASES])
def test_recomputing_and_weight_gradients_apart_change_no_bit(name: str):
    """Loss, gradients, buffers and a second step are those of stages that keep what they save and do each backward
    whole, whoever recomputes, and with weight gradients as late as can be."""
    build, columns = model(name)
    data = [batches(columns, CONFIG.micro_batches, CONFIG.micro_batch_size, seed) for seed in range(2)]
    generator = random.Random(name)
    cut = random_cut(captured(name), generator)
    some = [generator.random() < 0.5 for _ in cut]
    found = [
        Pipeline(captured(name), cut, weights_of(build, captured(name)), CONFIG, recompute=recompute)
        for recompute in ((), [True] * (len(cut) + 1), [not any(some), *some])
    ]
    found.append(Pipeline(captured(name), cut, weights_of(build, captured(name)), CONFIG, split=True))
    steps = [[pipeline.step(number, copies(d)) for number, d in enumerate(data)] for pipeline in found]
    for pipeline, told in zip(found[1:], steps[1:], strict=True):
        assert [loss for loss, _ in told] == [loss for loss, _ in steps[0]]
        for (_, gradients), (_, expected) in zip(told, steps[0], strict=True):
            assert_equal(gradients, expected, bitwise=True)
        assert_equal(pipeline.state(), found[0].state(), bitwise=True)


def test_recomputing_drops_what_the_forward_saved():
    """Between forward and backward only what was received is kept: nothing that autograd saved is still alive."""
    build, columns = model("gpt")
    (batch,) = batches(columns, 1, 2)
    inputs = {Ref(op.name): batch[op.target] for op in captured("gpt").train.ops if op.kind == "placeholder"}

    def saved_and_alive(recompute: bool) -> list[bool]:
        alive: list[weakref.ref[Tensor]] = []

        def pack(tensor: Tensor) -> Tensor:
            copy = tensor.detach().clone()
            alive.append(weakref.ref(copy))
            return copy

        weights = weights_of(build, captured("gpt"))
        (engine,) = Pipeline(captured("gpt"), [], weights, CONFIG, recompute=[recompute]).engines
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            engine.forward(0, 0, inputs)
        return [reference() is not None for reference in alive]

    assert len(saved_and_alive(False)) == len(saved_and_alive(True)) > 10
    assert all(saved_and_alive(False)) and not any(saved_and_alive(True))


def test_the_claims_above_are_not_empty():
    """The random cuts make stages with sums in order and others, and batch norm's buffers are among those compared."""
    orders = {
        Pipeline(
            captured(n), random_cut(captured(n), random.Random(s)), weights_of(model(n)[0], captured(n)), CONFIG
        ).sums_in_order
        for n in ("gpt", "gpt-tied", "unet")
        for s in range(CUTS)
    }
    assert orders == {True, False}
    build, _ = model("cnn")
    state = Pipeline(captured("cnn"), [3], weights_of(build, captured("cnn")), CONFIG).state()
    assert any(name.endswith("running_mean") for name in state)
    assert any(name.endswith("num_batches_tracked") for name in state)


@pytest.mark.parametrize("seed", range(3))
def test_an_attention_mask_without_zeros(seed: int):
    """Eager BERT drops such a mask and runs a kernel without one; a graph keeps it, so only the bits may differ."""
    build, columns = model("hf-bert")
    data = batches(columns, 3, 2, seed)
    for batch in data:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    cut = random_cut(captured("hf-bert"), random.Random(seed))
    pipeline = Pipeline(captured("hf-bert"), cut, weights_of(build, captured("hf-bert")), CONFIG)
    uncut = Pipeline(captured("hf-bert"), [], weights_of(build, captured("hf-bert")), CONFIG)
    loss, gradients = pipeline.step(0, data)
    uncut_loss, uncut_gradients = uncut.step(0, data)
    assert loss == uncut_loss
    assert_equal(gradients, uncut_gradients, bitwise=pipeline.sums_in_order)
    expected_loss, expected = reference_step(module_of(build), data, CONFIG)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, value in expected.items():
        assert (gradients[name] - value).norm() <= 1e-5 * value.norm() + 1e-7, name


def test_an_attention_mask_with_the_columns_left_out():
    build, _ = model("hf-bert")
    columns = {n: c for n, c in SENTENCE.items() if n in ("input_ids", "labels")}
    found = capture_of(build, columns)
    data = batches(columns, 3, 2)
    pipeline = Pipeline(found, random_cut(found, random.Random(0)), weights_of(build, found), CONFIG)
    loss, gradients = pipeline.step(0, data)
    expected_loss, expected = reference_step(module_of(build), data, CONFIG)
    assert loss == expected_loss
    assert_equal(gradients, expected, bitwise=pipeline.sums_in_order)


@pytest.mark.parametrize("seed", range(4))
def test_random_operators_do_not_depend_on_the_cut(seed: int):
    found = capture_of(Dropouts, X)
    data = batches(X, 3, 2)
    uncut = Pipeline(found, [], weights_of(Dropouts, found), CONFIG)
    pipeline = Pipeline(found, random_cut(found, random.Random(seed)), weights_of(Dropouts, found), CONFIG)
    first = [uncut.step(number, data) for number in range(2)]
    assert [pipeline.step(number, data)[0] for number in range(2)] == [loss for loss, _ in first]
    assert_equal(pipeline.step(1, data)[1], first[1][1], bitwise=True)
    assert first[0][0] != first[1][0], "another step draws other numbers"
    other = Pipeline(found, [], weights_of(Dropouts, found), EngineConfig(micro_batches=3, micro_batch_size=2, seed=7))
    assert other.step(0, data)[0] != first[0][0], "another seed draws other numbers"


def test_drawing_leaves_the_process_generator_alone():
    found = capture_of(Dropouts, X)
    pipeline = Pipeline(found, [], weights_of(Dropouts, found), CONFIG)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    pipeline.step(0, batches(X, 3, 2))
    assert torch.equal(torch.rand(4), expected)
