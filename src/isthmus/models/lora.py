"""LoRA (Hu et al., 2021) on a model's layers, through peft: W x becomes W x + scale B A x; only A and B are trained.

The library is the optional extra `lora` and is imported on first use.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from isthmus.combinations import refused
from isthmus.errors import UserError
from isthmus.extensions import import_extra
from isthmus.models.hugging_face import finish_directory, tokenizer_files
from isthmus.models.left_in_files import NotInFiles
from isthmus.wire_types import Int64, Many, Positive, Table, Text

ENDINGS = {  # peft's name of the task by the end of a model's class. A classifier's new head is trained and saved too.
    "LMHeadModel": "CAUSAL_LM",
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
}


class LoraOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA on a model that stays as it is: the fields of peft's LoraConfig, by their own names."""

    r: Positive = 8  # Rank of the matrices A and B.
    lora_alpha: Positive = 8  # B A x is multiplied by lora_alpha / r.
    target_modules: Text | Many[Text] | None = None
    """Layers that get them: ends of their names, a regular expression over whole names, or "all-linear". By default
    what peft knows of the architecture."""
    exclude_modules: Text | Many[Text] | None = None  # Layers that get none, in the same way.
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # Dropout on x before A.
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained: none, all, or those of the layers with LoRA."""
    use_rslora: bool = False  # Multiply by lora_alpha / sqrt(r) instead (rsLoRA).
    use_dora: bool = False  # Learn the norms of the weights' columns apart (DoRA).
    modules_to_save: Many[Text] = ()  # Layers that are trained as a whole, and are saved with the adapter: a new head.
    init_lora_weights: bool | Literal["gaussian", "orthogonal"] = True
    """How A and B begin. True: A is drawn, B is 0, and so the first step's loss is the base model's."""
    layers_to_transform: Many[Int64] | None = None  # Numbers of the blocks that get them; by default all.
    rank_pattern: Table[Text, Positive] = {}  # Another `r` for layers whose name matches.
    alpha_pattern: Table[Text, Positive] = {}  # Another `lora_alpha` for layers whose name matches.


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
        with _heard():
            return peft.get_peft_model(module, peft.LoraConfig(task_type=task, **given)).train()
    except Exception as error:  # peft raises ValueError, TypeError and errors of its own
        raise UserError(f"model.lora: {' '.join(str(error).split()).removeprefix('model.lora: ')}") from error


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
    with _heard():
        # "auto" asks the hub whether the embeddings grew: they are frozen, or in `modules_to_save`.
        module.save_pretrained(directory, save_embedding_layers=False)  # pyright: ignore[reportCallIssue]
    finish_directory(directory, tokenizer)


def merged(module: nn.Module) -> nn.Module:
    """The base model with B A added to its weights; the `peft.PeftModel` is used up.

    What shares a weight with a layer that has LoRA (a head with the embedding) keeps the weight as it was. UserError
    where a model of its class cannot have the two apart.
    """
    untied = _untie(module)
    with _heard():
        model: nn.Module = module.merge_and_unload()  # pyright: ignore
    if tied := _still_tied(model, untied):
        raise refused("a merged adapter", "tied weights", " and ".join(tied))
    return model


def taken_off(module: nn.Module) -> tuple[nn.Module, dict[Tensor, Callable[[Tensor], Tensor]]]:
    """The base model as `merged` gives it, but with the weights as they were; and of each weight to which LoRA adds
    something, what makes the merged one of its values. The `peft.PeftModel` is used up. NotInFiles where a layer with
    LoRA shares its weight."""
    if shared := _untie(module):
        raise NotInFiles(f"{shared[0]} shares its weight")
    layers: list[Any] = [one for one in module.modules() if isinstance(getattr(one, "base_layer", None), nn.Module)]
    changes: dict[Tensor, Callable[[Tensor], Tensor]] = {
        layer.get_base_layer().weight: partial(_added, layer) for layer in layers
    }
    with _heard():
        return module.unload(), changes  # pyright: ignore


@torch.no_grad()
def _added(layer: Any, weight: Tensor) -> Tensor:
    """A layer's merged weight, as peft computes it."""
    own = layer.get_base_layer().weight
    kept, own.data = own.data, weight
    layer.merge()
    made, own.data = own.data, kept
    layer.merged_adapters.clear()
    return made


def _untie(module: nn.Module) -> list[str]:
    """Give each layer with LoRA a weight of its own, as what shares it does not get what is added to it; returns the
    names of weights that were shared."""
    holders = Counter(id(p) for _, p in base_of(module).named_parameters(remove_duplicate=False))
    found: list[str] = []
    for name, layer in module.named_modules():
        base = getattr(layer, "base_layer", None)
        weight = getattr(base, "weight", None)
        if isinstance(base, nn.Module) and isinstance(weight, nn.Parameter) and holders[id(weight)] > 1:
            base.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
            found.append(name)
    return found


def _still_tied(model: nn.Module, untied: Sequence[str]) -> Sequence[str]:
    """Names of weights that the model has apart, and that one of its class and settings would have as one."""
    config = getattr(model, "config", None)
    if not hasattr(config, "tie_word_embeddings"):
        return untied
    with torch.device("meta"):
        again: nn.Module = type(model)(copy.deepcopy(config))
    named: dict[int, list[str]] = {}
    for name, parameter in again.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    own = dict(model.named_parameters(remove_duplicate=False))
    tied = (names for names in named.values() if len({own[name].data_ptr() for name in names if name in own}) > 1)
    return next(tied, ())


def _fields(options: LoraOptions) -> dict[str, object]:
    """Those that are given: None and () are peft's own None."""
    found = {field: getattr(options, field) for field in options.__struct_fields__}
    return {key: value for key, value in found.items() if value is not None and value != ()}


def _peft() -> ModuleType:
    return import_extra("peft", "model.lora")


_HARMLESS = ("fan_in_fan_out", "ensure_weight_tying", "tied_target_modules", "no longer tied after merging")
"""Peft's harmless warnings: corrections for a layer that keeps its weights transposed, as GPT-2's do; and ties, which
`merged` takes apart."""
_WITHOUT_EFFECT = ("were ignored", "no modules were excluded", "no module was matched")
"""Peft's warnings of a setting that a run would not have."""


@contextlib.contextmanager
def _heard() -> Generator[None]:
    """UserError where peft warns that a setting has no effect. Other warnings of consequence are shown."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in caught:
        text = " ".join(str(one.message).split())
        if any(words in text for words in _WITHOUT_EFFECT):
            raise UserError(f"model.lora: {text}")
        if not issubclass(one.category, DeprecationWarning | FutureWarning) and not any(w in text for w in _HARMLESS):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
