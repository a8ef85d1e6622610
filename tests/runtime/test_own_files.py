"""Weights of a pretrained model that devices have themselves, and what they lack, from the coordinator."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.job import prepare
from isthmus.job.first_weights import first_weights
from isthmus.protocol.run_messages import PlaceWeights, WeightFile
from isthmus.runtime.coordinator.parameter_store import Placed, WeightFiles
from isthmus.runtime.coordinator.run import Watcher
from isthmus.runtime.device.own_files import own_weights
from isthmus.training.draws import LEAST_BYTES, repeated
from isthmus.training.stored import Sent, in_memory, stored_tensors
from isthmus.training.weights import initial_weights

from .jobs import DIGITS, final_weights, job_of, plain_run, run

FILE = "model.safetensors"
OURS: dict[str, Tensor] = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.randn(500, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "c": torch.tensor(2.0),
}


def values(folder: Path) -> dict[str, Sent]:
    """The coordinator's, under names of the module, with one in memory and one that is cast."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(OURS, folder / FILE)
    found = {f"base.{name}": tensor.named(f"base.{name}") for name, tensor in stored_tensors(folder / FILE).items()}
    return {**found, "base.b": found["base.b"].cast(torch.float32), "lora": torch.ones(2)}


def expected() -> dict[str, Tensor]:
    return {f"base.{name}": t.float() if name == "b" else t for name, t in OURS.items()}


def assert_equal(sent: Mapping[str, Sent], wanted: dict[str, Tensor]) -> None:
    got = {name: in_memory(value) for name, value in sent.items()}
    assert got.keys() == wanted.keys()
    assert all(got[name].dtype == t.dtype and torch.equal(got[name], t) for name, t in wanted.items())


def test_a_device_with_the_files_is_sent_what_they_lack(tmp_path: Path) -> None:
    ours = values(tmp_path / "base")
    files = WeightFiles(str(tmp_path / "base")).of(ours)
    order, sent = Placed().split("d0", PlaceWeights(epoch=1), ours, files)
    assert sent.keys() == {"lora"} and order.files == files
    found, lacking = own_weights(order.files)
    assert not lacking
    assert_equal(found, expected())


