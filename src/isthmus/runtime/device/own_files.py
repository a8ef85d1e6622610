"""Weights that a device reads from files of its own: a folder of the job's path, or the Hugging Face cache.

Neither a path nor the name of a file in the cache proves anything: a tensor is taken if its bytes have the digest that
the coordinator computed of its own. The coordinator of another owner may name files below the folder where the device
runs, and files of the cache by their commit; it learns only whether they are those that it has.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

import torch
from torch import Tensor

from isthmus.data.within import check_within, confined_to
from isthmus.errors import UserError
from isthmus.protocol.run_messages import FileTensor, WeightFile
from isthmus.training.stored import StoredTensor, stored_tensors

COMMIT = re.compile("[0-9a-f]{40}")


def own_weights(files: Sequence[WeightFile], *, foreign: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that are here, and by name those that are not, each with the reason. `foreign`: another owner's
    coordinator asks, who is not to see the reasons."""
    found: dict[str, Tensor] = {}
    lacking: dict[str, str] = {}
    for file in files:
        try:
            there = stored_tensors(_located(file, foreign))
        # ValueError: of an id that no hub knows; RuntimeError: of the home of a user who is not here.
        except (UserError, OSError, ImportError, ValueError, RuntimeError) as e:
            lacking |= dict.fromkeys((asked.name for asked in file.tensors), str(e))
            continue
        for asked in file.tensors:
            try:
                found[asked.name] = _read(asked, there)
            except (UserError, OSError) as e:
                lacking[asked.name] = str(e)
    return found, lacking


def _located(file: WeightFile, foreign: bool) -> Path:
    path = Path(file.model).expanduser() / file.file
    if ".." in PurePath(file.file).parts or PurePath(file.file).is_absolute():
        raise UserError(f"{file.file}: expected a file below the model's folder")
    if file.commit:
        if not COMMIT.fullmatch(file.commit):
            raise UserError(f"{file.model}: commit {file.commit!r}, expected 40 hexadecimal digits")
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  # an extra

        cached = try_to_load_from_cache(file.model, file.file, revision=file.commit)
        if not isinstance(cached, str):
            raise UserError(f"{file.model}: {file.file} of commit {file.commit[:12]} is not in this device's cache")
        path = Path(cached)
    elif foreign:
        if file.model.startswith("~") or PurePath(file.model).is_absolute() or ".." in PurePath(file.model).parts:
            raise UserError(f"{file.model}: another owner's coordinator names no file outside of this folder")
        with confined_to(Path.cwd()):
            check_within(path)
    if not path.name.endswith(".safetensors") or not path.is_file():
        raise UserError(f"{path}: no such file here")
    return path


def _read(asked: FileTensor, there: Mapping[str, StoredTensor]) -> Tensor:
    stored = there.get(asked.key)
    if stored is None or (stored.header.dtype, stored.header.shape) != (asked.dtype, asked.shape):
        raise UserError(f"tensor {asked.key!r} is not in the file, or of another type or shape")
    tensor = stored.read()
    if hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest() != asked.sha256:
        raise UserError(f"{stored.path}: tensor {asked.key!r} has other bytes than the coordinator's")
    return tensor.to(getattr(torch, asked.cast)) if asked.cast else tensor
