"""Exports of a run's model, which may be pushed to the Hugging Face hub that HF_ENDPOINT names, with the token
HF_TOKEN."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from isthmus.api.folder import RunFolder
from isthmus.api.given import is_given
from isthmus.api.run_job import program_of
from isthmus.api.stored_run import local_copy
from isthmus.documents import follow_umask
from isthmus.errors import UserError
from isthmus.extensions import import_extra, import_object
from isthmus.job import Job
from isthmus.job.first_weights import tensors_of
from isthmus.models import (
    ModelSpec,
    build_model,
    has_bottlenecks,
    has_subspace,
    is_hugging_face,
    is_peft,
    merged,
    model_on_meta,
    save_adapter,
    save_hugging_face,
    taken_off,
    widened,
)
from isthmus.models.hugging_face import BESIDE_WEIGHTS
from isthmus.models.left_in_files import NotInFiles, left_in_files
from isthmus.models.model_folder import WEIGHTS
from isthmus.models.registry import own_names
from isthmus.runtime.decoupled.merged_run import seeded_model
from isthmus.stores import is_url
from isthmus.training.checkpoint import (
    OPTIMIZER,
    checkpoint_files,
    checkpoint_weights,
    latest_checkpoint,
    load_checkpoint,
    read_manifest,
    variables_of,
    weights_of_module,
)
from isthmus.training.distributed_tensors import METADATA, distributed_tensors
from isthmus.training.optim import NOT_OPTIMIZERS
from isthmus.training.stored import Sent, StoredTensor, save_tensors

SaveDistributed = Callable[[Path, Mapping[str, Sent], Mapping[str, Sent]], None]


class Exported(NamedTuple):
    directory: Path
    done: int  # the model is that after so many `unit`; of a folder of torch.distributed.checkpoint it has so many
    unit: str

    @property
    def words(self) -> str:
        after = "the model's" if self.unit == "tensors" else "the model after"
        return f"{after} {self.done} {self.unit}"


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    merge: bool = False  # of LoRA the base model with the adapter added
    max_shard_size: str | None = None  # of a Hugging Face model's files, as "5GB"; None: as transformers has it
    format: Literal["safetensors", "dcp"] = "safetensors"  # dcp: a folder of torch.distributed.checkpoint
    optimizer: bool = False  # of dcp, the optimizer's state too

    def __post_init__(self) -> None:
        if self.optimizer and self.format != "dcp":
            raise UserError("export: --optimizer: is for --format dcp")
        if self.format == "dcp" and self.max_shard_size is not None:
            raise UserError("export: --format dcp: takes no --max-shard-size")
        if self.optimizer and self.merge:
            raise UserError("export: --optimizer: is for what was trained, expected it without --merge")
        size = self.max_shard_size
        if size is not None and not re.fullmatch(r"[1-9]\d*(\.\d+)?[KMGT]B", size):
            raise UserError(f"export: --max-shard-size: got {size!r}, expected a size such as 5GB")


AS_IT_IS = ExportOptions()


def export_model(run: str | Path, directory: Path, options: ExportOptions = AS_IT_IS) -> tuple[Exported, list[str]]:
    """The newest checkpoint or last federated round, in a Hugging Face directory when the model is one, else as
    safetensors; and what could not be read. Of LoRA the adapter. `run` is a folder or the URL of a run's store. Of a
    folder of torch.distributed.checkpoint the model's tensors, as safetensors."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"export: {directory} exists and is not an empty directory")
    if not is_url(str(run)) and (Path(run) / METADATA).is_file():
        return _from_distributed(Path(run), directory, options), []
    with local_copy(run) as path:
        return _export(RunFolder.existing(path), directory, options)


def push_model(
    run: str | Path, name: str, options: ExportOptions = AS_IT_IS, *, public: bool = False
) -> tuple[Exported, list[str], str]:
    """Export a model as `export_model` does, into a repository of the Hugging Face hub; return its address."""
    hub = HubRepository(name, public=public)
    with tempfile.TemporaryDirectory() as temporary:
        found, notes = export_model(run, Path(temporary), options)
        return found, notes, hub.push(found.directory, f"{found.words}, by Isthmus")


