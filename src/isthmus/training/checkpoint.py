"""Checkpoints: one directory per saved step, complete or absent.

    checkpoints/
      step-000040/
        manifest.json        step, what a resumed run must agree with, what each file holds, all with digests
        stage-0.safetensors  weights under the module's own names, `optimizer.<parameter>.<key>` beside them
        stage-1.safetensors
        stage-2.1f0c93ab.safetensors   not here: its device wrote it to the run's store, as the manifest says
        replica-1-stage-0.safetensors  what another replica holds that differs from the first's: `replica.1.<name>`
      rest.safetensors     what no stage uses or changes, so that the plain module loads completely; of a model whose
                           pretrained weights stay as they are, their digest is in the manifest instead
      latest                 name of the newest complete directory, for people and scripts

A part is written to disk as it arrives, into a hidden file. Parts of a step move into a hidden directory, which is
renamed when all are there and on disk; a crash at any point leaves the checkpoints before it whole. Readers take the
newest complete directory and do not depend on `latest`. What a disk did to a file afterwards is noticed by its digest:
a flipped bit in a weight is a weight to any other reader.

Weights that a checkpoint leaves out, and their digest, which tells that they are still the same.

A fine-tuned model's weights are mostly those that it began with. Where they can be read again, as a pretrained model's
can, a checkpoint holds their digest in place of them.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import torch
from msgspec import UNSET, Meta, UnsetType
from torch import Tensor, nn

from isthmus.accelerators.copies import Fill
from isthmus.atomic_write import atomic_write, flush
from isthmus.errors import UserError
from isthmus.protocol.decoupled_events import MergesDone
from isthmus.protocol.run_messages import WeightFile, WrittenPart
from isthmus.reading import read_json
from isthmus.run_files import MANIFEST, newest_whole, write_json
from isthmus.stores import StoreFile
from isthmus.training.layout import TensorHeader, row_stride
from isthmus.training.scaling import LOSS_SCALE
from isthmus.training.stored import (
    PIECE_BYTES,
    Sent,
    StoredTensor,
    TensorFile,
    place_of,
    save_tensors,
    stored_tensors,
    witness_of,
)

SentT = TypeVar("SentT", bound=Sent)


def rest(weights: Mapping[str, SentT], held: set[str], state_names: set[str]) -> dict[str, SentT]:
    """Entries of the module's state that no stage holds: not an alias of one that is held."""
    shared = {place_of(weights[name]) for name in held if name in weights and weights[name].nbytes}
    found: dict[str, SentT] = {}
    for name in sorted(state_names - held):
        tensor = weights[name]
        if tensor.nbytes and place_of(tensor) in shared:
            continue
        shared.add(place_of(tensor))
        found[name] = tensor
    return found


def digest_of(tensors: Mapping[str, Sent]) -> str:
    """SHA-256 of names, types, shapes and bytes, in hexadecimal digits. What is in files is read a piece at a time; of
    what is in stores it is of what these say of the bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for piece in witness_of(tensor):
            found.update(piece)
    return found.hexdigest()


Named = Callable[[dict[str, StoredTensor]], dict[str, StoredTensor]]
LANDING = ".landing-"
OPTIMIZER = "optimizer."
_REPLICA = re.compile(r"replica\.(\d+)\.")
"""A module's own name cannot begin so: `replica_prefix` is distinguished by a number in second place."""


def replica_prefix(replica: int) -> str:
    """Before the names of what a replica but the first holds alone."""
    return f"replica.{replica}."


def split_replica(name: str) -> tuple[int, str]:
    """The replica whose tensor this is, and its own name."""
    found = _REPLICA.match(name)
    return (int(found[1]), name[found.end() :]) if found else (0, name)


class SavedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tensors: tuple[str, ...]  # names
    sha256: str  # the digest of its bytes, in hexadecimal digits
    stored: WeightFile | UnsetType = UNSET
    """Where a device wrote it: in a store, from which it is read unless it lies beside the manifest."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a checkpoint, and the settings that a resumed run must agree with."""

    version: Literal[5] = 5
    step: Annotated[int, Meta(ge=0)]  # optimizer steps done
    seed: int
    batch: int
    shuffle: bool = True
    data: dict[str, dict[str, str]] = {}
    """Reports of devices on their samples by device and split, each under the device's own key."""
    finite: bool = True  # whether its weights are
    merges: MergesDone | UnsetType = UNSET  # of replicas that never wait, whose step is that of all samples
    base: str = ""
    """Digest of the weights that are left out, since they are read again where they came from; empty: none are."""
    files: dict[str, SavedFile] = {}
    sha256: str = ""  # the digest of all other fields

    def sealed(self) -> Manifest:
        """With the digest that belongs to it."""
        bare = msgspec.structs.replace(self, sha256="")
        return msgspec.structs.replace(self, sha256=hashlib.sha256(msgspec.json.encode(bare)).hexdigest())


class LandedPart:
    """A part that is on disk and of no checkpoint yet. Its file is removed with it, unless a writer keeps it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: SavedFile | Exception = FileNotFoundError("nothing has landed")
        self.forget = weakref.finalize(self, path.unlink, missing_ok=True)


class CheckpointWriter:
    """Gathers the parts of checkpoints under a directory; several steps may be in the making at once."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        """`keep`: how many complete checkpoints to leave; older ones are removed after a newer one is complete, but for
        the newest whose weights are finite.

        What an earlier writer left unfinished is removed: a directory has one writer.
        """
        self.directory = directory
        self.in_use: Path | None = None  # resolved: a checkpoint that is read from yet, which is not removed
        self._keep = keep
        self._files: dict[int, dict[str, SavedFile]] = {}
        self._landings = itertools.count()
        for left in directory.glob(f"{LANDING}*"):
            left.unlink()
        self.discard()

    def discard(self) -> None:
        """Give up what is unfinished."""
        self._files.clear()
        for unfinished in self.directory.glob(".step-*"):
            shutil.rmtree(unfinished)

    def at(self, step: int) -> Path:
        """Where the checkpoint of a step is, once it is complete."""
        return self.directory / f"step-{step:06d}"

    def _partial(self, step: int) -> Path:
        return self.directory / f".step-{step:06d}"

    def write(self, step: int, part: str, tensors: Mapping[str, Sent]) -> None:
        """One part (`stage-0`, `rest`), flushed to disk. UserError when it cannot be written."""
        landed = self._landing()
        try:
            landed.saved = SavedFile(tensors=tuple(tensors), sha256=save_tensors(landed.path, tensors))
        except (OSError, UserError) as e:
            landed.saved = e
        self.keep(step, part, landed)

    def land(self, headers: Sequence[TensorHeader], fill: Fill, prefix: str = "") -> LandedPart:
        """A part as it arrives, `prefix` before its tensors' names; flushed to disk. Any thread. What `fill` raises
        leaves nothing. An error of the disk is for `keep` to raise: all that comes is received."""
        landed = self._landing()
        headers = [msgspec.structs.replace(h, name=prefix + h.name) for h in headers]
        file, memory = TensorFile(landed.path, headers), memoryview(bytearray(PIECE_BYTES))
        try:
            for header in headers:
                file.put(header, _arriving(header.nbytes, fill, memory))
            landed.saved = SavedFile(tensors=tuple(h.name for h in headers), sha256=file.finish())
        except (OSError, UserError) as e:
            landed.saved = e
        finally:
            file.close()
        return landed

    def keep(self, step: int, part: str, landed: LandedPart) -> None:
        """Make what has landed a part of the step's checkpoint. UserError when it could not be written."""
        folder = self._partial(step)
        name = f"{part}.safetensors"
        try:
            if isinstance(landed.saved, Exception):
                raise landed.saved
            folder.mkdir(parents=True, exist_ok=True)
            landed.path.rename(folder / name)
        except (OSError, UserError) as e:
            raise UserError(f"checkpoint {folder / name}: cannot be written: {e}") from None
        landed.forget.detach()
        self._files.setdefault(step, {})[name] = landed.saved

    def keep_written(self, step: int, name: str, written: WrittenPart) -> None:
        """Make a file that a device wrote to the run's store a part of the step's checkpoint."""
        tensors = tuple(tensor.key for tensor in written.file.tensors)
        saved = SavedFile(tensors=tensors, sha256=written.sha256, stored=written.file)
        self._files.setdefault(step, {})[name] = saved

    def give_up(self, step: int) -> None:
        """There will be no checkpoint of this step."""
        self._files.pop(step, None)
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def _landing(self) -> LandedPart:
        return LandedPart(self.directory / f"{LANDING}{next(self._landings)}")

    def commit(self, manifest: Manifest) -> Path:
        """All parts of the manifest's step are written: make them a checkpoint, atomically. Fills in `files`.
        UserError when it cannot be written."""
        complete = msgspec.structs.replace(manifest, files=self._files.pop(manifest.step, {}))
        try:
            final = self._renamed(complete)
        except OSError as e:
            folder = self._partial(manifest.step)
            raise UserError(f"checkpoint {folder}: cannot be written: {e.strerror or e}") from None
        # Later ones are of a line that is given up, or torn: they are no reason to lose one of this line.
        ours = [path for step, path in _complete(self.directory) if step <= manifest.step]
        finite = next((path for path in reversed(ours) if _says_finite(path)), None)
        for old in ours[: -self._keep]:
            if old != finite and old.resolve() != self.in_use:
                shutil.rmtree(old)
        return final

    def _renamed(self, manifest: Manifest) -> Path:
        folder, final = self._partial(manifest.step), self.at(manifest.step)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / MANIFEST, manifest.sealed())
        if final.exists():  # not from this run, or it would have gone on from there
            shutil.rmtree(final)
        folder.rename(final)
        flush(self.directory)
        atomic_write(self.directory / "latest", final.name.encode())
        return final


