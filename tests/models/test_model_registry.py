import importlib.metadata
import subprocess
import sys
from importlib.metadata import EntryPoint

import msgspec
import pytest
import torch
from torch import nn

from isthmus.errors import UserError
from isthmus.models import GPT, MLP, MLPConfig, ModelSpec, build_model, model_names


def linear(size: int, bias: bool = True) -> nn.Module:
    return nn.Linear(size, 1, bias=bias)


def anything(**options: object) -> nn.Module:
    module = nn.Identity()
    module.options = options
    return module


def not_a_module() -> str:
    return "surprise"


NOT_CALLABLE = 3


def build(name: str, **options: object) -> nn.Module:
    return build_model(ModelSpec(name=name, options=options))


def register(monkeypatch, *entries: EntryPoint) -> None:
    def entry_points(*, group: str) -> list[EntryPoint]:
        return [entry for entry in entries if entry.group == group]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_names():
    assert {"gpt", "unet", "mlp", "cnn", "hf", "hf-gpt2", "hf-gpt2-xl", "hf-llama"} <= set(model_names())
    assert {"hf-bert-classifier", "hf-resnet"} <= set(model_names())
    assert model_names() == sorted(model_names())


def test_spec_is_read_from_json():
    spec = msgspec.json.decode(b'{"name": "gpt", "options": {"layers": 1}}', type=ModelSpec)
    module = build_model(spec)
    assert isinstance(module, GPT) and len(module.blocks) == 1
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


def test_the_seed_decides_the_weights():
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(build("mlp").body[0].weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gtp", {}, "unknown model 'gtp': did you mean 'gpt'"),
        ("gpt", {"widht": 3}, "unknown gpt option 'widht': did you mean 'width'"),
        ("gpt", {"width": "big"}, "gpt option 'width': Expected `integer`, got `text`"),
        ("gpt", {"layers": 0}, "gpt option 'layers': Expected `integer` >= 1"),
        ("gpt", {"width": 10, "heads": 3}, "gpt option 'width': 10 is no multiple of heads=3"),
        ("unet", {"norm": "layer"}, "unknown unet option 'norm': 'layer': expected one of: "),
        ("nowhere.at_all:build", {}, "cannot import nowhere.at_all: ModuleNotFoundError"),
        (f"{__name__}:absent", {}, "has no 'absent'"),
        (f"{__name__}:", {}, "expected 'package.module:callable'"),
        (f"{__name__}:linear", {"sise": 3}, "option 'sise': did you mean 'size'"),
        (f"{__name__}:linear", {}, "missing a required argument: 'size'"),
        (f"{__name__}:not_a_module", {}, "expected it to return an nn.Module, got str"),
        (f"{__name__}:NOT_CALLABLE", {}, "expected a callable that returns an nn.Module, got 3"),
    ],
)
def test_bad_specs_say_what_is_wrong(name, options, message):
    with pytest.raises(UserError) as caught:
        build(name, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_callable_by_path():
    assert build(f"{__name__}:linear", size=3, bias=False).weight.shape == (1, 3)
    assert build(f"{__name__}:anything", free=1).options == {"free": 1}


def test_module_that_fails_while_imported_is_the_users(tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text("raise RuntimeError('no such thing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="cannot import broken_model: RuntimeError: no such thing"):
        build("broken_model:build")


def test_third_party_models_by_entry_point(monkeypatch):
    register(
        monkeypatch,
        EntryPoint("slim", f"{__name__}:linear", "isthmus.models"),
        EntryPoint("gone", "nowhere.at_all:build", "isthmus.models"),
        EntryPoint("other", f"{__name__}:linear", "another.group"),
    )
    assert "slim" in model_names() and "other" not in model_names()
    assert build("slim", size=4).weight.shape == (1, 4)
    with pytest.raises(UserError, match=r"isthmus\.models entry 'gone' \(nowhere\.at_all:build\)"):
        build("gone")
    with pytest.raises(UserError, match="did you mean 'slim'"):
        build("slin")


def test_third_party_cannot_replace_a_built_in(monkeypatch):
    register(monkeypatch, EntryPoint("mlp", f"{__name__}:anything", "isthmus.models"))
    assert isinstance(build("mlp"), MLP)


def test_options_have_one_default_each():
    assert build("mlp").config == MLPConfig()


WITHOUT_THE_EXTRA = """
import sys
for name in ("transformers", "tokenizers", "datasets"):
    sys.modules[name] = None
from isthmus.errors import UserError
from isthmus.models import ModelSpec, build_model, is_hugging_face, model_names
assert "hf-gpt2" in model_names()
assert not is_hugging_face(build_model(ModelSpec(name="mlp")))
try:
    build_model(ModelSpec(name="hf-gpt2"))
except UserError as error:
    print(error)
"""


def test_works_without_the_hf_extra():
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_EXTRA], capture_output=True, text=True, check=True)
    assert "pip install '.[hf]'" in done.stdout