def _export(folder: RunFolder, directory: Path, options: ExportOptions) -> tuple[Exported, list[str]]:
    notes: list[str] = []
    job = folder.any_job()
    if options.merge and job.model.lora is None:
        raise UserError("export: --merge: the run's model has no LoRA, expected a job with [model.lora]")
    if options.format == "dcp":
        return _export_distributed(folder, directory, options, notes), notes
    if isinstance(job, Job) and is_given(job):
        return _export_given(folder, job.model.name, directory), notes
    tokenizer = "bytes" if job.data is None else job.data.located.get("tokenizer", "bytes")
    tokenizer_dir = Path(str(tokenizer)) if tokenizer != "bytes" else None
    unit = job.LENGTH.rpartition(".")[2]
    if isinstance(job, Job) and (step := _streamed(folder, job, directory, tokenizer_dir, options)) is not None:
        return Exported(directory, step, unit), notes
    by_adapter = job.model.base_is_kept and not options.merge
    adapted = _adapted(folder, job) if by_adapter and isinstance(job, Job) else None
    module, done = (adapted[0], adapted[2]) if adapted else program_of(job).trained(folder, notes.append)
    if options.merge:
        module = merged(module)
    model = job.model
    if has_subspace(module):
        model = _without_boundary(model)
        module = widened(module, build_model(model))
    library = is_hugging_face(module) and not is_peft(module) and not has_bottlenecks(module)
    if options.max_shard_size is not None and not library:
        raise UserError("export: --max-shard-size: the run's model is none of transformers, or LoRA without --merge")
    with _whole(directory):
        if is_peft(module):
            save_adapter(module, directory, tokenizer_dir)
        elif library:
            save_hugging_face(module, directory, tokenizer_dir, max_shard_size=options.max_shard_size)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            save_model(module, str(directory / "model.safetensors"))  # knows ties: `load_model` restores them
            follow_umask(directory / "model.safetensors")
            (directory / "model.json").write_bytes(msgspec.json.encode(model))
    return Exported(directory, done, unit), notes


def _from_distributed(folder: Path, directory: Path, options: ExportOptions) -> Exported:
    """The tensors of the dictionary `model`, or of all where none is called so, and what lies beside them of a
    transformers model."""
    if options != AS_IT_IS:
        raise UserError("export: a folder of torch.distributed.checkpoint is written as safetensors, without options")
    tensors = distributed_tensors(folder)
    places = {keys[:-1] for keys in tensors}
    chosen = [keys for keys in places if keys[-1:] == ("model",)] or [()]
    if len(chosen) > 1 or chosen[0] not in places:
        got = ", ".join(sorted(repr(".".join(keys)) for keys in places))
        got = f"tensors in {got}" if got else "no tensors"
        raise UserError(f"export: {folder}: got {got}, expected those of one 'model', or of no dictionary")
    found = {keys[-1]: tensor for keys, tensor in tensors.items() if keys[:-1] == chosen[0]}
    with _whole(directory):
        save_tensors(directory / WEIGHTS, found, {"format": "pt"})
        for name in BESIDE_WEIGHTS:
            if (folder / name).is_file():
                shutil.copy(folder / name, directory / name)
    return Exported(directory, len(found), "tensors")


def _adapted(folder: RunFolder, job: Job) -> tuple[nn.Module, dict[str, StoredTensor], int] | None:
    """A model with LoRA whose pretrained weights are left in their files, these by name, and its step; None where they
    cannot be."""
    checkpoint = latest_checkpoint(folder.checkpoints)
    try:
        with left_in_files() as stand_ins:
            module = seeded_model(job)
            in_files = tensors_of(stand_ins, variables_of(module))
        for tensor in module.parameters():
            if tensor.requires_grad:  # the checkpoint has its values
                tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
    except NotInFiles:
        return None
    return module, in_files, load_checkpoint(module, checkpoint, in_files=in_files)