def _arriving(count: int, fill: Fill, memory: memoryview) -> Iterator[memoryview]:
    """So many bytes, piece by piece in the same memory."""
    for at in range(0, count, memory.nbytes):
        piece = memory[: count - at]
        fill(piece)
        yield piece


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _complete(directory: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by step, oldest first."""
    found = ((p.name.removeprefix("step-"), p) for p in directory.glob("step-*") if (p / MANIFEST).is_file())
    return sorted((int(number), path) for number, path in found if number.isdecimal())


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint under `directory`, if there is one."""
    complete = _complete(directory)
    return complete[-1][1] if complete else None


def checkpoint_before(directory: Path, step: int) -> tuple[int, Path | None]:
    """The newest complete checkpoint of an earlier step, and its step; 0 and None where there is none."""
    earlier = [found for found in _complete(directory) if found[0] < step]
    return earlier[-1] if earlier else (0, None)


def newest_whole_checkpoint(directory: Path, passed_over: Callable[[str], None], *, finite: bool = True) -> Path | None:
    """The newest checkpoint whose every byte is as it was saved, and whose weights are `finite` if that matters; None
    when nothing was ever saved.

    `passed_over` gets the reason of each newer one. UserError when none of those that are there is whole: to begin
    anew is for the user to say.
    """

    def checked(checkpoint: Path) -> Path:
        manifest = read_manifest(checkpoint)
        for name in manifest.files:
            _check_bytes(checkpoint, name, manifest)
        if finite and not manifest.finite:
            raise UserError(f"checkpoint {checkpoint}: its weights are not finite")
        return checkpoint

    return newest_whole((path for _, path in reversed(_complete(directory))), checked, passed_over)


def _says_finite(checkpoint: Path) -> bool:
    try:
        return read_manifest(checkpoint).finite
    except UserError:
        return False


def _in_store(checkpoint: Path, name: str, manifest: Manifest) -> WeightFile | None:
    """The file in a store that a file of a checkpoint is; None of one that lies here."""
    stored = manifest.files[name].stored
    return None if isinstance(stored, UnsetType) or (checkpoint / name).is_file() else stored


def _store_file(file: WeightFile) -> StoreFile:
    return StoreFile(file.model, file.file, file.size, file.version)


def left_in_store(manifest: Path, url: str) -> frozenset[str]:
    """Names of a checkpoint's files that devices wrote to the store at this URL, from which they can be read. None of
    a manifest that cannot be read."""
    try:
        files = read_json(manifest, Manifest).files
    except (UserError, OSError):
        return frozenset()
    stored = {name: file.stored for name, file in files.items() if not isinstance(file.stored, UnsetType)}
    return frozenset(name for name, there in stored.items() if there.model == url)


def _file_tensors(checkpoint: Path, name: str, manifest: Manifest) -> dict[str, StoredTensor]:
    """The tensors of a file, where they are; UserError for a truncated one."""
    if (there := _in_store(checkpoint, name, manifest)) is None:
        return stored_tensors(checkpoint / name)
    store = _store_file(there)
    return {
        t.key: StoredTensor(
            TensorHeader(t.key, t.dtype, t.shape, row_stride(t.shape)),
            checkpoint / name,
            t.offset,
            t.key,
            store=store,
            sha256=t.sha256,
        )
        for t in there.tensors
    }


def _check_bytes(checkpoint: Path, name: str, manifest: Manifest) -> None:
    """UserError unless a file is as it was saved. In a store, by what that says of its contents: the digests are
    compared when tensors are read."""
    if (there := _in_store(checkpoint, name, manifest)) is not None:
        _store_file(there).check()
        return
    try:
        digest = _digest(checkpoint / name)
    except OSError as e:
        raise UserError(f"checkpoint {checkpoint}: file {name} cannot be read: {e.strerror or e}") from None
    if digest != manifest.files[name].sha256:
        raise UserError(f"checkpoint {checkpoint}: file {name} is not as it was saved: truncated or altered since")


def latest_checkpoint(directory: Path) -> Path:
    """The newest complete checkpoint under `directory`; UserError when there is none."""
    found = newest_checkpoint(directory)
    if found is None:
        raise UserError(f"checkpoint: {directory}: nothing saved there yet")
    return found


def read_manifest(checkpoint: Path) -> Manifest:
    """UserError when the manifest is missing, broken or of another step than its directory; when a file is missing."""
    try:
        manifest = read_json(checkpoint / MANIFEST, Manifest, f"checkpoint {checkpoint}: {MANIFEST}")
    except FileNotFoundError:
        raise UserError(f"checkpoint {checkpoint}: no {MANIFEST}: not a complete checkpoint") from None
    if manifest != manifest.sealed():
        raise UserError(f"checkpoint {checkpoint}: {MANIFEST} is not as it was saved: altered since")
    number = checkpoint.name.removeprefix("step-")
    if number.isdecimal() and int(number) != manifest.step:
        raise UserError(f"checkpoint {checkpoint}: {MANIFEST}: step: got {manifest.step}, another than its directory's")
    for name in manifest.files:
        if _in_store(checkpoint, name, manifest) is None and not (checkpoint / name).is_file():
            raise UserError(f"checkpoint {checkpoint}: file {name} is missing")
    return manifest


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Tensors by name, in memory; UserError for a truncated or altered file."""
    return {name: stored.read() for name, stored in checkpoint_files(checkpoint).items()}


def checkpoint_files(checkpoint: Path) -> dict[str, StoredTensor]:
    """Tensors by name, where they lie in its files; UserError for a truncated or altered file."""
    found: dict[str, StoredTensor] = {}
    manifest = read_manifest(checkpoint)
    for name, file in manifest.files.items():
        _check_bytes(checkpoint, name, manifest)
        there = _file_tensors(checkpoint, name, manifest)
        if absent := sorted(set(file.tensors) - there.keys()):
            raise UserError(f"checkpoint {checkpoint}: file {name} does not hold what its manifest says: {absent[0]}")
        found |= {tensor: there[tensor] for tensor in file.tensors}
    return found


def check_shapes(checkpoint: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """UserError for a checkpoint that lacks one of these tensors, or has it in another shape. Nothing else is read."""
    found: dict[str, StoredTensor] = {}
    manifest = read_manifest(checkpoint)
    for name in manifest.files:
        found |= _file_tensors(checkpoint, name, manifest)
    for tensor, shape in shapes.items():
        if tensor not in found:
            raise UserError(f"checkpoint {checkpoint}: has no weight {tensor!r}: it is of another model")
        if found[tensor].shape != shape:
            got = f"of shape {list(found[tensor].shape)}: the model has {list(shape)}"
            raise UserError(f"checkpoint {checkpoint}: weight {tensor!r} {got}")


def checkpoint_weights(checkpoint: Path) -> dict[str, StoredTensor]:
    """Weights and buffers of the first replica by own names; of tied ones, one. UserError as for `checkpoint_files`."""
    return {
        name: value
        for name, value in checkpoint_files(checkpoint).items()
        if not name.startswith(OPTIMIZER) and name != LOSS_SCALE and not _REPLICA.match(name)
    }


def load_checkpoint(
    module: nn.Module,
    checkpoint: Path,
    named: Named = lambda weights: weights,
    in_files: Mapping[str, StoredTensor] | None = None,
) -> int:
    """Fill a plain module with a checkpoint's weights; returns the step. Tied parameters are filled once. `named` gives
    the weights that are the module's, under its own names; `in_files` are values of the module that are in files and
    not in it. UserError as `weights_of_module`, and when weights that the checkpoint leaves out are not those it was
    made with.
    """
    manifest = read_manifest(checkpoint)
    found = weights_of_module(module, checkpoint, named)
    with torch.no_grad():
        for own, stored in found.items():
            own.copy_(stored.read())
    if manifest.base:
        own = variables_of(module)
        kept, held = own.keys() - not_persistent(module), {name for name, tensor in own.items() if tensor in found}
        values: dict[str, Sent] = {**own, **(in_files or {})}
        check_base(manifest, digest_of(rest(values, held, kept)), checkpoint)
    return manifest.step


def weights_of_module(
    module: nn.Module, checkpoint: Path, named: Named = lambda weights: weights
) -> dict[Tensor, StoredTensor]:
    """A checkpoint's values of a plain module's parameters and buffers, which may be on the meta device; of tied ones
    once.

    UserError when a weight of the checkpoint is not in the module or has another shape, and when a parameter of the
    module is not in the checkpoint, which has not left any out.
    """
    own, kind = variables_of(module), type(module).__name__
    found: dict[Tensor, StoredTensor] = {}
    for name, value in named(checkpoint_weights(checkpoint)).items():
        if name not in own and isinstance(attribute_of(module, name), Tensor):
            continue  # earlier versions saved them: they are as the module was built
        if name not in own:
            raise UserError(f"checkpoint {checkpoint}: weight {name!r} is not in {kind}")
        if own[name].shape != value.shape:
            raise UserError(
                f"checkpoint {checkpoint}: weight {name!r} has shape {list(value.shape)}, "
                f"expected {list(own[name].shape)}"
            )
        found[own[name]] = value
    left_out = () if read_manifest(checkpoint).base else module.named_parameters()
    for name, parameter in left_out:
        if parameter not in found:
            raise UserError(f"checkpoint {checkpoint}: holds no value for {name!r} of {kind}")
    return found


def variables_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def not_persistent(module: nn.Module) -> set[str]:
    """Names of the buffers that its state_dict leaves out: `register_buffer(..., persistent=False)`."""
    return {
        f"{path}.{key}" if path else key
        for path, part in module.named_modules(remove_duplicate=False)
        for key in part._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    }


def attribute_of(module: nn.Module, path: str) -> object:
    """Return a submodule's attribute by its path; None where there is none."""
    value: object = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def check_base(manifest: Manifest, digest: str, checkpoint: Path) -> None:
    """UserError where the weights that a checkpoint leaves out are now others, by their digest."""
    if digest != manifest.base:
        raise UserError(
            f"checkpoint {checkpoint}: the pretrained weights are not those it was made with: they were changed where "
            "they are read from, or are of another model"
        )
