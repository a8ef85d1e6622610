"""float16 with a scaled loss: the bits of torch's own GradScaler on one process, whatever the cut."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from in_process import Pipeline, batches, capture_of, module_of, random_cut, weights_of
from tests.tiers import represented_by
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import X, model

from isthmus.graph.outputs import split_outputs
from isthmus.training.engine import EngineConfig
from isthmus.training.optim import OptimizerConfig
from isthmus.training.scaling import LossScale, LossScaling

STEPS = 14


class Steep(nn.Module):
    """Gradients that overflow float16 at large scales, and the loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)[:, :4]))
        # A mean of its own: a mean that `cross_entropy` takes would be captured as a sum, whose gradients are larger.
        return F.cross_entropy(self.head(hidden * 30).float(), y.flatten()[: len(x)] % 3, reduction="none").mean()


def test_it_moves_as_torchs_scaler() -> None:
    settings = {"init_scale": 3.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2}
    ours = LossScale(LossScaling(**settings))
    theirs = torch.amp.GradScaler("cpu", **settings)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.0)
    for bad in [0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0]:
        assert ours.value == theirs.get_scale()
        theirs.scale(torch.zeros(()))
        parameter.grad = torch.full((1,), math.inf if bad else 1.0)
        theirs.step(optimizer)
        theirs.update()
        (ours.left_out if bad else ours.updated)()
        ours = LossScale(LossScaling(**settings), ours.state())
    assert ours.value == theirs.get_scale()


def scaled_loop(build, data, settings: EngineConfig) -> tuple[dict[str, Tensor], list[float]]:
    """fp32 masters of a half module, with torch's own GradScaler; the weights, and the scale after each step."""
    assert settings.loss_scaling is not None
    chosen = settings.loss_scaling
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=chosen.init_scale,
        growth_factor=chosen.growth_factor,
        backoff_factor=chosen.backoff_factor,
        growth_interval=chosen.growth_interval,
    )
    module = module_of(build)
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in module.named_parameters()}
    module.half()
    (one,) = settings.optimizers
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[one.name](masters.values(), lr=one.lr, weight_decay=0.0)
    scales: list[float] = []
    for number in range(STEPS):
        counted = 0.0
        for batch in data(number):
            module.zero_grad()
            loss, count, _ = split_outputs(module(**batch))
            counted += 0.0 if count is None else float(count)
            scaler.scale(loss if count is not None else loss / settings.micro_batches).backward()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    gradient, master = parameter.grad.float(), masters[name]
                    master.grad = gradient if master.grad is None else master.grad + gradient
        scaler.unscale_(optimizer)
        for master in masters.values():
            if master.grad is not None and counted:
                master.grad.div_(counted)
        if settings.clip_norm:
            nn.utils.clip_grad_norm_(masters.values(), settings.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(masters[name])
        scales.append(scaler.get_scale())
    return {name: master.detach() for name, master in masters.items()}, scales


def scaled_run(pipeline: Pipeline, data, first: int, last: int) -> list[float]:
    """As workers do: left out everywhere where one stage's norms are not finite. The scale after each step."""
    scales: list[float] = []
    for number in range(first, last):
        pipeline.step(number, data(number))
        if all(norm.isfinite() for norm in pipeline.norms.values()):
            pipeline.update(number)
        else:
            for engine in pipeline.engines:
                engine.skip_update()
        (scale,) = {e.loss_scale.value for e in pipeline.engines if e.loss_scale is not None}
        scales.append(scale)
    return scales


def halves(columns):
    def data(number: int) -> list[dict[str, Tensor]]:
        return [
            {k: v.half() if v.is_floating_point() else v for k, v in batch.items()}
            for batch in batches(columns, 2, 2, number)
        ]

    return data


@pytest.mark.parametrize(
    ("name", "clip_norm"), represented_by([("gpt", 0.5), ("cnn", 0.0), ("steep", 0.5)], ("steep", 0.5))
)
def test_bits_of_torchs_scaler(name: str, clip_norm: float) -> None:
    build, columns = (Steep, X) if name == "steep" else model(name)
    found = capture_of(build, columns, torch.float16)
    optimizer = OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.0)
    settings = EngineConfig(
        optimizers=(optimizer,),
        clip_norm=clip_norm,
        steps=STEPS,
        micro_batches=2,
        micro_batch_size=2,
        loss_scaling=LossScaling(init_scale=2.0**24, growth_interval=2),
    )
    data = halves(columns)
    expected, scales = scaled_loop(build, data, settings)
    assert scales[0] == 2.0**23, "the first step overflows"
    assert any(b > a for a, b in itertools.pairwise(scales)), "and later ones do not"
    for cut in ([], random_cut(found, random.Random(3))):
        pipeline = Pipeline(found, cut, weights_of(build, found), settings)
        assert scaled_run(pipeline, data, 0, STEPS) == scales
        state = pipeline.state()
        for parameter, value in expected.items():
            if parameter in state:
                assert torch.equal(state[parameter], value), parameter
