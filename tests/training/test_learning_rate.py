"""Torch's schedulers by name: what training sets in each step is what torch's own sets in a plain loop."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from isthmus.errors import UserError
from isthmus.training.learning_rate import LearningRate, schedulers
from isthmus.training.optim import OptimizerConfig, Optimizers, settings_of

STEPS = 40
SGD = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9)
ADAMW = OptimizerConfig(name="adamw", lr=0.05)


def halving(step: int) -> float:
    return 0.5 ** (step // 7)


def shrinking(step: int) -> float:
    return 1.0 - 0.5 / (step + 1)


HERE = "tests.training.test_learning_rate"
OPTIONS: dict[str, dict[str, object]] = {
    "ChainedScheduler": {
        "schedulers": [
            {"torch": "ConstantLR", "options": {"factor": 0.1, "total_iters": 3}},
            {"torch": "ExponentialLR", "options": {"gamma": 0.9}},
        ]
    },
    "ConstantLR": {"factor": 0.5, "total_iters": 6},
    "CosineAnnealingLR": {"T_max": 12, "eta_min": 0.001},
    "CosineAnnealingWarmRestarts": {"T_0": 5, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4, "mode": "exp_range", "gamma": 0.97},
    "ExponentialLR": {"gamma": 0.95},
    "LambdaLR": {"lr_lambda": f"{HERE}:halving"},
    "LinearLR": {"start_factor": 0.2, "total_iters": 9},
    "MultiStepLR": {"milestones": [3, 11, 12], "gamma": 0.3},
    "MultiplicativeLR": {"lr_lambda": f"{HERE}:shrinking"},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": STEPS, "pct_start": 0.25},
    "PolynomialLR": {"total_iters": 30, "power": 1.5},
    "SequentialLR": {
        "schedulers": [
            {"torch": "LinearLR", "options": {"start_factor": 0.1, "total_iters": 5}},
            {"torch": "LambdaLR", "options": {"lr_lambda": f"{HERE}:halving"}},
            {"torch": "CosineAnnealingLR", "options": {"T_max": 15}},
        ],
        "milestones": [5, 20],
    },
    "StepLR": {"step_size": 4, "gamma": 0.7},
}


def theirs(optimizer: torch.optim.Optimizer, name: str, options: dict[str, object]) -> lr_scheduler.LRScheduler:
    made = dict(options)
    if "schedulers" in made:
        made["schedulers"] = [theirs(optimizer, one["torch"], one["options"]) for one in made["schedulers"]]
    if "lr_lambda" in made:
        made["lr_lambda"] = globals()[str(made["lr_lambda"]).partition(":")[2]]
    return getattr(lr_scheduler, name)(optimizer=optimizer, **made)


def plain_loop(config: OptimizerConfig, rate: LearningRate) -> tuple[torch.Tensor, list[dict[str, object]]]:
    """The weights after a loop as torch's documents have it, and the group's settings in each step."""
    parameter = nn.Parameter(torch.ones(3))
    kind = torch.optim.SGD if config.name == "sgd" else torch.optim.AdamW
    extra = {"momentum": config.momentum} if config.name == "sgd" else {"weight_decay": config.weight_decay}
    optimizer = kind([parameter], lr=config.lr, **extra)
    scheduler = theirs(optimizer, rate.torch, rate.options)
    found: list[dict[str, object]] = []
    for step in range(STEPS):
        group = optimizer.param_groups[0]
        found.append({key: group[key] for key in ("lr", "momentum", "betas") if key in group})
        parameter.grad = torch.tensor([1.0, -0.5, 0.1]) * (1 + step % 3)
        optimizer.step()
        scheduler.step() if step + 1 < STEPS else None
    return parameter.detach(), found


def test_every_scheduler_of_torch_is_compared() -> None:
    assert list(OPTIONS) == schedulers()


@pytest.mark.parametrize("config", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_and_weights_have_the_bits_of_torch(name: str, config: OptimizerConfig) -> None:
    rate = LearningRate(torch=name, options=OPTIONS[name])
    expected, settings = plain_loop(config, rate)

    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(rate.tabled(STEPS)), type=LearningRate)  # as a device gets it
    ask = settings_of(config, sent, STEPS)
    assert [dict(ask(step)) for step in range(STEPS)] == settings
    assert len({str(one["lr"]) for one in settings}) > 1
    for step in (7, 30, 0, STEPS - 1):  # resumed, gone back
        assert settings_of(config, sent, STEPS)(step) == ask(step) == settings[step]

    parameter = nn.Parameter(torch.ones(3))
    optimizers = Optimizers([config], {"w": parameter}, sent, STEPS)
    for step in range(STEPS):
        parameter.grad = torch.tensor([1.0, -0.5, 0.1]) * (1 + step % 3)
        optimizers.step(step)
    assert torch.equal(parameter, expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "ReduceLROnPlateau",
            {},
            "learning_rate.torch: ReduceLROnPlateau needs a metric, expected a scheduler by step",
        ),
        ("OneCycle", {}, "unknown learning_rate.torch 'OneCycle': did you mean 'OneCycleLR'?"),
        ("StepLR", {"step": 3}, "unknown learning_rate option of StepLR 'step': did you mean 'step_size'?"),
        ("StepLR", {"step_size": 3, "last_epoch": 4}, "unknown learning_rate option of StepLR 'last_epoch'"),
        ("StepLR", {}, "learning_rate: StepLR: .*missing 1 required positional argument: 'step_size'"),
        ("OneCycleLR", {"max_lr": 1.0}, "learning_rate: OneCycleLR: You must define either total_steps OR"),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 9}, r"total_steps: got 9, expected training.steps \(40\)"),
        ("LambdaLR", {"lr_lambda": 3}, "LambdaLR: lr_lambda: got 3, expected 'package.module:function'"),
        ("LambdaLR", {"lr_lambda": "no_such:f"}, "lr_lambda 'no_such:f': cannot import no_such"),
        ("CyclicLR", {"base_lr": 1, "max_lr": 2, "scale_fn": "a:b"}, "CyclicLR: scale_fn: got a function"),
        ("SequentialLR", {"schedulers": "StepLR", "milestones": []}, "schedulers: got 'StepLR', expected a list"),
        ("SequentialLR", {"schedulers": [{"name": "StepLR"}]}, "expected a table with torch and options"),
        ("ChainedScheduler", {"schedulers": [{"torch": "ReduceLROnPlateau"}]}, "ReduceLROnPlateau needs a metric"),
    ],
)
def test_what_cannot_be_is_one_line(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        settings_of(SGD, LearningRate(torch=name, options=options).tabled(STEPS), STEPS)
    assert "\n" not in str(caught.value)


def test_momentum_cycles_only_where_there_is_one() -> None:
    rate = LearningRate(torch="OneCycleLR", options=OPTIONS["OneCycleLR"])
    bare = msgspec.structs.replace(SGD, momentum=0.0)
    with pytest.raises(UserError, match="OneCycleLR: it cycles momentum, and the optimizer has none"):
        settings_of(bare, rate, STEPS)
    without = msgspec.structs.replace(rate, options={**rate.options, "cycle_momentum": False})
    assert settings_of(bare, without, STEPS)(0)["momentum"] == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('torch = "StepLR"\nwarmup_steps = 3', "torch: got it with a schedule or warmup_steps"),
        ('schedule = "cosine"\noptions = {gamma = 1}', "options: got some without the key torch"),
    ],
)
def test_keys_that_do_not_go_together(text: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.toml.decode(text, type=LearningRate)
