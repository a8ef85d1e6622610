"""Many steps: parameters, optimizer state and buffers of a cut model follow those of the plain module."""

from __future__ import annotations

import random

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, module_of, optimizers_of, random_cut, weights_of
from tests.tiers import represented_by
from tests.training.reference import reference_loss, reference_step, reference_update
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Counted, Dropouts, Frozen, UsedThrice, X, Zoo, model

from isthmus.errors import InternalError
from isthmus.graph import Flow, cuts
from isthmus.training import engine
from isthmus.training.engine import EngineConfig
from isthmus.training.optim import LearningRate, OptimizerConfig

STEPS = 20
SGD = OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAMW = OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1)
COSINE = LearningRate(schedule="cosine", warmup_steps=4)


def config(*optimizers: OptimizerConfig, clip_norm: float = 0.0, **options: object) -> EngineConfig:
    return EngineConfig(
        optimizers=optimizers,
        learning_rate=COSINE,
        clip_norm=clip_norm,
        steps=STEPS,
        micro_batches=2,
        micro_batch_size=2,
        **options,
    )


def own_names(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("name", "optimizer", "clip_norm"),
    [
        ("gpt", SGD, 0.5),
        pytest.param("gpt", ADAMW, 0.0, marks=pytest.mark.long),
        pytest.param("cnn", SGD, 0.0, marks=pytest.mark.long),
        ("cnn", ADAMW, 0.5),
        pytest.param("Frozen", SGD, 0.5, marks=pytest.mark.long),
        ("Frozen", ADAMW, 0.5),
        pytest.param("Counted", SGD, 0.5, marks=pytest.mark.long),
        ("Counted", ADAMW, 0.0),
    ],
)
def test_parameters_after_many_steps(name: str, optimizer: OptimizerConfig, clip_norm: float):
    build, columns = model(name)
    found = capture_of(build, columns)
    settings = config(optimizer, clip_norm=clip_norm)
    pipeline = Pipeline(found, random_cut(found, random.Random(1)), weights_of(build, found), settings)
    assert pipeline.sums_in_order
    module = module_of(build)
    optimizers = optimizers_of(module, settings)
    for number in range(STEPS):
        data = batches(columns, 2, 2, number)
        loss, _ = pipeline.step(number, data)
        pipeline.update(number)
        expected, _ = reference_step(module, data, settings)
        reference_update(module, optimizers, number, settings)
        assert loss == expected, number
    state = pipeline.state()
    own = own_names(module)
    for parameter in found.train.trainable:
        assert torch.equal(state[parameter], own[parameter]), parameter
    for key, value in optimizers.state().items():
        assert torch.equal(state[key], value), key
    data = batches(columns, 2, 2, 99)
    assert pipeline.evaluate(data) == reference_loss(module, data)


def test_optimizers_by_name_pattern_and_a_shared_parameter():
    settings = config(
        OptimizerConfig(name="sgd", pattern="head.*", lr=0.2),
        OptimizerConfig(name="adamw", pattern="*.bias", lr=0.02),
        OptimizerConfig(name="sgd", lr=0.05, momentum=0.5),
        clip_norm=1.0,
    )
    found = capture_of(UsedThrice, X)
    assert found.train.trainable == tuple(n for n, _ in module_of(UsedThrice).named_parameters() if "third" not in n)
    legal = [c.position for c in cuts(Flow(found.train))]
    pipeline = Pipeline(found, [legal[0], legal[4], legal[-2]], weights_of(UsedThrice, found), settings)
    assert any(len(users) > 1 for s in pipeline.stages for users in s.shared_with.values()), (
        "one is used in three stages"
    )
    module = module_of(UsedThrice)
    optimizers = optimizers_of(module, settings)
    for number in range(STEPS):
        data = batches(X, 2, 2, number)
        pipeline.step(number, data)
        pipeline.update(number)
        reference_step(module, data, settings)
        reference_update(module, optimizers, number, settings)
    state = pipeline.state()
    for name, value in own_names(module).items():
        if "third" not in name:  # unused: no stage has it
            assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6), name
    assert not any("third" in name for name in state)


def test_tokens_are_weighted_equally_whatever_their_micro_batch():
    found = capture_of(Counted, X)
    data = batches(X, 2, 2)
    data[0]["y"][:] = torch.tensor([0, 3])
    data[1]["y"][:] = torch.tensor([1, 2])
    module = module_of(Counted)
    joined = {k: torch.cat([b[k] for b in data]) for k in X}
    told = module(**joined)
    mean = told["loss"] / told["count"]
    mean.backward()
    for cut in ([], [2], [len(Flow(found.train).operators) - 1]):
        pipeline = Pipeline(found, cut, weights_of(Counted, found), config(SGD))
        loss, gradients = pipeline.step(0, data)
        assert loss == pytest.approx(mean.item(), rel=1e-6)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                assert torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6), name


def test_a_step_that_counts_nothing_changes_nothing():
    found = capture_of(Counted, X)
    data = batches(X, 2, 2)
    for batch in data:
        batch["y"].zero_()
    pipeline = Pipeline(found, [3], weights_of(Counted, found), config(OptimizerConfig(name="sgd", lr=1.0)))
    before = pipeline.state()
    before = {n: v.clone() for n, v in before.items()}
    assert pipeline.step(0, data)[0] == 0.0
    pipeline.update(0)
    assert all(torch.equal(v, before[n]) for n, v in pipeline.state().items())


