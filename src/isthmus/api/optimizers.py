"""torch's optimizers, read as what a job says of them."""

from __future__ import annotations

import gc
import glob
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from isthmus.errors import UserError
from isthmus.training.optim import OptimizerConfig

Optimizer = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
_HOW = frozenset({"lr", "params", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"})
"""Arguments that say how, not what, or that every optimizer has."""
_READ = {
    "sgd": frozenset({"momentum", "nesterov", "weight_decay"}),
    "adamw": frozenset({"betas", "eps", "weight_decay"}),
    "muon": frozenset({"momentum", "nesterov", "weight_decay", "adjust_lr_fn"}),
}
_IDLE: Mapping[str, object] = {
    "amsgrad": False,
    "maximize": False,
    "dampening": 0,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
}
"""Arguments that Isthmus has no setting for, and the value that is as if there were none."""
SCHEDULE_HINT = (
    ". Give the optimizer without a scheduler, and its schedule as [learning_rate]: overrides={'learning_rate': "
    "{'schedule': 'linear', 'warmup_steps': 50}}, or {'torch': 'OneCycleLR', 'options': {...}}"
)


def read_optimizer(optimizer: Optimizer, model: nn.Module) -> tuple[OptimizerConfig, ...]:
    """The settings of an optimizer of the model's parameters, of a class, or of a `functools.partial` of one.

    UserError for another algorithm than SGD, Adam, AdamW and Muon, for an argument that jobs have no setting for, for a
    parameter that is not the model's, for one that requires a gradient and is in no group (a plain loop would leave
    it as it is, a run would train it), and for what a run would not go on with: a scheduler that has the optimizer,
    state of steps that it has made, and its hooks.

    >>> read_optimizer(torch.optim.SGD, torch.nn.Linear(2, 1))[0].name
    'sgd'
    """
    made = cast("object", _made(optimizer, model) if callable(optimizer) else optimizer)
    if not isinstance(made, torch.optim.Optimizer):
        hint = SCHEDULE_HINT if isinstance(made, LRScheduler) else ""
        raise UserError(f"optimizer: got {made!r:.80}, expected an optimizer of torch.optim, or a class of one{hint}")
    _refuse_what_is_lost(made)
    groups = _named_groups(made, model)
    if len(groups) == 1:
        return (_config(made, groups[0][0], "*"),)
    return tuple(_config(made, group, glob.escape(name)) for group, names in groups for name in names)


def _refuse_what_is_lost(made: torch.optim.Optimizer) -> None:
    """UserError for what moves or changes a plain loop's steps beside the settings: a run has the settings alone."""
    if (scheduler := _scheduler_of(made)) is not None:
        rates = ", ".join(f"{_number(group['lr']):g}" for group in made.param_groups[:4])
        raise UserError(
            f"optimizer: {scheduler} moves its learning rate, which is {rates} now: a run would keep that rate"
            f"{SCHEDULE_HINT}"
        )
    if any(value is not None for state in made.state.values() for value in cast("dict[str, object]", state).values()):
        raise UserError(
            "optimizer: it has made steps, and a run would begin without its state (momentum and the like): give a new "
            "one, or a class or functools.partial, as functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # torch has no public name for them
    if "step" in vars(made) or any(getattr(made, name, None) for name in hooks):
        raise UserError("optimizer: its step has a hook or was replaced, which a run would not call: give one without")


def _scheduler_of(made: torch.optim.Optimizer) -> str | None:
    """Says which schedulers have the optimizer, or that one that is gone had it; None without any.

    Schedulers note `initial_lr` and replace `step`. ReduceLROnPlateau leaves no trace: it is found by its reference.
    """
    owners: list[object] = []
    for holder in gc.get_referrers(made, getattr(made, "optimizer", made)):  # inside accelerate's
        owners += [holder, *(gc.get_referrers(holder) if isinstance(holder, dict) else ())]
    # `isinstance` would ask lazy proxies for their class.
    names = sorted({type(owner).__name__ for owner in owners if LRScheduler in type(owner).__mro__})
    if names:
        return f"a scheduler ({', '.join(names)})"
    traced = hasattr(vars(made).get("step"), "_wrapped_by_lr_sched")
    return "a scheduler" if traced or any("initial_lr" in group for group in made.param_groups) else None


def _named_groups(made: torch.optim.Optimizer, model: nn.Module) -> list[tuple[dict[str, object], list[str]]]:
    """Each group of the optimizer, and the names of its parameters."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[tuple[dict[str, object], list[str]]] = []
    for number, group in enumerate(cast("list[dict[str, object]]", made.param_groups)):
        parameters = cast("list[nn.Parameter]", group["params"])
        if any(id(parameter) not in known for parameter in parameters):
            raise UserError(f"optimizer: group {number} has a parameter that is not the model's")
        found.append((group, [known[id(parameter)] for parameter in parameters]))
    held = {name for _, names in found for name in names}
    left = [name for name, p in model.named_parameters() if p.requires_grad and name not in held]
    if left:
        raise UserError(
            f"optimizer: does not have parameter {left[0]!r} ({len(left)} such): give it to the optimizer, or call "
            "requires_grad_(False) on it"
        )
    return found


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
    elif kind is torch.optim.Muon:
        name = "muon"
    elif kind is torch.optim.AdamW or (kind is torch.optim.Adam and (not decay or group.get("decoupled_weight_decay"))):
        name = "adamw"
    elif kind is torch.optim.Adam:
        raise UserError(f"optimizer: Adam with weight_decay {decay:g} adds it to gradients: expected AdamW, or none")
    else:
        raise UserError(f"optimizer: got {kind.__name__}, expected SGD, Adam, AdamW or Muon of torch.optim")
    given: dict[str, object] = {"name": name, "pattern": pattern, "lr": _number(group["lr"])}
    for key, value in group.items():
        if key in _READ[name]:
            given[key] = "original" if value is None else value
            continue
        known = key in _HOW or (key in _IDLE and value == _IDLE[key])
        if not known:
            raise UserError(f"optimizer: {kind.__name__}: {key}: got {value!r}, which jobs have no setting for")
    return OptimizerConfig(**cast("dict[str, float]", given))  # pyright: ignore[reportArgumentType]


def _number(value: object) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else cast(float, value))
