"""The values that a run starts from: a module built for real, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.graph.capture import Captured
from isthmus.training.checkpoint import OPTIMIZER, read_tensors


def initial_weights(build: Callable[[], nn.Module], captured: Captured, seed: int) -> dict[str, Tensor]:
    """Every variable of both graphs by the module's own name, from the module built under the seed."""
    torch.manual_seed(seed)
    module = build()
    found: dict[str, Tensor] = dict(captured.constants)
    found |= dict(module.named_buffers(remove_duplicate=False))
    found |= {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
    for op in (*captured.train.ops, *captured.eval.ops):
        if op.kind == "constant" and op.target not in found:
            found[op.target] = _attribute(module, op.target)
    return found


def _attribute(module: nn.Module, path: str) -> Tensor:
    """A tensor that is a plain attribute of a submodule."""
    value: object = module
    for part in path.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, Tensor):
        raise UserError(f"model: constant {path!r} of the captured graph is not a tensor attribute of the module")
    return value


def resume(weights: dict[str, Tensor], checkpoint: Path) -> dict[str, Tensor]:
    """The same weights with a checkpoint's values, and its optimizer state."""
    saved = read_tensors(checkpoint)
    for name, value in saved.items():
        if name.startswith(OPTIMIZER):
            continue
        if name not in weights or weights[name].shape != value.shape:
            got = list(weights[name].shape) if name in weights else "no such weight"
            raise UserError(
                f"checkpoint {checkpoint}: weight {name!r} of shape {list(value.shape)}: the model has {got}"
            )
    return weights | saved


def rest(weights: Mapping[str, Tensor], held: set[str], state_names: set[str]) -> dict[str, Tensor]:
    """Entries of the module's state that no stage holds: not an alias of one that is held."""
    shared = {weights[name].data_ptr() for name in held if name in weights and weights[name].numel()}
    found: dict[str, Tensor] = {}
    for name in sorted(state_names - held):
        tensor = weights[name]
        if tensor.numel() and tensor.data_ptr() in shared:
            continue
        shared.add(tensor.data_ptr())
        found[name] = tensor
    return found
