import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.lazy import Lazy
from tests.tiers import represented_by
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from isthmus.errors import UserError
from isthmus.graph.capture import Column, capture
from isthmus.models import ModelSpec, build_model, is_hugging_face, model_names, save_hugging_face
from isthmus.models.registry import describe_model

transformers = Lazy("transformers")
torch.set_num_threads(1)

Entry = dict[str, object]
Change = Callable[[Entry, Entry], Entry]

GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 31, "n_positions": 12}
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 31,
}
BERT = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 31,
    "max_position_embeddings": 12,
    "num_labels": 3,
}
MIXTRAL = {**LLAMA, "num_local_experts": 4, "sliding_window": None}
FLAUBERT = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 31, "max_position_embeddings": 12}
RESNET = {
    "num_channels": 1,
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_labels": 10,
}


def build(name: str, **options: object) -> torch.nn.Module:
    return build_model(ModelSpec(name=name, options=options))


def text_batch(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 31, (batch, 12))
    return {"input_ids": ids, "labels": ids}


def pair_batch(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 31, (batch, 12))
    ones = torch.ones_like(ids)
    labels = torch.randint(0, 3, (batch,))
    return {"input_ids": ids, "attention_mask": ones, "token_type_ids": ones * 0, "labels": labels}


def image_batch(batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(batch, 1, 32, 32), "labels": torch.randint(0, 10, (batch,))}


CASES = [
    ("hf-gpt2", GPT2, text_batch, "GPT2LMHeadModel"),
    ("hf:GPT2LMHeadModel", GPT2, text_batch, "GPT2LMHeadModel"),
    ("hf-llama", LLAMA, text_batch, "LlamaForCausalLM"),
    ("hf:MixtralForCausalLM", MIXTRAL, text_batch, "MixtralForCausalLM"),
    ("hf-bert-classifier", BERT, pair_batch, "BertForSequenceClassification"),
    ("hf-resnet", RESNET, image_batch, "ResNetForImageClassification"),
]


@pytest.mark.parametrize(
    ("name", "options", "example", "class_name"), represented_by(CASES, CASES[3], CASES[4]), ids=[c[0] for c in CASES]
)
def test_builds_trains_and_exports(name, options, example, class_name):
    torch.manual_seed(0)
    module = build(name, **options)
    assert type(module).__name__ == class_name and is_hugging_face(module) and module.training
    outputs = module(**example(3))
    assert next(iter(outputs)) == "loss" and "past_key_values" not in outputs
    outputs["loss"].backward()
    assert torch.isfinite(outputs["loss"])
    batch = torch.export.Dim("b", min=2)
    inputs = example(3)
    with FakeTensorMode() as mode:
        fake = build(name, **options).eval()
        assert all(isinstance(value, FakeTensor) for value in fake.parameters())
        fakes = {key: mode.from_tensor(value) for key, value in inputs.items()}
        exported = torch.export.export(
            fake, (), kwargs=fakes, dynamic_shapes={key: {0: batch} for key in fakes}, strict=False
        )
    symbols = [node.meta["val"].shape for node in exported.graph.nodes if node.name in inputs]
    assert len(symbols) == len(inputs)
    assert all(isinstance(shape[0], torch.SymInt) for shape in symbols)


@pytest.mark.long
def test_a_mixture_of_experts_is_captured_and_computes_what_each_expert_would():
    columns = {name: Column("int64", (12,)) for name in ("input_ids", "labels")}
    found = capture(lambda: build("hf:MixtralForCausalLM", **MIXTRAL), columns)
    assert found.train.batch is None
    torch.manual_seed(0)
    module, batch = build("hf:MixtralForCausalLM", **MIXTRAL), text_batch(3)
    loss = module(**batch)["loss"]
    module.set_experts_implementation("eager")
    assert torch.allclose(loss, module(**batch)["loss"], rtol=1e-5)


def test_what_a_model_asserts_of_its_data_is_no_hindrance():
    """Flaubert and XLM read the longest sentence for it."""
    columns = {name: Column("int64", (12,)) for name in ("input_ids", "labels")}
    assert capture(lambda: build("hf:FlaubertWithLMHeadModel", **FLAUBERT), columns).train.batch is None


