"""torch's optimizers, read as what a job says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn

from isthmus.errors import UserError
from isthmus.training.optim import OptimizerConfig

Optimizer = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
_HOW = frozenset({"lr", "params", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"})
"""Arguments that say how, not what, or that every optimizer has."""
_READ = {
    "sgd": frozenset({"momentum", "nesterov", "weight_decay"}),
    "adamw": frozenset({"betas", "eps", "weight_decay"}),
}
_IDLE: Mapping[str, object] = {"amsgrad": False, "maximize": False, "dampening": 0}
"""Arguments that Isthmus has no setting for, and the value that is as if there were none."""


def read_optimizer(optimizer: Optimizer, model: nn.Module) -> tuple[OptimizerConfig, ...]:
    """The settings of an optimizer of the model's parameters, of a class, or of a `functools.partial` of one.

    UserError for another algorithm than SGD, Adam and AdamW, and for an argument that jobs have no setting for.

    >>> read_optimizer(torch.optim.SGD, torch.nn.Linear(2, 1))[0].name
    'sgd'
    """
    made = _made(optimizer, model) if callable(optimizer) else optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = cast("list[dict[str, object]]", made.param_groups)
    if len(groups) == 1:
        return (_config(made, groups[0], "*"),)
    found: list[OptimizerConfig] = []
    for number, group in enumerate(groups):
        for parameter in cast("list[nn.Parameter]", group["params"]):
            if id(parameter) not in names:
                raise UserError(f"optimizer: group {number} has a parameter that is not the model's")
            found.append(_config(made, group, _exactly(names[id(parameter)])))
    return tuple(found)


def _made(make: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    try:
        return make(model.parameters())
    except TypeError as e:
        raise UserError(f"optimizer: {make!r} cannot be called with parameters: {e}") from None


def _config(made: torch.optim.Optimizer, group: Mapping[str, object], pattern: str) -> OptimizerConfig:
    kind = type(made)
    decay = cast(float, group.get("weight_decay", 0.0))
    if kind is torch.optim.SGD:
        name = "sgd"
    elif kind is torch.optim.AdamW or (kind is torch.optim.Adam and (not decay or group.get("decoupled_weight_decay"))):
        name = "adamw"
    elif kind is torch.optim.Adam:
        raise UserError(f"optimizer: Adam with weight_decay {decay:g} adds it to gradients: expected AdamW, or none")
    else:
        raise UserError(f"optimizer: got {kind.__name__}, expected SGD, Adam or AdamW of torch.optim")
    given: dict[str, object] = {"name": name, "pattern": pattern, "lr": _number(group["lr"])}
    for key, value in group.items():
        if key in _READ[name]:
            given[key] = value
            continue
        known = key in _HOW or key.startswith("initial_") or (key in _IDLE and value == _IDLE[key])
        if not known:
            raise UserError(f"optimizer: {kind.__name__}: {key}: got {value!r}, which jobs have no setting for")
    return OptimizerConfig(**cast("dict[str, float]", given))  # pyright: ignore[reportArgumentType]


def _number(value: object) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else cast(float, value))


def _exactly(name: str) -> str:
    """A pattern that this name alone matches."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
