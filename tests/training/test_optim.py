"""Optimizers by pattern, the learning-rate factor, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.errors import UserError
from isthmus.training.gradients import STRETCH, added
from isthmus.training.learning_rate import LearningRate
from isthmus.training.optim import NO_GRADIENT, OptimizerConfig, Optimizers, choose, clip, gradient_norms


def test_the_first_matching_pattern_wins():
    configs = [OptimizerConfig(pattern="*.bias"), OptimizerConfig(pattern="head.*"), OptimizerConfig()]
    assert [choose(configs, name) for name in ("head.bias", "head.weight", "body.weight")] == [0, 1, 2]
    with pytest.raises(UserError, match=r"no pattern matches parameter 'body\.weight'"):
        choose(configs[:2], "body.weight")


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        (LearningRate(), 0, 1.0),
        (LearningRate(warmup_steps=4), 0, 0.25),
        (LearningRate(warmup_steps=4), 3, 1.0),
        (LearningRate(warmup_steps=4), 50, 1.0),
        (LearningRate(schedule="cosine", final=0.1), 0, 1.0),
        (LearningRate(schedule="cosine", final=0.1), 50, 0.55),
        (LearningRate(schedule="cosine", final=0.1), 100, 0.1),
        (LearningRate(schedule="cosine", final=0.1), 200, 0.1),
        (LearningRate(schedule="linear", warmup_steps=50, final=0.2), 75, 0.6),
        (LearningRate(schedule="linear", final=0.2), 100, 0.2),
        (LearningRate(schedule="inverse-sqrt"), 0, 1.0),
        (LearningRate(schedule="inverse-sqrt", warmup_steps=4), 15, 0.5),
        (LearningRate(schedule="warmup-stable-decay", warmup_steps=4), 79, 1.0),
        (LearningRate(schedule="warmup-stable-decay", final=0.0), 90, 0.5),
        (LearningRate(schedule="warmup-stable-decay", decay_steps=10, final=0.0), 90, 1.0),
        (LearningRate(schedule="warmup-stable-decay", decay_steps=10, final=0.0), 95, 0.5),
    ],
)
def test_learning_rate_factor(schedule: LearningRate, step: int, factor: float):
    assert schedule.factor(step, 100) == pytest.approx(factor)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_has_the_bits_of_torch(max_norm: float):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (7,), (2, 2, 2), (1,), (40, 3)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    parameters[2].grad = None
    mine = [g for i, g in enumerate(gradients) if i != 2]

    expected = nn.utils.clip_grad_norm_(parameters, max_norm)
    norms = gradient_norms([None if i == 2 else g for i, g in enumerate(gradients)])
    assert norms[2] == NO_GRADIENT
    assert clip(mine, norms, max_norm) == float(expected)
    for parameter, gradient in zip([p for p in parameters if p.grad is not None], mine, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_norm_that_is_not_finite_stays_visible():
    norms = gradient_norms([torch.tensor([float("nan")]), torch.ones(2)])
    assert clip([torch.ones(2)], norms, 1.0) != clip([torch.ones(2)], norms, 1.0), "not a number"


def test_state_of_a_fresh_optimizer_is_empty_and_round_trips():
    parameters = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2))}
    made = Optimizers((OptimizerConfig(name="adamw"),), parameters)
    assert made.state() == {}
    parameters["a"].grad = torch.ones(3)
    made.step()
    state = made.state()
    assert set(state) == {"optimizer.a.step", "optimizer.a.exp_avg", "optimizer.a.exp_avg_sq"}
    other = Optimizers((OptimizerConfig(name="adamw"),), parameters)
    other.load(state)
    assert {k: v.tolist() for k, v in other.state().items()} == {k: v.tolist() for k, v in state.items()}
    assert other.state()["optimizer.a.exp_avg"] is not state["optimizer.a.exp_avg"]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_optimizers_go_on_from_others_states_and_back(name: str):
    """By default the CPU has the bits that torch's own loop has."""
    options = {"name": name, "lr": 0.01, "momentum": 0.9 if name == "sgd" else 0.0, "weight_decay": 0.1}
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(30, generator=generator), torch.randn(3, 30, generator=generator)
    found = {}
    for order in ((False, False, False), ("auto", "auto", "auto"), (False, True, False), (True, False, True)):
        parameter, state = nn.Parameter(start.clone()), {}
        for fused, gradient in zip(order, gradients, strict=True):
            optimizers = Optimizers([OptimizerConfig(fused=fused, **options)], {"w": parameter})
            optimizers.load(state)
            parameter.grad = gradient.clone()
            optimizers.step()
            state = optimizers.state()
        found[order] = parameter.detach()
    plain, alike, *fused = found.values()
    assert torch.equal(plain, alike)
    for value in fused:
        torch.testing.assert_close(value, plain, rtol=1e-6, atol=1e-7)