def test_another_way_to_compute_experts_is_refused_with_the_one_that_works():
    library = pytest.importorskip("transformers")
    columns = {name: Column("int64", (12,)) for name in ("input_ids", "labels")}
    with pytest.raises(UserError, match=r'experts.*experts_implementation="batched_mm"'):
        capture(lambda: library.MixtralForCausalLM(library.MixtralConfig(**MIXTRAL)), columns)


def test_gpt2_xl_has_its_real_sizes():
    with FakeTensorMode():
        module = build("hf-gpt2-xl")
    assert sum(value.numel() for value in module.parameters()) == 1_557_611_200


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hf-gpt2", {"n_layers": 2}, "unknown hf-gpt2 option 'n_layers': did you mean 'n_layer'"),
        ("hf-gpt2", {"n_layer": "two"}, "expected int, got str"),
        ("hf-gpt2", {"n_embd": 10, "n_head": 3}, "must be divisible by num_heads"),
        ("hf:GPT2LMHeadMode", {}, "did you mean 'GPT2LMHeadModel'"),
        ("hf:zzzzzzzz", {}, "expected one of"),
        ("hf:AutoModel", {}, "unknown transformers model 'AutoModel'"),
        ("hf", {"task": "causal-lm"}, "missing required field `path`"),
        ("hf", {"path": "x", "task": "translation"}, "hf option 'task': 'translation': expected one of: causal-lm"),
        ("hf", {"path": "x", "task": "causal"}, "hf option 'task': 'causal': did you mean 'causal-lm'?"),
        ("hf", {"path": "./no/such/place", "task": "causal-lm"}, "no directory ./no/such/place"),
        ("hf", {"path": "no/such/place", "task": "causal-lm"}, "and it is no id of the hub"),
    ],
)
def test_bad_options_say_what_is_wrong(name, options, message):
    with pytest.raises(UserError) as caught:
        build(name, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_slip_in_a_folders_name_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("isthmus.models.hugging_face._transformers", lambda: pytest.fail("it was looked for"))
    with pytest.raises(UserError, match=r"no directory models/tinny in .*: did you mean 'models/tiny'\?"):
        build("hf", path="models/tinny", task="causal-lm")


def test_a_shard_that_is_cut_short_is_named(tmp_path: Path) -> None:
    build("hf-gpt2", **GPT2).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(UserError, match=f"{shard.name}: truncated, or no safetensors file"):
        build("hf", path=str(tmp_path), task="causal-lm")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one, other: {**one, "dtype": "F31"}, "unknown variant `F31`"),
        (lambda one, other: {**one, "data_offsets": other["data_offsets"]}, "invalid offset for tensor"),
    ],
)
def test_a_header_that_lies_is_named_by_its_file(tmp_path: Path, change: Change, words: str) -> None:
    build("hf-gpt2", **GPT2).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    size = int.from_bytes(shard.read_bytes()[:8], "little")
    header, rest = json.loads(shard.read_bytes()[8 : 8 + size]), shard.read_bytes()[8 + size :]
    one, other = [name for name in header if name != "__metadata__"][:2]
    text = json.dumps({**header, one: change(header[one], header[other])}).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    with pytest.raises(UserError, match=f"{shard.name}: no sound safetensors file: .*{words}") as caught:
        build("hf", path=str(tmp_path), task="causal-lm")
    assert "\n" not in str(caught.value)


def test_aliases_of_config_fields_are_options_too():
    assert build("hf-gpt2", **GPT2 | {"num_hidden_layers": 1}).config.n_layer == 1


@pytest.fixture
def saved(tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    torch.manual_seed(0)
    module = build("hf-gpt2", **GPT2)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "unrelated.txt").write_text("no")
    save_hugging_face(module, tmp_path / "model", tokenizer)
    return module, tmp_path / "model"


def test_save_and_load_again(saved):
    module, directory = saved
    names = {path.name for path in directory.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names and "unrelated.txt" not in names
    batch = text_batch(2)
    expected = module.eval()(**batch).loss
    theirs = transformers.GPT2LMHeadModel.from_pretrained(directory).eval()
    ours = build("hf", path=str(directory), task="causal-lm")
    assert ours.training and ours.dtype == torch.float32 and ours.config.use_cache is False
    assert torch.equal(theirs(**batch).loss, expected)
    assert torch.equal(ours.eval()(**batch).loss, expected)


def test_the_type_is_that_of_the_saved_model_unless_it_is_asked_for(saved):
    module, directory = saved
    module.bfloat16().save_pretrained(directory)
    options = {"path": str(directory), "task": "causal-lm"}
    for made in (build("hf", **options), build("hf", **options, random_weights=True)):
        assert made.dtype == torch.bfloat16
    with FakeTensorMode():
        assert build("hf", **options).dtype == torch.bfloat16
    assert build("hf", **options, dtype="float32").dtype == torch.float32
    told = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({k: v for k, v in told.items() if k != "dtype"}))
    assert build("hf", **options).dtype == torch.float32, "as earlier versions of transformers took it to be"


