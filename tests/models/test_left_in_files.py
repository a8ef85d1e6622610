"""A pretrained model that is left in its files, against the module that transformers reads from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tests.lazy import Lazy
from torch import Tensor, nn

from isthmus.models import ModelSpec, build_model
from isthmus.models.left_in_files import NotInFiles, left_in_files
from isthmus.training.stored import stored_tensors

transformers = Lazy("transformers")
SIZES = {"vocab_size": 100, "max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {**SIZES, "hidden_size": 32, "intermediate_size": 64}

QWEN3 = {**SMALL, "head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def gpt2_without_head() -> nn.Module:
    """Its names lack the prefix of the model that is trained."""
    return transformers.GPT2Model(gpt2().config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN3))


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))


def bert_without_classifier() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def experts() -> nn.Module:
    sizes = {"moe_intermediate_size": 16, "num_experts": 4}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN3, **sizes))


CAUSAL: list[Callable[[], nn.Module]] = [gpt2, gpt2_without_head, llama, qwen3]
CLASSIFIERS: list[Callable[[], nn.Module]] = [bert, bert_without_classifier]
LORA = {"r": 4}


def saved(make: Callable[[], nn.Module], folder: Path, *, shard: str = "5GB") -> Path:
    torch.manual_seed(1)
    make().save_pretrained(folder / "base", max_shard_size=shard)  # pyright: ignore[reportCallIssue]
    return folder / "base"


def spec_of(path: Path, lora: dict[str, object] | None, dtype: str = "float32") -> ModelSpec:
    task = "sequence-classification" if "Bert" in (path / "config.json").read_text() else "causal-lm"
    options = {"path": str(path), "task": task, "dtype": dtype}
    return msgspec.convert({"name": "hf", "options": options, "lora": lora}, ModelSpec)


def variables(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


@pytest.mark.filterwarnings("ignore:hf option 'path'")
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("make", [*CAUSAL, *CLASSIFIERS])
def test_values_are_those_of_the_module_that_is_read(
    make: Callable[[], nn.Module], lora: dict[str, object] | None, tmp_path: Path
) -> None:
    for shard, dtype in (("5GB", "float32"), ("20KB", "bfloat16")):
        spec = spec_of(saved(make, tmp_path / dtype, shard=shard), lora, dtype)
        torch.manual_seed(3)
        expected = variables(build_model(spec))
        after = torch.rand(1)
        torch.manual_seed(3)
        with left_in_files() as stand_ins:
            found = variables(build_model(spec))
        assert torch.equal(torch.rand(1), after), "and what is drawn next is the same"
        origins = stand_ins.of(found)
        files = {path: stored_tensors(path) for path in {origin.path for origin in origins.values()}}
        assert len(files) > 1 or shard == "5GB"
        left = {name: files[o.path][o.name].cast(o.dtype).read() for name, o in origins.items()}
        got = {**found, **left}
        assert got.keys() == expected.keys()
        assert all(got[n].dtype == t.dtype and torch.equal(got[n], t) for n, t in expected.items())
        drawn = ("lora_", "_ids", "inv_freq", "attn.bias", "attn.masked_bias", "pooler", "classifier")
        assert all(any(words in name for words in drawn) for name in got.keys() - left.keys()), (
            "nothing else is in memory"
        )


@pytest.mark.parametrize(
    ("make", "lora", "words"),
    [
        (experts, None, "made of several weights of the files"),
        (llama, {"r": 4, "use_dora": True}, "computed from weights of the files"),
    ],
)
def test_what_is_computed_from_several_weights_is_said(
    make: Callable[[], nn.Module], lora: dict[str, object] | None, words: str, tmp_path: Path
) -> None:
    spec = spec_of(saved(make, tmp_path), lora)
    with pytest.raises(NotInFiles, match=words), left_in_files() as stand_ins:
        stand_ins.of(variables(build_model(spec)))