def test_a_file_of_the_hub_is_found_in_the_cache_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("c" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (file,) = WeightFiles("org/tiny").of(values(snapshot))
    assert (file.commit, file.file) == ("c" * 40, FILE)
    found, lacking = own_weights([file])
    assert not lacking
    assert_equal(found, expected())
    shutil.rmtree(snapshot)
    _, lacking = own_weights([file])
    assert lacking.keys() == expected().keys() and "is not in this device's cache" in lacking["base.a"]


def rewritten(**changed: Tensor) -> Callable[[Path], object]:
    return lambda path: save_file({**OURS, **changed}, path)


@pytest.mark.parametrize(
    ("spoil", "names", "words"),
    [
        (lambda path: path.unlink(), "abc", "no such file here"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "abc", "truncated"),
        (rewritten(b=OURS["b"] + 1), "b", "has other bytes than the coordinator's"),
        (rewritten(a=OURS["a"].T.contiguous()), "a", "of another type or shape"),
        (rewritten(a=OURS["a"].view(torch.int32)), "a", "of another type or shape"),
        (lambda path: save_file({"a": OURS["a"]}, path), "bc", "not in the file"),
        (lambda path: path.rename(path.with_name("x")) and path.mkdir(), "abc", "no such file here"),
    ],
)
def test_what_a_device_has_otherwise_comes_from_the_coordinator(
    spoil: Callable[[Path], object], names: str, words: str, tmp_path: Path
) -> None:
    ours = values(tmp_path / "coordinator")
    placed, lies = Placed(), values(tmp_path / "device")
    files = WeightFiles(str(tmp_path / "coordinator")).of(ours)
    there = tuple(WeightFile(model=str(tmp_path / "device"), file=f.file, tensors=f.tensors) for f in files)
    _, sent = placed.split("d0", PlaceWeights(epoch=1, own=frozenset({"x"})), ours, there)
    spoil(tmp_path / "device" / FILE)
    found, lacking = own_weights(there)
    assert lacking.keys() == {f"base.{name}" for name in names} and len(lies) == len(ours)
    assert all(words in reason for reason in lacking.values())
    again, more = placed.lacking("d0", tuple(lacking))
    assert again == PlaceWeights(epoch=1, own=frozenset({"x"})) and more.keys() == lacking.keys()
    assert_equal({**sent, **found, **more}, {**expected(), "lora": torch.ones(2)})
    with pytest.raises(PeerError, match="lacks weights that it was not asked for, such as 'base"):
        placed.lacking("d0", tuple(lacking))


@pytest.mark.parametrize(
    ("model", "file", "words"),
    [
        ("{outside}", FILE, "names no file outside of this folder"),
        ("~", FILE, "names no file outside of this folder"),
        ("base/../../outside", FILE, "names no file outside of this folder"),
        ("base", f"../../outside/{FILE}", "expected a file below the model's folder"),
        ("linked", FILE, "leads out of this device"),
        ("~no-such-user-here/base", FILE, "home directory"),
    ],
)
def test_another_owners_coordinator_reads_no_file_outside_of_the_folder(
    model: str, file: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, outside = tmp_path / "own", tmp_path / "outside"
    ours = values(outside)
    values(own / "base")
    (own / "linked").symlink_to(outside)
    monkeypatch.chdir(own)
    (asked,) = WeightFiles(str(outside)).of(ours)
    found, lacking = own_weights([msgspec.structs.replace(asked, model="base")], foreign=True)
    assert not lacking and found.keys() == expected().keys()
    named = msgspec.structs.replace(asked, model=model.format(outside=outside), file=file)
    found, lacking = own_weights([named], foreign=True)
    assert not found and all(words in reason for reason in lacking.values()), lacking


def test_a_commit_is_no_path(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    (asked,) = WeightFiles(str(tmp_path / "base")).of(values(tmp_path / "base"))
    _, lacking = own_weights([msgspec.structs.replace(asked, model="org/tiny", commit="../../../x")])
    assert all("expected 40 hexadecimal digits" in reason for reason in lacking.values()), lacking


def test_a_device_draws_what_it_is_not_sent() -> None:
    prepared = prepare(job_of("mlp", {"layers": 2}, DIGITS, steps=4))
    first, seed, files = first_weights(prepared), prepared.job.training.seed, WeightFiles()
    placed, drawn = Placed(), files.drawn(first.values, first.draws, seed)
    order, sent = placed.split("d0", PlaceWeights(epoch=1), first.values, files.of(first.values), drawn)
    assert order.drawn is not None and not order.files
    assert all(value.nbytes < LEAST_BYTES for value in sent.values())
    found, lacking = repeated(order.drawn)
    assert found and not lacking
    assert_equal({**sent, **found}, initial_weights(prepared.build, prepared.captured, seed))
    found, lacking = repeated(msgspec.structs.replace(order.drawn, seed=seed + 1))
    _, more = placed.lacking("d0", tuple(lacking))
    assert not found and {**sent, **more} == first.values


@pytest.mark.long
def test_a_device_that_draws_otherwise_is_sent_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("mlp", {"layers": 2}, DIGITS, steps=2)
    prepared, notes, draws = prepare(job), list[str](), WeightFiles.drawn
    monkeypatch.setattr(WeightFiles, "drawn", lambda own, values, these, seed: draws(own, values, these, seed + 1))
    run(prepared, [], tmp_path / "run", watcher=Watcher(noted=notes.append))
    (note,) = (note for note in notes if "come from the coordinator" in note)
    assert note.endswith("weights come from the coordinator: drawn here it has other values: " + OTHERWISE)
    expected = dict(plain_run(job, prepared)[0].named_parameters())
    assert all(
        torch.equal(value, expected[name])
        for name, value in final_weights(tmp_path / "run").items()
        if name in expected
    )


OTHERWISE = "another torch, processor or model"