def test_fused_is_refused_where_torch_has_none():
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UserError, match="fused: got true for meta, which has none"):
        Optimizers([OptimizerConfig(fused=True)], {"w": parameter})


def test_decay_steps_are_of_one_schedule():
    with pytest.raises(ValueError, match="decay_steps: got it with schedule 'cosine'"):
        LearningRate(schedule="cosine", decay_steps=3)


@pytest.mark.parametrize(
    ("config", "torchs"),
    [
        (OptimizerConfig(name="sgd", lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (
            OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
        (OptimizerConfig(lr=0.1, weight_decay=0.01), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.01)),
    ],
)
def test_steps_have_the_bits_of_torch(
    config: OptimizerConfig, torchs: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
):
    """Whose own methods are not called as torch wraps them."""
    generator = torch.Generator().manual_seed(0)
    mine, expected = (nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6)) for _ in range(2))
    optimizers, optimizer = Optimizers([config], {"w": mine}), torchs([expected])
    for _ in range(4):
        mine.grad = torch.randn(4, 6, generator=generator)
        expected.grad = mine.grad.clone()
        optimizers.step()
        optimizer.step()
        assert mine.grad is None and torch.equal(mine, expected)
    kept = {key.rpartition(".")[2]: value for key, value in optimizers.state().items()}
    for key, value in optimizer.state[expected].items():
        assert (value is None and key not in kept) or torch.equal(kept[key], value), key


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator has computed."""

    elements = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,  # pyright: ignore
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("rows", [2 * STRETCH, 3 * STRETCH + 13])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_parameter_is_updated_a_stretch_at_a_time(rows: int, threads: int):
    """With the bits of the whole, and as many steps counted."""
    generator = torch.Generator().manual_seed(0)
    start, small = torch.randn(rows, generator=generator), torch.randn(3, generator=generator)
    mine, beside, expected = nn.Parameter(start.clone()), nn.Parameter(small.clone()), nn.Parameter(start.clone())
    optimizers = Optimizers([OptimizerConfig(lr=0.1, weight_decay=0.01)], {"w": mine, "b": beside})
    optimizer = torch.optim.AdamW([expected, nn.Parameter(small.clone())], 0.1, weight_decay=0.01)
    torch.set_num_threads(threads)
    try:
        for number in range(3):
            expected.grad = torch.randn(rows, generator=generator)
            mine.grad, beside.grad = expected.grad.clone(), torch.ones(3)
            optimizer.step()
            with Largest() as seen:
                optimizers.step()
            assert seen.elements == STRETCH or number == 0, "the first step makes its state"
            assert torch.equal(mine, expected)
    finally:
        torch.set_num_threads(1)
    state, expected_state = optimizers.state(), optimizer.state[expected]
    assert all(torch.equal(state[f"optimizer.w.{key}"], value) for key, value in expected_state.items())
    assert state["optimizer.b.step"] == 3


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_of_another_type_is_added_a_stretch_at_a_time(transposed: bool):
    gradient = torch.randn(STRETCH + 7, 2, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradient = gradient.t().contiguous().t() if transposed else gradient
    total = torch.full((STRETCH + 7, 2), 0.1)
    expected = total + gradient
    with Largest() as seen:
        assert added(total, gradient) is total
    assert torch.equal(total, expected) and (transposed or seen.elements == STRETCH)
