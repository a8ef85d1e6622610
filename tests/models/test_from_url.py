"""A pretrained model at a URL: of its weights the coordinator reads headers, and what is not as it says is one line."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_left_in_files import CLASSIFIERS, LORA, gpt2, llama, saved, spec_of, variables
from torch import nn

from isthmus.errors import UserError
from isthmus.job import first_weights
from isthmus.job.first_weights import tensors_of
from isthmus.models import ModelSpec, build_model
from isthmus.models.left_in_files import left_in_files
from isthmus.stores import Store, store
from isthmus.training.stored import StoredTensor

Change = Callable[[Path], object]


def at_url(folder: Path, lora: dict[str, object] | None = None) -> ModelSpec:
    spec = spec_of(folder, lora)
    return ModelSpec(name="hf", options={**spec.options, "path": f"file://{folder}"}, lora=spec.lora)


def in_store(spec: ModelSpec) -> dict[str, StoredTensor]:
    torch.manual_seed(3)
    with left_in_files() as stand_ins:
        return tensors_of(stand_ins, variables(build_model(spec)))


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that are read."""
    found: list[tuple[int, int]] = []
    ranges = Store.ranges

    def counted(self: Store, name: str, spans: list[tuple[int, int]]) -> list[bytes]:
        found.extend(spans)
        return ranges(self, name, spans)

    monkeypatch.setattr(Store, "ranges", counted)
    return found


@pytest.mark.filterwarnings("ignore:hf option 'path'")
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize(("make", "lora"), [(gpt2, None), (llama, LORA), (CLASSIFIERS[0], None)])
def test_only_headers_are_read_and_each_tensor_is_where_it_says(
    make: Callable[[], nn.Module],
    lora: dict[str, object] | None,
    shard: str,
    tmp_path: Path,
    fetched: list[tuple[int, int]],
) -> None:
    folder = saved(make, tmp_path, shard=shard)
    torch.manual_seed(3)
    expected = variables(build_model(spec_of(folder, lora)))
    found = in_store(at_url(folder, lora))
    headers = sum(8 + struct.unpack("<Q", p.read_bytes()[:8])[0] for p in folder.glob("*.safetensors"))
    files = len(list(folder.glob("*.safetensors")))
    assert sum(end - start for start, end in fetched) == headers + 8 * files, "and each length before its header"
    assert found and all(t.store is not None for t in found.values())
    assert all(torch.equal(t.read(), expected[name]) for name, t in found.items())


def test_the_whole_is_read_where_nothing_is_left_in_files(tmp_path: Path) -> None:
    folder = saved(gpt2, tmp_path, shard="20KB")
    expected, found = variables(build_model(spec_of(folder, None))), variables(build_model(at_url(folder)))
    assert expected.keys() == found.keys() and all(torch.equal(found[name], t) for name, t in expected.items())


def test_values_that_are_no_floats_are_there_at_once(tmp_path: Path) -> None:
    """The library loads them as they are: they are no hole in a file."""
    folder = saved(gpt2, tmp_path)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "transformer.extra": torch.arange(5)}, file, {"format": "pt"})
    with left_in_files() as stand_ins:
        made = stand_ins.headers(f"file://{folder}")
        assert torch.equal(load_file(made / file.name)["transformer.extra"], torch.arange(5))


