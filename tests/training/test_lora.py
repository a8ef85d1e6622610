"""LoRA's settings, each as peft has it; what is trained, what a plan counts, and what is refused."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, module_of, random_cut, weights_of
from tests.lazy import Lazy
from tests.tiers import represented_by
from tests.training.reference import reference_step
from torch import nn
from zoo import MODELS, TEXT

from isthmus.data import DataSpec
from isthmus.errors import UserError
from isthmus.extensions import read_options
from isthmus.federated.algorithms.registry import AlgorithmSpec
from isthmus.federated.local import LocalConfig
from isthmus.federated.task_spec import SiteConfig, TaskSpec
from isthmus.graph import Flow, assign, partition
from isthmus.graph.partition import align
from isthmus.models import LoraOptions, ModelSpec, build_model, is_peft, merged, save_hugging_face
from isthmus.models.lora import add_lora
from isthmus.training.engine import EngineConfig, TorchEngine
from isthmus.training.stored import save_tensors, stored_tensors

transformers = Lazy("transformers")
peft = Lazy("peft")

CONFIG = EngineConfig(micro_batches=2, micro_batch_size=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "dora": {
        "target_modules": r".*\.(q|v)_proj",
        "use_dora": True,
        "modules_to_save": ["lm_head"],
        "init_lora_weights": False,
    },
    "many": {
        "target_modules": ["q_proj", "up_proj", "down_proj"],
        "exclude_modules": ["up_proj"],
        "bias": "all",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {"q_proj": 5},
        "layers_to_transform": [0],
        "init_lora_weights": "gaussian",
    },
}


SMALL = {
    "hf-llama": {**MODELS["hf-llama"][0].options, "num_hidden_layers": 1},
    "hf-bert-classifier": MODELS["hf-bert"][0].options,
}


def lora(name: str, **options: object) -> ModelSpec:
    return ModelSpec(name=name, options=SMALL[name], lora=read_options("model.lora", options, LoraOptions))


def theirs(**options: Any) -> nn.Module:
    base = build_model(ModelSpec(name="hf-llama", options=SMALL["hf-llama"]))
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)).train()


@pytest.mark.parametrize("name", represented_by(OPTIONS, "many"))
def test_a_cut_model_has_pefts_loss_and_gradients(name: str) -> None:
    options, spec = OPTIONS[name], lora("hf-llama", **OPTIONS[name])
    captured = capture_of(lambda: build_model(spec), TEXT)
    cut = random_cut(captured, random.Random(name))
    pipeline = Pipeline(captured, cut, weights_of(lambda: build_model(spec), captured), CONFIG)
    data = batches(TEXT, CONFIG.micro_batches, CONFIG.micro_batch_size)
    loss, gradients = pipeline.step(0, copies(data))
    module = module_of(lambda: theirs(**options))
    expected_loss, expected = reference_step(module, copies(data), CONFIG)
    assert loss == expected_loss
    assert set(captured.train.trainable) == {n for n, p in module.named_parameters() if p.requires_grad}
    for parameter, value in expected.items():
        assert (gradients[parameter] - value).norm() <= 1e-6 * value.norm() + 1e-12, parameter


@pytest.mark.long
def test_dropout_and_bf16_have_the_same_bits_on_one_device_and_on_several() -> None:
    """Dropout draws by step, micro-batch and operator: other numbers than peft's, and the same wherever it runs."""
    spec = lora("hf-llama", target_modules=["q_proj", "v_proj"], lora_dropout=0.3, init_lora_weights=False)
    captured = capture_of(lambda: build_model(spec), TEXT, torch.bfloat16)
    data = batches(TEXT, CONFIG.micro_batches, CONFIG.micro_batch_size)
    weights = weights_of(lambda: build_model(spec), captured)
    found = [Pipeline(captured, cut, weights, CONFIG) for cut in ([], random_cut(captured, random.Random(1)))]
    (loss, gradients), (other_loss, other) = [pipeline.step(0, copies(data)) for pipeline in found]
    assert found[1].sums_in_order and len(found[1].engines) > 1
    assert loss == other_loss and gradients.keys() == other.keys() == set(captured.train.trainable)
    assert all(torch.equal(value, other[name]) for name, value in gradients.items())
    assert {value.dtype for value in gradients.values()} == {torch.float32}, "masters and gradients stay wide"
    assert found[0].step(1, copies(data))[0] != loss, "another step drops others"


def test_frozen_weights_are_held_as_they_were_placed_and_those_of_a_file_as_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        return build_model(lora("hf-llama"))

    captured = capture_of(build, TEXT)
    weights, file = weights_of(build, captured), tmp_path / "model.safetensors"
    save_tensors(file, weights)
    monkeypatch.setattr("isthmus.training.stored.LEAST_VIEWED_BYTES", 16)
    flow, eval_flow = Flow(captured.train), Flow(captured.eval)
    stages = assign(flow, [])
    (train,), (evaluation,) = partition(flow, stages), partition(eval_flow, align(flow, eval_flow, stages))
    held, viewed = (TorchEngine(train, evaluation, CONFIG, given) for given in (weights, stored_tensors(file)))
    learns = dict.fromkeys(held.trainable.values(), True)
    assert 0 < len(learns) < len(weights)
    for op in train.variables():
        (own,) = held.shared_values([op.name]).values()
        assert (own.data_ptr() == weights[op.target].data_ptr()) != learns.get(op.target, False), op.target
        assert torch.equal(viewed.shared_values([op.name])[op.name], weights[op.target])
    if Path("/proc/self/maps").exists():
        assert Path("/proc/self/maps").read_text().count(str(file)) > 1


