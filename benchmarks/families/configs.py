"""Tiny random configs of transformers' families: the sizes of each family's default config, made small."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from isthmus.data import ColumnSpec
from isthmus.models import ModelSpec, build_model

VOCABULARY, LENGTH, SIDE, LABELS = 40, 16, 32, 5
MOST_PARAMETERS = 30_000_000
TOKENS: Mapping[str, tuple[int, ...]] = {"input_ids": (LENGTH,), "attention_mask": (LENGTH,), "labels": (LENGTH,)}
TASKS: Mapping[str, tuple[str, Mapping[str, tuple[int, ...]]]] = {
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", {"pixel_values": (3, SIDE, SIDE), "labels": ()}),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", TOKENS),
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {name: TOKENS[name] for name in ("input_ids", "labels")}),
    "sequence": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", {**TOKENS, "labels": ()}),
}
"""transformers' table of classes, and the columns of a sample with their shapes."""

SIZES: Mapping[int, str] = {
    1: "mamba_n_groups n_group topk_group bos_token_id decoder_start_token_id",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers num_key_value_heads num_experts_per_tok mamba_expand linear_num_key_heads type_vocab_size
        eos_token_id""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
        num_local_experts n_routed_experts rotary_dim time_step_rank mamba_dt_rank
        linear_num_value_heads window_size""",
    8: """head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim patch_size state_size ssm_state_size mamba_d_state
        mamba_n_heads mamba_d_head linear_key_head_dim linear_value_head_dim attention_window sliding_window
        hidden_size_per_layer_input adapter_rank""",
    16: "embedding_size moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim",
    32: "hidden_size d_model n_embd dim embed_dim emb_dim lru_width",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff",
    64: "max_position_embeddings n_positions n_ctx",
    0: "pad_token_id",
}
SMALL: Mapping[str, int] = {
    **{name: size for size, names in SIZES.items() for name in names.split()},
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "image_size": SIDE,
}

OWN: Mapping[str, Mapping[str, object]] = {
    "big_bird, original_full": {"attention_type": "original_full"},
    "deepseek_v3": {"head_dim": None, "num_key_value_heads": 4, "qk_head_dim": None},
    "hgnet_v2": {"hidden_sizes": None, "depths": None, "embedding_size": None},
}
"""What single families need to be otherwise; None: as in the default config."""


class NotTried(Exception):
    """The family has no tiny config here: no statement about it."""


class Family(NamedTuple):
    task: str
    name: str
    model: str
    """The class in transformers."""


class Tiny(NamedTuple):
    spec: ModelSpec
    columns: Mapping[str, ColumnSpec]

    def build(self) -> nn.Module:
        return build_model(self.spec)


def families(tasks: list[str]) -> Iterator[Family]:
    """Every family and every class once, with the first of the tasks that has it."""
    seen: set[str] = set()
    for task in tasks:
        for name, model in getattr(modeling_auto, TASKS[task][0]).items():
            first = model if isinstance(model, str) else model[0]
            if not {name, first} & seen:
                seen |= {name, first}
                yield Family(task, name, first)
            if name == "big_bird" and task == "masked":
                yield Family(task, "big_bird, original_full", "BigBirdForMaskedLM")


def tiny(family: Family) -> Tiny:
    """NotTried when the config is refused or stays large."""
    model: Any = getattr(transformers, family.model)
    options = shrunk(model.config_class().to_dict())
    for key, value in OWN.get(family.name, {}).items():
        options.pop(key, None)
        options |= {} if value is None else {key: value}
    if family.task in ("image", "sequence"):
        options["num_labels"] = LABELS
    found = Tiny(ModelSpec(name=f"hf:{family.model}", options=options), columns(family.task, model))
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in found.build().parameters())
    except Exception as e:  # whatever a constructor says of sizes that do not go together
        raise NotTried(f"config: {e}") from e
    if size > MOST_PARAMETERS:
        raise NotTried(f"config: {size / 1e6:.0f} million parameters")
    return found


def shrunk(known: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """What to change of a config: small sizes, two layers, one of each kind of block, no dropout."""
    found: dict[str, Any] = {}
    for key, value in known.items():
        if "drop" in key and isinstance(value, float):
            found[key] = 0.0
        elif key in SMALL and value is not None and not isinstance(value, list | tuple | dict):
            found[key] = SMALL[key]
        elif key.endswith("_config") and isinstance(value, dict) and value.get("model_type") and depth < 2:
            found[key] = {"model_type": value["model_type"], **shrunk(value, depth + 1)}
        elif isinstance(value, list | tuple):
            found |= _shorter(key, value)
    return found


def _shorter(key: str, values: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    if key == "layer_types" and len(values) > 2:
        return {key: (list(dict.fromkeys(values)) * 2)[:2]}
    if key in ("depths", "layers", "num_blocks"):
        return {key: [1] * len(values)}
    if key in ("hidden_sizes", "embed_dims", "channels"):
        return {key: [16 * (k + 1) for k in range(len(values))]}
    return {}


def columns(task: str, model: Any) -> dict[str, ColumnSpec]:
    """Those of the task that the model's forward takes."""
    takes = inspect.signature(model.forward).parameters
    found: dict[str, ColumnSpec] = {}
    for name, shape in TASKS[task][1].items():
        if name == "pixel_values":
            found[name] = ColumnSpec(dtype="float32", shape=shape)
        elif name in takes or name == "labels":
            limit = 2 if name == "attention_mask" else VOCABULARY if shape else LABELS
            found[name] = ColumnSpec(dtype="int64", shape=shape, limit=limit)
    return found
