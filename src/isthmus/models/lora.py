"""LoRA (Hu et al., 2021) on a model's layers, through peft: W x becomes W x + scale B A x; only A and B are trained.

The library is the optional extra `lora` and is imported on first use.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from torch import nn

from isthmus.errors import UserError
from isthmus.extensions import import_extra
from isthmus.models.hugging_face import finish_directory, tokenizer_files

Positive = Annotated[int, Meta(ge=1)]
ENDINGS = {
    "LMHeadModel": "CAUSAL_LM",
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
}
"""By the end of a model's class, peft's name of its task: of a classifier the new head is trained and saved too."""


class LoraOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA on a model that stays as it is: the fields of peft's LoraConfig, by their own names."""

    r: Positive = 8
    """Rank of the matrices A and B."""
    lora_alpha: Positive = 8
    """B A x is multiplied by lora_alpha / r."""
    target_modules: str | tuple[str, ...] | None = None
    """Layers that get them: ends of their names, a regular expression over whole names, or "all-linear". By default
    what peft knows of the architecture."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Layers that get none, in the same way."""
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Dropout on x before A."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained: none, all, or those of the layers with LoRA."""
    use_rslora: bool = False
    """Multiply by lora_alpha / sqrt(r) instead (rsLoRA)."""
    use_dora: bool = False
    """Learn the norms of the weights' columns apart (DoRA)."""
    modules_to_save: tuple[str, ...] = ()
    """Layers that are trained as a whole, and are saved with the adapter: a new head."""
    init_lora_weights: bool | Literal["gaussian", "orthogonal"] = True
    """How A and B begin. True: A is drawn, B is 0, and so the first step's loss is the base model's."""
    layers_to_transform: tuple[int, ...] | None = None
    """Numbers of the blocks that get them; by default all."""
    rank_pattern: dict[str, Positive] = {}
    """Another `r` for layers whose name matches."""
    alpha_pattern: dict[str, Positive] = {}
    """Another `lora_alpha` for layers whose name matches."""


def add_lora(module: nn.Module, options: LoraOptions) -> nn.Module:
    """A `peft.PeftModel` around the module, in train mode. Of its parameters only those of LoRA (and of `bias` and
    `modules_to_save`) require a gradient.

    A and B are drawn from torch's global generator. Works under `FakeTensorMode` too. Raises `UserError` for what peft
    refuses, as a name that no layer has.
    """
    peft = _peft()
    task = next((task for end, task in ENDINGS.items() if type(module).__name__.endswith(end)), None)
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in _fields(options).items()}
    try:
        with _quiet():
            return peft.get_peft_model(module, peft.LoraConfig(task_type=task, **given)).train()
    except Exception as error:  # peft raises ValueError, TypeError and errors of its own
        raise UserError(f"model.lora: {' '.join(str(error).split())}") from error


def is_peft(module: nn.Module) -> bool:
    """True for a `peft.PeftModel`. Does not import the library."""
    return any(base.__name__ == "PeftModel" and base.__module__.startswith("peft.") for base in type(module).__mro__)


def base_of(module: nn.Module) -> nn.Module:
    """The model inside a `peft.PeftModel`: its forward says which columns it takes. Other modules are their own."""
    return module.get_base_model() if is_peft(module) else module  # pyright: ignore[reportCallIssue]


def save_adapter(module: nn.Module, directory: Path, tokenizer_dir: Path | None = None) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json` for `peft.PeftModel.from_pretrained`, with the
    tokenizer's files beside them. The base model is not in them.

    Raises `UserError` if `tokenizer_dir` holds no tokenizer.
    """
    tokenizer = tokenizer_files(tokenizer_dir)
    with _quiet():
        # "auto" asks the hub whether the embeddings grew: they are frozen, or in `modules_to_save`.
        module.save_pretrained(directory, save_embedding_layers=False)  # pyright: ignore[reportCallIssue]
    finish_directory(directory, tokenizer)


def merged(module: nn.Module) -> nn.Module:
    """The base model with B A added to its weights; the `peft.PeftModel` is used up."""
    with _quiet():
        return module.merge_and_unload()  # pyright: ignore[reportCallIssue]


def _fields(options: LoraOptions) -> dict[str, object]:
    """Those that are given: None and () are peft's own None."""
    found = {field: getattr(options, field) for field in options.__struct_fields__}
    return {key: value for key, value in found.items() if value is not None and value != ()}


def _peft() -> ModuleType:
    return import_extra("peft", "model.lora")


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """peft says which settings it corrects for a layer that keeps its weights transposed, as GPT-2's do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