def test_the_new_head_of_a_classifier_is_trained_too() -> None:
    module = build_model(lora("hf-bert-classifier"))
    assert {name for name, p in module.named_parameters() if p.requires_grad and "lora_" not in name} == {
        "base_model.model.classifier.modules_to_save.default.weight",
        "base_model.model.classifier.modules_to_save.default.bias",
    }


def test_a_module_of_ones_own() -> None:
    module = add_lora(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), LoraOptions(target_modules=("0",)))
    assert is_peft(module) and not is_peft(nn.Linear(1, 1))
    assert module(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 8}, "unknown model.lora option 'rank'"),
        ({"r": 0}, "model.lora option 'r': Expected `integer` >= 1"),
        ({"lora_dropout": 1.0}, "model.lora option 'lora_dropout': Expected `number` < 1.0"),
        ({"bias": "some"}, "unknown model.lora option 'bias': 'some': did you mean 'none'"),
        ({"target_modules": ["query"]}, r"model.lora: Target modules \{'query'\} not found in the base model"),
    ],
)
def test_bad_settings_name_the_field(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_model(lora("hf-llama", **options))
    assert "\n" not in str(caught.value)


def test_a_model_that_peft_does_not_know_needs_names() -> None:
    with pytest.raises(UserError, match=r"model\.lora: Please specify `target_modules`"):
        add_lora(nn.Sequential(nn.Linear(4, 4)), LoraOptions())


def test_a_site_allows_the_lora_that_its_owner_names() -> None:
    algorithm, given = AlgorithmSpec(name="fedavg"), {"job": "clinics", "seed": 0, "client": 0, "local": LocalConfig()}
    site = SiteConfig(job="clinics", algorithm=algorithm, model=lora("hf-llama", r=4), data=DataSpec(kind="digits"))
    site.check(TaskSpec(run="clinics-1", algorithm=algorithm, model=lora("hf-llama", r=4), **given))
    with pytest.raises(
        UserError, match=r'model: this site allows hf-llama .*"r":4.*, the coordinator asks for .*"r":8'
    ):
        site.check(TaskSpec(run="clinics-1", algorithm=algorithm, model=lora("hf-llama", r=8), **given))


TIED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "embedding": ("hf-llama", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens"]}),
    "head": ("hf-llama", {"tie_word_embeddings": True}, {"target_modules": ["lm_head", "q_proj"]}),
    "both": ("hf-llama", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens", "lm_head"]}),
    "trained as a whole": (
        "hf-llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "gpt-2": ("hf-gpt2", MODELS["hf-gpt2"][0].options, {"target_modules": ["wte", "c_attn"]}),
}


@pytest.mark.parametrize("name", TIED)
def test_a_merged_model_with_tied_embeddings_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    kind, options, given = TIED[name]
    spec = ModelSpec(
        name=kind, options={**SMALL.get(kind, {}), **options}, lora=read_options("model.lora", given, LoraOptions)
    )
    module = build_model(spec)
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        expected = module.eval()(input_ids=ids).logits
        model = merged(module)
        save_hugging_face(model, tmp_path / "merged", None)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        for found in (model, again):
            torch.testing.assert_close(found.eval()(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


class TiedPlain(nn.Module):
    """Which is always built with its head tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_a_merge_that_a_models_class_cannot_have_is_refused() -> None:
    module = add_lora(TiedPlain(), LoraOptions(target_modules=("embed",)))
    with pytest.raises(UserError, match=r"--merge: got .*embed which are tied, .*LoRA changes one of them"):
        merged(module)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank_pattern": {"nothing": 3}}, "rank_pattern keys did not match any targeted module and were ignored"),
        ({"alpha_pattern": {"nothing": 3}}, "alpha_pattern keys did not match"),
        ({"exclude_modules": ["nothing"]}, "exclude_modules=.*nothing.* but no modules were excluded"),
    ],
)
def test_a_setting_without_effect_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=f"^model.lora: .*{words}"):
        build_model(lora("hf-llama", target_modules=["q_proj"], **options))


def test_pefts_other_warnings_are_shown(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    build_model(ModelSpec(name="hf-gpt2", options=MODELS["hf-gpt2"][0].options, lora=LoraOptions()))
    assert not recwarn.list, "what peft corrects is not worth a word"
    made = peft.get_peft_model

    def warns(*args: Any) -> nn.Module:
        warnings.warn("the result will differ", stacklevel=1)
        return made(*args)

    monkeypatch.setattr("peft.get_peft_model", warns)
    with pytest.warns(UserWarning, match="the result will differ"):
        build_model(lora("hf-llama", target_modules=["q_proj"]))
