"""Weights that a checkpoint leaves out, and their digest, which tells that they are still the same.

A fine-tuned model's weights are mostly those that it began with. Where they can be read again, as a pretrained model's
can, a checkpoint holds their digest in place of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


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


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes, in hexadecimal digits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