def test_random_weights_keep_the_config_only(saved):
    module, directory = saved
    fresh = build("hf", path=str(directory), task="causal-lm", random_weights=True, dtype="bfloat16")
    assert fresh.dtype == torch.bfloat16 and fresh.config.n_embd == 16
    assert not torch.equal(fresh.transformer.wte.weight.float(), module.transformer.wte.weight)


def test_pretrained_under_fake_tensors_reads_no_weights(saved):
    _, directory = saved
    (directory / "model.safetensors").unlink()
    with FakeTensorMode():
        module = build("hf", path=str(directory), task="causal-lm")
    assert isinstance(module.transformer.wte.weight, FakeTensor)
    assert module.lm_head.weight is module.transformer.wte.weight


def test_pretrained_as_classifier_gets_a_new_head(saved):
    _, directory = saved
    with pytest.warns(
        UserWarning, match=r"as sequence-classification has no score\.weight \(1 such\): drawn at random"
    ):
        module = build(
            "hf",
            path=str(directory),
            task="sequence-classification",
            config={"num_labels": 3, "pad_token_id": 0},
        )
    assert module.config.problem_type == "single_label_classification" and module.score.weight.shape == (3, 16)
    with pytest.raises(UserError, match="unknown hf config option 'num_label'"):
        build("hf", path=str(directory), task="causal-lm", config={"num_label": 3})


def test_weights_that_the_files_lack_for_the_body_of_a_model_are_named(saved):
    deeper = {"path": str(saved[1]), "task": "causal-lm", "config": {"n_layer": 3}}
    assert len(build("hf", **deeper, random_weights=True).transformer.h) == 3
    lacks = f"hf option 'path': {saved[1]} as causal-lm has no transformer.h.2.attn.c_attn.bias, "
    with pytest.raises(UserError, match=rf"^{re.escape(lacks)}.*, \.\.\. \(12 such\), which its config names"):
        build("hf", **deeper)


def test_a_pooler_that_no_language_model_has_is_new(tmp_path):
    transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"has no bert\.pooler\.dense\.bias, .* \(4 such\): drawn at random"):
        build("hf", path=str(tmp_path), task="sequence-classification")


def test_a_pretrained_model_that_is_whole_says_nothing(saved, recwarn):
    build("hf", path=str(saved[1]), task="causal-lm")
    assert not recwarn.list


def test_pickled_weights_are_refused(saved):
    module, directory = saved
    (directory / "model.safetensors").unlink()
    torch.save(module.state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(UserError, match="hf option 'path'"):
        build("hf", path=str(directory), task="causal-lm")


def test_only_transformers_models_are_saved(tmp_path, saved):
    module, _ = saved
    assert not is_hugging_face(build("mlp"))
    with pytest.raises(UserError, match="cannot save MLP"):
        save_hugging_face(build("mlp"), tmp_path)
    with pytest.raises(UserError, match="holds no tokenizer"):
        save_hugging_face(module, tmp_path / "again", tmp_path)
    assert not (tmp_path / "again").exists()


def test_listed_names_are_built_by_their_class():
    assert [name for name in model_names() if name.startswith("hf-")] == [
        "hf-bert-classifier",
        "hf-gpt2",
        "hf-gpt2-xl",
        "hf-llama",
        "hf-resnet",
    ]


@pytest.mark.parametrize("name", ["hf-gpt2", "hf-bert-classifier", "hf-resnet"])
def test_options_are_described_in_the_librarys_words(name: str) -> None:
    _, options = describe_model(name)
    assert options and all(option.type for option in options)
    told = [option for option in options if option.meaning]
    assert len(told) >= 0.9 * len(options) and all(option.meaning.endswith(".") for option in told)
