"""One worker's whole state in one safetensors file: model, optimizer and sync, for a restart in the middle of a period.

Replicas differ within a period, so every worker keeps a file of its own. Learning rates and the like are the script's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isthmus.atomic_write import atomic_path
from isthmus.errors import UserError
from isthmus.sync.sync import Sync
from isthmus.training.stored import save_tensors, stored_tensors

NUMBER = " (number)"  # behind the name of what is no tensor in the optimizer's state


def save_worker(path: Path | str, model: nn.Module, optimizer: Optimizer, sync: Sync) -> None:
    """Write this worker's state, whole or not at all. To be called by every worker after the same step.

    Raises UserError for an optimizer that remembers anything but tensors and numbers, as LBFGS does.
    """
    path = Path(path)
    state = {f"model.{name}": tensor for name, tensor in _tensors(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                suffix = "" if isinstance(value, Tensor) else NUMBER
                state[f"optimizer.{name}.{key}{suffix}"] = _kept(value, optimizer, key)
    state.update({f"sync.{name}": tensor for name, tensor in sync.state_dict().items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_path(path) as new:
            save_tensors(new, state)
    except (OSError, UserError) as e:
        raise UserError(f"{path}: cannot be written: {e}") from None


@torch.no_grad()
def load_worker(path: Path | str, model: nn.Module, optimizer: Optimizer, sync: Sync) -> None:
    """Read what `save_worker` wrote, after `attach`. Raises UserError for a file that does not fit."""
    path = Path(path)
    state = stored_tensors(path)
    own = _tensors(model)
    saved = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    wrong = sorted(own.keys() ^ saved)
    if wrong:
        raise UserError(f"{path}: {wrong[0]!r} is in only one of the file and the model: same model?")
    for name, tensor in own.items():
        if state[f"model.{name}"].shape != tensor.shape:
            raise UserError(
                f"{path}: {name!r}: got shape {tuple(state[f'model.{name}'].shape)}, expected {tuple(tensor.shape)}: "
                "same model?"
            )
    sync.wait()  # what is on its way would come over what is copied
    for name, tensor in own.items():
        tensor.copy_(state[f"model.{name}"].read())
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        kept = {key.removeprefix(prefix): value.read() for key, value in state.items() if key.startswith(prefix)}
        optimizer.state.pop(parameter, None)
        if kept:
            # Counters stay on the host, as torch's optimizers make them.
            optimizer.state[parameter] = {
                key.removesuffix(NUMBER): value.item()
                if key.endswith(NUMBER)
                else value.to(parameter.device)
                if value.shape == parameter.shape
                else value
                for key, value in kept.items()
            }
    mode = {name: value for name, value in state.items() if name.startswith("sync.")}
    sync.load_state_dict({name.removeprefix("sync."): value.read() for name, value in mode.items()})


def _kept(value: object, optimizer: Optimizer, key: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise UserError(
        f"optimizer {type(optimizer).__name__}: its state {key!r} is a {type(value).__name__}: expected tensors and "
        "numbers, which a checkpoint can keep"
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