def _export_distributed(folder: RunFolder, directory: Path, options: ExportOptions, notes: list[str]) -> Exported:
    """The module's state dict, a tensor at a time where a checkpoint has it; of LoRA, unless it is merged, what was
    trained alone."""
    job = folder.any_job()
    state: dict[str, StoredTensor] = {}
    whole = _merged(folder, job) if options.merge and isinstance(job, Job) else None
    if whole is not None:
        plain, found, done = whole
        own = variables_of(plain)
        values = {name: found[own[name]] for name in plain.state_dict()}
    elif isinstance(job, Job) and not options.merge:
        checkpoint = latest_checkpoint(folder.checkpoints)
        values: dict[str, Sent] = {**_state_dict(job, checkpoint, as_saved=options.optimizer)}
        done = read_manifest(checkpoint).step
        if options.optimizer:
            saved = checkpoint_files(checkpoint)
            state = {
                n: t for n, t in saved.items() if n.startswith(OPTIMIZER) and n.rpartition(".")[2] not in NOT_OPTIMIZERS
            }
    else:
        module, done = program_of(job).trained(folder, notes.append)
        values = {**(merged(module) if options.merge else module).state_dict()}
        if is_peft(module) and not options.merge:
            own = variables_of(module)
            values = {name: value for name, value in values.items() if own[name].requires_grad}
    if options.optimizer and not state:
        raise UserError("export: --optimizer: the run has saved no optimizer state")
    # Imported when it is needed: torch's package takes long.
    save = import_object("isthmus", "isthmus.training.distributed_checkpoint:save_distributed")
    with _whole(directory):
        cast("SaveDistributed", save)(directory, values, state)
        model = msgspec.structs.replace(job.model, lora=None)
        whole_model = model.boundary is None and (job.model.lora is None or options.merge)
        if whole_model and model.name.startswith("hf"):  # with it the folder can be a start again
            cast("Any", model_on_meta(model)).config.save_pretrained(directory)
    return Exported(directory, done, job.LENGTH.rpartition(".")[2])


def _state_dict(job: Job, checkpoint: Path, *, as_saved: bool) -> dict[str, StoredTensor]:
    """The state dict of the job's module, tied names too; of one that was given, what the checkpoint has, and of LoRA
    what is trained. `as_saved`: in the checkpoint's types, in which the optimizer has them, else in the module's."""
    if is_given(job):
        return own_names(job.model.name, checkpoint_weights(checkpoint))
    module = model_on_meta(job.model)
    found, own = weights_of_module(module, checkpoint), variables_of(module)
    names = [name for name in module.state_dict() if own[name].requires_grad or not is_peft(module)]
    if lacking := next((name for name in names if own[name] not in found), None):
        raise UserError(f"checkpoint {checkpoint}: holds no value for {lacking!r}")
    return {name: found[own[name]] if as_saved else found[own[name]].cast(own[name].dtype) for name in names}


def _merged(folder: RunFolder, job: Job) -> tuple[nn.Module, dict[Tensor, Sent], int] | None:
    """The base model of a pretrained one with LoRA, on the meta device, each of its tensors' values, merged when it
    is read, and the checkpoint's step. None where that cannot be done."""
    if not job.model.base_is_kept or (adapted := _adapted(folder, job)) is None:
        return None
    module, in_files, step = adapted
    saved = weights_of_module(module, latest_checkpoint(folder.checkpoints))
    own = {tensor: saved.get(tensor, in_files.get(name, tensor)) for name, tensor in variables_of(module).items()}
    plain = model_on_meta(msgspec.structs.replace(job.model, lora=None))
    try:
        base, changes = taken_off(module)
    except NotInFiles:
        return None
    found: dict[Tensor, Sent] = {}
    sources, there = dict[Tensor, Tensor](), variables_of(base)
    for name, tensor in variables_of(plain).items():
        source = there[name]
        if sources.setdefault(tensor, source) is not source:
            return None  # the class ties what the adapter has apart
        value, change = own[source], changes.get(source)
        if isinstance(value, Tensor):
            found[tensor] = value.to(tensor.dtype) if change is None else change(value.to(tensor.dtype))
        else:
            found[tensor] = value.cast(tensor.dtype) if change is None else value.cast(tensor.dtype).changed(change)
    return plain, found, step


