"""Hugging Face models: built from a config with random weights, or read from a directory or the hub.

The library is the optional extra `hf` and is imported on first use.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import msgspec
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from isthmus.documents import follow_umask
from isthmus.errors import UserError, unknown_name, warn
from isthmus.extensions import import_extra
from isthmus.graph.label_means import is_hugging_face
from isthmus.models.left_in_files import ACTIVE, NotInFiles
from isthmus.models.model_folder import CONFIG, check_folder, fetch_folder
from isthmus.option_docs import OptionDoc, toml_text, type_text
from isthmus.stores import RemoteStoreError, hub_silence, is_url

BY_NAME: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "hf-gpt2": ("GPT2LMHeadModel", {}),
    "hf-gpt2-xl": ("GPT2LMHeadModel", {"n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}),
    "hf-llama": ("LlamaForCausalLM", {}),
    "hf-bert-classifier": ("BertForSequenceClassification", {}),
    "hf-resnet": ("ResNetForImageClassification", {}),
}

_ARGUMENT = re.compile(r"^    (\w+) \(.*\):\n((?:        .*\n?)+)", re.MULTILINE)
"""An argument of a config in its docstring, and what is said of it."""
_AUTO_CLASS = {
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)
BESIDE_WEIGHTS = (CONFIG, "generation_config.json", *_TOKENIZER_FILES)


class PretrainedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model from a directory, the Hugging Face hub or a store, with its weights."""

    path: str  # A directory with a model that transformers saved, an id on the hub, or a URL: s3://bucket/model.
    task: Literal["causal-lm", "sequence-classification", "image-classification"]
    """The task that the model is trained for."""
    random_weights: bool = False  # Take the config alone and draw new weights.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of the weights, in which they compute unless `training.precision` is a half type. "auto": that which the
    model's config names, float32 where it names none."""
    config: dict[str, object] = {}  # Entries of the model's config that are to differ.


EXPERTS = "batched_mm"
"""How mixtures of experts compute: each token with weights gathered for it, of sizes that are known."""


def _transformers() -> ModuleType:
    library = import_extra("transformers", "the model")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each try to reach the hub
    return library


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_names(owner: str, options: Mapping[str, object], config: object) -> None:
    """Config classes accept any keyword, so a misspelt one would silently change nothing."""
    known: dict[str, object] = config.to_dict()  # pyright: ignore[reportAttributeAccessIssue]
    aliases: dict[str, str] = config.attribute_map  # pyright: ignore[reportAttributeAccessIssue]
    valid = {*known, *aliases, "num_labels"}
    for key in options:
        if key not in valid:
            raise unknown_name(f"{owner} option", key, valid)


def _prepare_for_training(config: object, task: str) -> None:
    """Settles what would otherwise depend on the data, or return what training never reads."""
    if hasattr(config, "use_cache"):
        config.use_cache = False  # pyright: ignore[reportAttributeAccessIssue]
    if getattr(config, "_experts_implementation", "set") is None:
        # The others compute on as many rows as the data sends to an expert, which no graph can hold.
        config._experts_implementation = EXPERTS  # pyright: ignore[reportAttributeAccessIssue]
    if task.lower().replace("-", "").endswith(("sequenceclassification", "imageclassification")):
        # Left unset, the first forward looks at the labels' dtype and writes the answer into the config.
        config.problem_type = "single_label_classification"  # pyright: ignore[reportAttributeAccessIssue]


def build_from_class(owner: str, class_name: str, options: Mapping[str, object]) -> nn.Module:
    """`transformers.<class_name>` with random weights; `options` are arguments of its config.

    Raises `UserError` for an unknown class or option, or a value that the config or the model refuses.
    """
    model_class, config_class = _classes(class_name)
    _check_names(owner, options, config_class())
    try:
        config = config_class(**options)
        _prepare_for_training(config, class_name)
        return model_class(config)
    except Exception as error:  # each config class raises its own families
        raise UserError(f"{owner} options {dict(options)}: {_one_line(error)}") from error


def _classes(class_name: str) -> tuple[Any, Any]:
    """A model's class and its config's. UserError for an unknown one."""
    library = _transformers()
    model_class = getattr(library, class_name, None)
    config_class = getattr(model_class, "config_class", None)
    if model_class is None or config_class is None:
        raise unknown_name("transformers model", class_name, _near(class_name, library))
    return model_class, config_class


def _near(class_name: str, library: ModuleType) -> list[str]:
    """The library holds hundreds of classes: an error offers a few of them."""
    endings = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "SequenceClassification", "ImageClassification")
    names = [name for name in dir(library) if name.endswith(endings) and not name.startswith("Auto")]
    return difflib.get_close_matches(class_name, names, n=5) or [class_name for class_name, _ in BY_NAME.values()]


def summarize_class(class_name: str) -> str:
    """One line on a transformers model. The library, which takes seconds to import, is not needed."""
    return f"transformers.{class_name} with random weights"