class CountedByNumber(Zoo):
    """The count is a Python number that depends on the batch."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        loss = F.cross_entropy(self.head(self.first(x).flatten(1)), y, reduction="sum")
        return loss, y.shape[0] * 6


def test_the_count_may_be_a_number():
    found = capture_of(CountedByNumber, X)
    assert found.train.batch is None and found.train.count is not None
    data = batches(X, 2, 2)
    pipeline = Pipeline(found, [1], weights_of(CountedByNumber, found), config(SGD))
    loss, gradients = pipeline.step(0, data)
    module = module_of(CountedByNumber)
    expected, expected_gradients = reference_step(module, data, config(SGD))
    assert loss == expected
    assert all(torch.equal(gradients[n], g) for n, g in expected_gradients.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_stage_takes_the_same_gradients_one_by_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    build, columns = model("gpt")
    found, states = capture_of(build, columns, dtype), list[dict[str, Tensor]]()
    for large_bytes in (engine.LARGE_BYTES, 0):
        monkeypatch.setattr(engine, "LARGE_BYTES", large_bytes)
        pipeline = Pipeline(found, random_cut(found, random.Random(5)), weights_of(build, found), config(ADAMW))
        for number in range(3):
            pipeline.step(number, batches(columns, 2, 2, number))
            pipeline.update(number)
        states.append(pipeline.state())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


@pytest.mark.parametrize("name", represented_by(["gpt", "cnn"], "cnn"))
def test_half_precision(name: str):
    build, columns = model(name)
    found = capture_of(build, columns, torch.bfloat16)
    parameters = [op for op in found.train.ops if op.kind == "parameter"]
    assert {op.outputs[0].dtype for op in parameters} == {"bfloat16"}
    settings = config(ADAMW, clip_norm=1.0)
    uncut = Pipeline(found, [], weights_of(build, found), settings)
    pipeline = Pipeline(found, random_cut(found, random.Random(5)), weights_of(build, found), settings)
    assert pipeline.sums_in_order
    before = {n: v.clone() for n, v in pipeline.state().items()}
    half = [
        {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()} for batch in batches(columns, 2, 2)
    ]
    for number in range(5):
        assert pipeline.step(number, half)[0] == uncut.step(number, half)[0]
        pipeline.update(number)
        uncut.update(number)
    state = pipeline.state()
    for key, value in uncut.state().items():
        assert torch.equal(state[key], value), key
    for key in found.train.trainable:
        assert state[key].dtype is torch.float32
        assert not torch.equal(state[key], before[key])
        assert not torch.equal(state[key], state[key].bfloat16().float()), "finer than half precision"


def test_state_moves_to_another_cut():
    """What one cut saves, another takes up: the next steps have the same bits."""
    build, columns = model("cnn")
    found = capture_of(build, columns)
    settings = config(ADAMW)
    first = Pipeline(found, [3, 6], weights_of(build, found), settings)
    for number in range(3):
        first.step(number, batches(columns, 2, 2, number))
        first.update(number)
    second = Pipeline(found, [5], weights_of(build, found) | first.state(), settings)
    for number in range(3, 6):
        data = batches(columns, 2, 2, number)
        assert first.step(number, data)[0] == second.step(number, data)[0]
        first.update(number)
        second.update(number)
    again = second.state()
    assert all(torch.equal(again[key], value) for key, value in first.state().items())


def test_evaluation_changes_nothing():
    build, columns = model("Written")
    found = capture_of(build, columns)
    pipeline = Pipeline(found, [1], weights_of(build, found), config(SGD))
    pipeline.step(0, copies(batches(columns, 2, 2)))
    before = {n: v.clone() for n, v in pipeline.state().items()}
    pipeline.evaluate(batches(columns, 2, 2, 1))
    assert all(torch.equal(v, before[n]) for n, v in pipeline.state().items())


def test_parameters_without_gradient_are_left_out_of_the_norm_and_of_decay():
    """`Frozen` takes no gradient into its first layer, and a detached branch gives its layer none."""

    class Detached(Frozen):
        def __init__(self) -> None:
            super().__init__()
            self.unreached = nn.Linear(8, 8)

        def body(self, x: Tensor) -> Tensor:
            return super().body(x) + self.unreached(x).detach()

    found = capture_of(Detached, X)
    settings = config(OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.5), clip_norm=0.01)
    pipeline = Pipeline(found, [3, 6], weights_of(Detached, found), settings)
    module = module_of(Detached)
    optimizers = optimizers_of(module, settings)
    for number in range(3):
        data = batches(X, 2, 2, number)
        pipeline.step(number, data)
        pipeline.update(number)
        reference_step(module, data, settings)
        reference_update(module, optimizers, number, settings)
    state = pipeline.state()
    assert not {"embed.weight", "unreached.weight"} & state.keys()
    for name in found.train.trainable:
        assert torch.equal(state[name], own_names(module)[name]), name
    untouched = module_of(Detached).unreached.weight
    assert torch.equal(module.unreached.weight, untouched), "eager optimizers pass it over as well"


def test_a_missing_value_names_the_variable():
    found = capture_of(Dropouts, X)
    weights = weights_of(Dropouts, found)
    del weights["second.bias"]
    with pytest.raises(InternalError, match=r"no value was placed for parameter 'second\.bias'"):
        Pipeline(found, [], weights, config(SGD))
