"""Checkpoints: one directory per saved step, complete or absent.

    checkpoints/
      step-000040/
        manifest.json        step, plan's stages, what each file holds
        stage-0.safetensors  weights under the module's own names, `optimizer.<parameter>.<key>` beside them
        stage-1.safetensors
        rest.safetensors     what no stage uses or changes, so that the plain module loads completely
      latest                 name of the newest complete directory

Parts are written into a hidden directory, which is renamed when all are there; a crash leaves the last one whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from isthmus.errors import UserError

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer."


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds and what a resumed run must agree with."""

    version: int = 1
    step: int
    """Optimizer steps done."""
    seed: int
    batch: int
    files: dict[str, tuple[str, ...]]
    """File -> names of its tensors."""
    data: dict[str, str] = {}
    """Fingerprints of the data, by split."""


class CheckpointWriter:
    """Gathers the parts of one checkpoint after another under a directory."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        """`keep`: how many complete checkpoints to leave; older ones are removed after a newer one is complete."""
        self._directory = directory
        self._keep = keep
        self._files: dict[str, tuple[str, ...]] = {}

    def _partial(self, step: int) -> Path:
        return self._directory / f".step-{step:06d}"

    def write(self, step: int, part: str, tensors: Mapping[str, Tensor]) -> None:
        """One part (`stage-0`, `rest`), flushed to disk."""
        folder = self._partial(step)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{part}.safetensors"
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, folder / name)
        _flush(folder / name)
        self._files[name] = tuple(tensors)

    def commit(self, step: int, *, seed: int, batch: int, data: Mapping[str, str]) -> Path:
        """All parts are written: make them the latest checkpoint, atomically."""
        manifest = Manifest(step=step, seed=seed, batch=batch, files=self._files, data=dict(data))
        folder, final = self._partial(step), self._directory / f"step-{step:06d}"
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        _flush(folder / MANIFEST)
        if final.exists():
            shutil.rmtree(final)
        folder.rename(final)
        pointer = self._directory / ".latest"
        pointer.write_text(final.name)
        _flush(pointer)
        pointer.rename(self._directory / "latest")
        _flush(self._directory)
        self._files = {}
        for old in sorted(self._directory.glob("step-*"))[: -self._keep]:
            if old != final:
                shutil.rmtree(old)
        return final


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def latest_checkpoint(directory: Path) -> Path:
    """The newest complete checkpoint under `directory`; UserError when there is none."""
    pointer = directory / "latest"
    if pointer.is_file():
        return directory / pointer.read_text().strip()
    complete = sorted(p for p in directory.glob("step-*") if (p / MANIFEST).is_file())
    if not complete:
        raise UserError(f"checkpoint: {directory}: nothing saved there yet")
    return complete[-1]


def read_manifest(checkpoint: Path) -> Manifest:
    """UserError when the manifest is missing or broken, or a file of it is missing."""
    try:
        manifest = msgspec.json.decode((checkpoint / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise UserError(f"checkpoint {checkpoint}: no {MANIFEST}: not a complete checkpoint") from None
    except msgspec.MsgspecError as e:
        raise UserError(f"checkpoint {checkpoint}: {MANIFEST}: {e}") from None
    for name in manifest.files:
        if not (checkpoint / name).is_file():
            raise UserError(f"checkpoint {checkpoint}: file {name} is missing")
    return manifest


def read_tensors(checkpoint: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors by name (all by default); UserError for a truncated or altered file."""
    found: dict[str, Tensor] = {}
    for name, listed in read_manifest(checkpoint).files.items():
        wanted = [t for t in listed if names is None or t in names]
        try:
            with safe_open(checkpoint / name, framework="pt") as file:
                for tensor in wanted:
                    found[tensor] = file.get_tensor(tensor)
        except (SafetensorError, OSError) as e:
            raise UserError(f"checkpoint {checkpoint}: file {name} is truncated or not a tensor file: {e}") from None
    return found


def load_checkpoint(module: nn.Module, checkpoint: Path) -> int:
    """Fill a plain module with a checkpoint's weights; returns the step. Tied parameters are filled once.

    UserError when a weight of the checkpoint is not in the module, or has another shape.
    """
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, value in read_tensors(checkpoint).items():
            if name.startswith(OPTIMIZER):
                continue
            if name not in own:
                raise UserError(f"checkpoint {checkpoint}: weight {name!r} is not in {type(module).__name__}")
            if own[name].shape != value.shape:
                raise UserError(
                    f"checkpoint {checkpoint}: weight {name!r} has shape {list(value.shape)}, "
                    f"expected {list(own[name].shape)}"
                )
            own[name].copy_(value)
    return read_manifest(checkpoint).step