def describe_class(class_name: str, defaults: Mapping[str, object]) -> tuple[str, tuple[OptionDoc, ...]]:
    """One line on a model, and its config's arguments; `defaults` are ours. UserError as `build_from_class`."""
    _, config_class = _classes(class_name)
    values = {**config_class().to_dict(), **defaults}
    of_all = inspect.signature(_transformers().PreTrainedConfig).parameters.keys() - {"tie_word_embeddings"}
    names = [name for name in inspect.signature(config_class).parameters if name in values and name not in of_all]
    arguments, meanings = inspect.signature(config_class).parameters, _meanings(config_class)
    docs = tuple(
        OptionDoc(
            key=name,
            type=type_text(arguments[name].annotation),
            default=toml_text(values[name]),
            meaning=meanings.get(name, ""),
        )
        for name in names
    )
    return f"{summarize_class(class_name)}; options are those of {config_class.__name__}", docs


def _meanings(config_class: type) -> dict[str, str]:
    """The library's words on each argument: the first sentence."""
    told = _ARGUMENT.findall(inspect.getdoc(config_class) or "")
    return {name: re.split(r"(?<=\w\.)\s", " ".join(text.split()))[0] for name, text in told}


def build_pretrained(chosen: PretrainedOptions) -> nn.Module:
    """The model that a directory, the hub or a store holds, in train mode.

    Only safetensors weights are read and no code from the repository is run. Under a `FakeTensorMode` the weights
    are not read, because only shapes matter there; inside `left_in_files` headers are. Raises `UserError` for what
    cannot be read.
    """
    fake = isinstance(torch.empty(0), FakeTensor)
    with _folder_of(chosen, reads=not (chosen.random_weights or fake)) as location:
        return _loaded(chosen, location, reads=not (chosen.random_weights or fake)).train()


@contextlib.contextmanager
def _folder_of(chosen: PretrainedOptions, *, reads: bool) -> Generator[str]:
    """The folder, or the id of the hub, that the library is to load. UserError for what is neither, nor a URL."""
    path, owner = Path(chosen.path).expanduser(), "hf option 'path'"
    if is_url(chosen.path):
        with tempfile.TemporaryDirectory(prefix="isthmus-model-") as made:
            yield _fetched(chosen.path, Path(made), reads=reads)
        return
    if chosen.path.startswith(("/", ".", "~")) and not path.is_dir():
        raise UserError(f"{owner}: no directory {chosen.path}")
    if not path.is_dir():
        _check_is_id(chosen.path, path)
        _check_hub_answers(chosen.path)
    elif (path / ".metadata").exists() and not any(path.glob("*.safetensors")):
        raise UserError(
            f"{owner}: {chosen.path} is a folder of torch.distributed.checkpoint, expected safetensors: "
            f"`isthmus export {chosen.path} DIR` writes them, and config.json if it is there"
        )
    yield str(path) if path.is_dir() else chosen.path


def _fetched(url: str, made: Path, *, reads: bool) -> str:
    try:
        if reads and (origins := ACTIVE.get()) is not None:
            return str(origins.headers(url))
        # While the model is captured values are nobody's.
        weights = "all" if detect_fake_mode() is None else "headers"
        fetch_folder(url, made, weights if reads else "none")
    except RemoteStoreError as e:
        raise UserError(f"hf option 'path': {e}") from None
    return str(made)


def _loaded(chosen: PretrainedOptions, location: str, *, reads: bool) -> nn.Module:
    """`reads`: the weights too; else they are drawn."""
    library = _transformers()
    auto_class = getattr(library, _AUTO_CLASS[chosen.task])
    try:
        config = library.AutoConfig.from_pretrained(location, trust_remote_code=False)
        _check_names("hf config", chosen.config, config)
        config = library.AutoConfig.from_pretrained(location, trust_remote_code=False, **chosen.config)
        _prepare_for_training(config, chosen.task)
        named = config.dtype if chosen.dtype == "auto" else chosen.dtype
        dtype = named if isinstance(named, torch.dtype) else getattr(torch, named or "float32")
        if not reads:
            return auto_class.from_config(config, dtype=dtype, trust_remote_code=False)
        if Path(location).is_dir():
            check_folder(Path(location), chosen.path)
        module, loaded = auto_class.from_pretrained(
            location,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the library's own refusal names no tensor
        )
        for name, got, expected in sorted(loaded["mismatched_keys"]):
            raise UserError(f"{name}: got shape {list(got)} in its weights, expected {list(expected)} by its config")
        _check_new_weights(chosen, sorted(loaded["missing_keys"]), module)
        return module
    except NotInFiles:
        raise
    except Exception as error:  # missing files, no network, wrong task, unreadable weights: one family each
        if isinstance(error, UserError) and str(error).startswith("hf "):
            raise
        said = _one_line(error).replace(location, chosen.path)
        raise UserError(f"hf option 'path': {chosen.path} as {chosen.task}: {said}") from error


