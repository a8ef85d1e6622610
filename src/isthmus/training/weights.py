"""The values that a run starts from: a module built for real, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.graph.captured import Captured
from isthmus.training.checkpoint import OPTIMIZER, attribute_of, checkpoint_files, not_persistent, split_replica
from isthmus.training.optim import NOT_OPTIMIZERS, OptimizerConfig, choose
from isthmus.training.scaling import LOSS_SCALE
from isthmus.training.stored import Sent, StoredTensor

STATE_KEYS = {"sgd": {"momentum_buffer"}, "muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}
"""The tensors that each optimizer keeps for a parameter, if any."""


def initial_weights(build: Callable[[], nn.Module], captured: Captured, seed: int) -> dict[str, Tensor]:
    """Every variable of both graphs by the module's own name, from the module built under the seed."""
    torch.manual_seed(seed)
    return weights_of(build(), captured)


def weights_of(module: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """The same of a module that is there. They share its memory. Buffers that no graph uses are there where the
    module's state_dict has them."""
    found: dict[str, Tensor] = dict(captured.constants)
    unused = not_persistent(module) - {op.target for op in (*captured.train.ops, *captured.eval.ops)}
    found |= {name: b for name, b in module.named_buffers(remove_duplicate=False) if name not in unused}
    found |= {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
    for op in (*captured.train.ops, *captured.eval.ops):
        if op.kind == "constant" and op.target not in found:
            found[op.target] = _attribute(module, op.target)
    return found


def parameter_names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter's names in the module: several of tied ones."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def _attribute(module: nn.Module, path: str) -> Tensor:
    """A tensor that is a plain attribute of a submodule."""
    value = attribute_of(module, path)
    if not isinstance(value, Tensor):
        raise UserError(f"model: constant {path!r} of the captured graph is not a tensor attribute of the module")
    return value


def resume(
    weights: Mapping[str, Sent], expected: Collection[str], optimizers: Sequence[OptimizerConfig], checkpoint: Path
) -> tuple[dict[str, Sent], dict[int, dict[str, StoredTensor]]]:
    """The same weights with a checkpoint's values, and its optimizer state; and by replica what is that one's alone.
    The checkpoint's are where they lie in its files.

    `expected` are the names that a checkpoint of this model holds. A loss scale is taken where the weights have one; a
    checkpoint of another precision has none. UserError when the checkpoint is of another model
    or its optimizer state of another optimizer.
    """
    saved: dict[int, dict[str, StoredTensor]] = {0: {}}
    for name, value in checkpoint_files(checkpoint).items():
        replica, own = split_replica(name)
        if own == LOSS_SCALE and LOSS_SCALE not in weights:
            continue
        saved.setdefault(replica, {})[own] = value
    for name in expected:
        if name not in saved[0] and name != LOSS_SCALE:
            raise UserError(f"checkpoint {checkpoint}: has no weight {name!r}: it is of another model")
    for values in saved.values():
        _check(values, weights, optimizers, checkpoint)
    return {**weights, **saved.pop(0)}, saved


def _check(
    saved: Mapping[str, Sent], weights: Mapping[str, Sent], optimizers: Sequence[OptimizerConfig], checkpoint: Path
) -> None:
    kept: dict[str, set[str]] = {}
    for name, value in saved.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            if key not in NOT_OPTIMIZERS:
                kept.setdefault(parameter, set()).add(key)
        elif name not in weights or weights[name].shape != value.shape:
            got = list(weights[name].shape) if name in weights else "no such weight"
            raise UserError(
                f"checkpoint {checkpoint}: weight {name!r} of shape {list(value.shape)}: the model has {got}"
            )
    for parameter, keys in kept.items():
        config = optimizers[choose(optimizers, parameter)]
        if keys != STATE_KEYS[config.name]:
            raise UserError(
                f"checkpoint {checkpoint}: optimizer state of {parameter!r} is {sorted(keys)}, "
                f"{config.name} keeps {sorted(STATE_KEYS[config.name])}: resume with the optimizer it was trained with"
            )