class _Computed(Exception):
    """The library computes a weight of the export from several of the module's."""


def _streamed(
    folder: RunFolder, job: Job, directory: Path, tokenizer_dir: Path | None, options: ExportOptions
) -> int | None:
    """Export a Hugging Face model as it is in the newest checkpoint, a tensor at a time; return the checkpoint's step.
    None where that cannot be done."""
    if job.model.boundary is not None:
        return None
    if job.model.lora is None:
        module, checkpoint = model_on_meta(job.model), latest_checkpoint(folder.checkpoints)
        if not is_hugging_face(module):
            return None
        found: dict[Tensor, Sent] = {t: s.cast(t.dtype) for t, s in weights_of_module(module, checkpoint).items()}
        step = read_manifest(checkpoint).step
    else:
        if not options.merge or (whole := _merged(folder, job)) is None or not is_hugging_face(whole[0]):
            return None
        module, found, step = whole

    def write(tensors: dict[str, Tensor], path: str, metadata: dict[str, str]) -> None:
        if any(tensor not in found for tensor in tensors.values()):
            raise _Computed
        save_tensors(Path(path), {name: found[t] for name, t in tensors.items()}, metadata)

    try:
        with _whole(directory):
            save_hugging_face(module, directory, tokenizer_dir, max_shard_size=options.max_shard_size, write_file=write)
    except _Computed:
        return None
    return step


@contextlib.contextmanager
def _whole(directory: Path) -> Generator[None]:
    """UserError for what cannot be written, a full disk say. Nothing of it stays: the command can be given again."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        shutil.rmtree(directory, ignore_errors=True)
        reason = (e.strerror or e) if isinstance(e, OSError) else e
        raise UserError(f"export: {directory}: cannot be written: {reason}") from None


def _without_boundary(model: ModelSpec) -> ModelSpec:
    """Return the plain model with the same function: its head is untied."""
    options = {key: value for key, value in model.options.items() if key != "tie_embedding"}
    return msgspec.structs.replace(model, boundary=None, options=options)


def _export_given(folder: RunFolder, model: str, directory: Path) -> Exported:
    """The weights of a Python object, which the folder does not hold."""
    checkpoint = latest_checkpoint(folder.checkpoints)
    weights = own_names(model, checkpoint_weights(checkpoint))
    with _whole(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_tensors(directory / "model.safetensors", weights)
    return Exported(directory, read_manifest(checkpoint).step, "steps")


class HubRepository:
    """A repository of this name, to push to. UserError for a name that is none, and where no token is known."""

    def __init__(self, name: str, *, public: bool = False) -> None:
        """`public` is of a repository that is made: one that is there stays as it is."""
        if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
            raise UserError(f"--push: got {name!r}, expected USER/NAME")
        self._hub: Any = import_extra("huggingface_hub", "isthmus export --push")
        if self._hub.get_token() is None:
            raise UserError(f"--push {name}: no token: set HF_TOKEN, or run `hf auth login`")
        self._name, self._public = name, public

    def push(self, directory: Path, message: str) -> str:
        """Make the repository if it is not there, and commit the directory's files; returns its address. UserError."""
        api = self._hub.HfApi()
        try:
            made = api.create_repo(self._name, private=not self._public, exist_ok=True)
            api.upload_folder(repo_id=self._name, folder_path=str(directory), commit_message=message)
        except Exception as e:  # of httpx, of the hub, of its checks of names
            raise UserError(f"--push {self._name}: {_reason(e)}") from None
        return str(made)


def _reason(error: Exception) -> str:
    """Return the hub's reason, without the request's number and address."""
    said, response = getattr(error, "server_message", None), getattr(error, "response", None)
    if said and response is not None:
        return f"refused with {response.status_code}: {' '.join(str(said).split())}"
    return " ".join(str(error).split()) or type(error).__name__