def _check_is_id(given: str, path: Path) -> None:
    """UserError for what is rather a folder that is not here: nothing is asked of the hub for it."""
    folders = [str(one) for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), folders, n=1, cutoff=0.8) if path.parent != Path() else []
    if near or given.count("/") > 1:
        hint = f": did you mean {near[0]!r}?" if near else ", and it is no id of the hub"
        raise UserError(f"hf option 'path': no directory {given} in {Path.cwd()}{hint}")


def _check_hub_answers(given: str) -> None:
    """UserError where nothing of the model is in the cache, and the hub is silent."""
    hub = import_extra("huggingface_hub", "the model")
    with contextlib.suppress(ValueError):  # no id of the hub: the library says so
        if hub.try_to_load_from_cache(given, CONFIG) is None and (reason := hub_silence(given, CONFIG, "model")):
            raise UserError(
                f"hf option 'path': no directory {given} in {Path.cwd()}, nothing in the cache, and the hub {reason}"
            )


def _check_new_weights(chosen: PretrainedOptions, names: Sequence[str], module: nn.Module) -> None:
    """Warn of a new head. UserError where the body lacks weights: the config is of another model than the files."""
    base = str(getattr(module, "base_model_prefix", ""))
    # A pooler belongs to the head: models that were saved without a classifier have none.
    body = [name for name in names if base and name.startswith(f"{base}.") and "pooler" not in name.split(".")]
    shown = ", ".join((body or names)[:4]) + (", ..." if len(body or names) > 4 else "")
    what = f"{chosen.path} as {chosen.task} has no {shown} ({len(body or names)} such)"
    if body:
        raise UserError(f"hf option 'path': {what}, which its config names: expected them in its files")
    if names:
        warn(f"hf option 'path': {what}: drawn at random")


WriteFile = Callable[[dict[str, torch.Tensor], str, dict[str, str]], None]
"""Writes a safetensors file: the module's tensors by the names that they get, the file's path, its metadata."""


def save_hugging_face(
    module: nn.Module,
    directory: Path,
    tokenizer_dir: Path | None = None,
    *,
    max_shard_size: str | None = None,
    write_file: WriteFile | None = None,
) -> None:
    """Writes `module` so that `from_pretrained(directory)` reads it back, with the tokenizer's files beside it.

    `max_shard_size` as "5GB"; None is the library's own. With `write_file` the module may be on the meta device: the
    library says which file holds what under which name, and a tensor that it computes from several is none of the
    module's. Raises `UserError` if `module` is no transformers model, or `tokenizer_dir` holds no tokenizer.
    """
    if not is_hugging_face(module):
        raise UserError(f"cannot save {type(module).__name__} for Hugging Face: it is no transformers model")
    tokenizer = tokenizer_files(tokenizer_dir)
    # Of one on the meta device the library asks the module which are tied, by the module's own tensors.
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    given = {} if write_file is None else {"state_dict": {name: own[name] for name in module.state_dict()}}
    size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}

    def write(tensors: dict[str, torch.Tensor], path: str, metadata: dict[str, str]) -> None:
        assert write_file is not None
        write_file(tensors, path, metadata)

    library = import_module("transformers.modeling_utils")
    with mock.patch.object(library, "safe_save_file", write) if write_file else contextlib.nullcontext():
        module.save_pretrained(directory, **given, **size)  # pyright: ignore[reportCallIssue]
    finish_directory(directory, tokenizer)


def tokenizer_files(directory: Path | None) -> list[Path]:
    """UserError where a directory is given and holds none."""
    if directory is None:
        return []
    found = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not found:
        raise UserError(f"{directory} holds no tokenizer: expected tokenizer.json or one of its older forms")
    return found


def finish_directory(directory: Path, tokenizer: Sequence[Path]) -> None:
    """After a library wrote a model there: readable as the user's other files are, and with the tokenizer's files."""
    for file in directory.glob("*.safetensors"):
        follow_umask(file)
    for path in tokenizer:
        shutil.copy(path, directory / path.name)


MASKS = "transformers.masking_utils"


@contextlib.contextmanager
def as_eager(columns: Collection[str]) -> Generator[None]:
    """While active, attention masks are decided as in an eager forward.

    Under export the library builds a mask that eager leaves to the attention kernel (`is_causal`), since an export
    may later see other lengths or packed sequences. A captured graph never does: lengths are fixed, and sequences
    are packed only when the data has `position_ids`. Without this, other kernels run and the bits differ.
    """
    masks = sys.modules.get(MASKS)
    if masks is None or "position_ids" in columns:
        yield
        return
    if hasattr(masks, "is_torchdynamo_exporting"):
        exports = mock.patch.object(masks, "is_torchdynamo_exporting", lambda: False)
    else:  # before transformers 5.24 `is_tracing(None)` says whether there is an export
        traced = masks.is_tracing
        exports = mock.patch.object(masks, "is_tracing", lambda tensor=None: tensor is not None and traced(tensor))
    with mock.patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None), exports:
        yield