def edited(change: Callable[[dict[str, object]], object], name: str = "model.safetensors.index.json") -> Change:
    def edit(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return edit


def cut(folder: Path) -> None:
    path = sorted(folder.glob("model-*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-50])


def first(document: dict[str, object], value: object) -> None:
    names = document["weight_map"]
    assert isinstance(names, dict)
    names[min(names)] = value


INDEX = "model.safetensors.index.json"
LIES: list[tuple[Change, str]] = [
    (edited(lambda d: d.update(weight_map=[1])), f"{INDEX}: Expected `object`, got `array` - at `$.weight_map`"),
    (edited(lambda d: d.clear()), f"{INDEX}: Object missing required field `weight_map`"),
    (edited(lambda d: first(d, 3)), f"{INDEX}: Expected `str`, got `int` - at `$.weight_map[...]`"),
    (edited(lambda d: first(d, "../x.safetensors")), "got '../x.safetensors' for 'transformer.h.0.attn.c_attn.bias'"),
    (edited(lambda d: first(d, "/etc/passwd")), "got '/etc/passwd' for 'transformer.h.0.attn.c_attn.bias', expected a"),
    (edited(lambda d: first(d, "model-00009-of-00009.safetensors")), "model-00009-of-00009.safetensors"),
    (
        edited(lambda d: d["weight_map"].update(never=min(d["weight_map"].values()))),  # type: ignore[attr-defined]
        "for 'never', which has no such tensor",
    ),
    (lambda folder: (folder / INDEX).write_bytes(b"\xff{"), INDEX),
    (cut, "truncated, or no safetensors file: got "),
    (
        edited(lambda d: d.update(n_embd=64), "config.json"),
        "c_attn.bias: got shape [96] in its weights, expected [192] by",
    ),
]


@pytest.mark.parametrize("url", [False, True], ids=["folder", "url"])
@pytest.mark.parametrize(("lie", "words"), LIES)
def test_what_is_not_as_it_says_is_one_line(lie: Change, words: str, url: bool, tmp_path: Path) -> None:
    folder = saved(gpt2, tmp_path, shard="20KB")
    lie(folder)
    spec = at_url(folder) if url else spec_of(folder, None)
    with pytest.raises(UserError) as caught, left_in_files():
        build_model(spec)
    said = str(caught.value)
    assert words in said and "\n" not in said and "isthmus-" not in said, said


def test_a_wrong_total_size_is_said_and_harms_nobody(tmp_path: Path) -> None:
    folder = saved(gpt2, tmp_path, shard="20KB")
    edited(lambda d: d.update(metadata={"total_size": 7}))(folder)
    with pytest.warns(match=r"index.json: total_size: got 7, expected \d+, as the files have"):
        build_model(spec_of(folder, None))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3:", "names no place"),
        ("nosuch://bucket/model", "Protocol not known: nosuch"),
        ("file://{folder}/nowhere", "no config.json there, expected the folder of a model that transformers saved"),
        ("file://{folder}/config", "neither model.safetensors nor model.safetensors.index.json there"),
    ],
)
def test_a_url_without_a_model_is_one_line(url: str, words: str, tmp_path: Path) -> None:
    folder = saved(gpt2, tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_bytes((folder / "config.json").read_bytes())
    url = url.format(folder=tmp_path) + ("//" if url == "s3:" else "")
    with pytest.raises(UserError) as caught:
        build_model(ModelSpec(name="hf", options={"path": url, "task": "causal-lm"}))
    assert words in str(caught.value) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("method", ["info", "cat_ranges", "cat_file"])
def test_a_store_that_does_not_answer_is_one_line(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(gpt2, tmp_path)
    monkeypatch.setattr(store, "ANSWER_S", 0.05)
    monkeypatch.setattr(store, "SLOWEST", 1e9)
    monkeypatch.setattr(f"fsspec.implementations.local.LocalFileSystem.{method}", lambda *_, **__: time.sleep(30))
    with pytest.raises(UserError, match=r"file://.* cannot be read: no answer in 0 s$"), left_in_files():
        build_model(at_url(folder))


def test_a_file_that_has_changed_is_not_read_as_if_it_had_not(tmp_path: Path) -> None:
    folder = saved(gpt2, tmp_path)
    found = in_store(at_url(folder))
    (folder / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"got \d+ bytes, mtime .*, expected \d+ bytes, mtime .*: it has changed"):
        next(iter(found.values())).read()


@pytest.mark.parametrize("path", ["s3://bucket/model", "folder"])
def test_a_store_that_fails_is_no_reason_to_copy_the_whole_model(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []

    def initial(*_: object) -> object:
        builds.append(1)
        raise UserError("the store hangs up")

    monkeypatch.setattr(first_weights, "_initial", initial)
    spec = ModelSpec(name="hf", options={"path": path})
    with pytest.raises(UserError, match="the store hangs up"):
        first_weights._built(SimpleNamespace(job=SimpleNamespace(model=spec)), cast("Any", None))  # pyright: ignore
    assert len(builds) == (1 if "://" in path else 2)
