"""Checkpoints: complete or absent whatever happens, and loadable without Isthmus."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isthmus.errors import PeerError, UserError
from isthmus.training import checkpoint as module_under_test
from isthmus.training.checkpoint import (
    CheckpointWriter,
    LandedPart,
    Manifest,
    latest_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    newest_whole_checkpoint,
    read_manifest,
    read_tensors,
)
from isthmus.training.layout import header_of, pack
from isthmus.training.stored import TensorFile


def _state(step: int) -> dict[str, dict[str, Tensor]]:
    return {
        "stage-0": {"a": torch.full((2, 3), float(step)), "optimizer.a.step": torch.tensor(float(step))},
        "stage-1": {"b": torch.arange(4.0) + step},
        "rest": {"scale": torch.ones(())},
    }


def _save(writer: CheckpointWriter, step: int) -> Path:
    for part, tensors in _state(step).items():
        writer.write(step, part, tensors)
    return writer.commit(Manifest(step=step, seed=1, batch=8, data={"d0": {"train": "f"}}))


def _whole(checkpoint: Path) -> int:
    """Its step, after reading all of it."""
    step = read_manifest(checkpoint).step
    expected = {name: t for part in _state(step).values() for name, t in part.items()}
    found = read_tensors(checkpoint)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return step


def test_a_checkpoint(tmp_path: Path) -> None:
    path = _save(CheckpointWriter(tmp_path), 40)
    assert path == tmp_path / "step-000040" == latest_checkpoint(tmp_path)
    assert (tmp_path / "latest").read_text() == "step-000040"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "rest.safetensors",
        "stage-0.safetensors",
        "stage-1.safetensors",
    ]
    assert _whole(path) == 40
    manifest = read_manifest(path)
    assert (manifest.seed, manifest.batch, manifest.data) == (1, 8, {"d0": {"train": "f"}})
    assert manifest.files["stage-1.safetensors"].tensors == ("b",)


def test_old_ones_are_removed(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (5, 999_999, 1_000_000, 1_000_001):
        _save(writer, step)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-1000000", "step-1000001"], "by number, not by name"


def test_two_steps_may_be_in_the_making(tmp_path: Path) -> None:
    """A fast device reports its part of the next checkpoint before a slow one its part of this."""
    writer = CheckpointWriter(tmp_path)
    for part in ("stage-0", "stage-1", "rest"):
        for step in (1, 2):
            if (part, step) != ("stage-1", 2):
                writer.write(step, part, _state(step)[part])
    writer.commit(Manifest(step=1, seed=1, batch=8))
    writer.write(2, "stage-1", _state(2)["stage-1"])
    writer.commit(Manifest(step=2, seed=1, batch=8))
    assert [_whole(path) for path in sorted(tmp_path.glob("step-*"))] == [1, 2]


class Crash(Exception):
    pass


def _crashing(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Every file operation of a writer counts; the one numbered `at` crashes before it does anything."""
    count = 0

    def wrap(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == at:
                raise Crash
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    wrap(module_under_test, "save_tensors")
    wrap(TensorFile, "_write")
    wrap(os, "fsync")
    wrap(Path, "rename")
    wrap(Path, "write_bytes")
    wrap(Path, "write_text")
    wrap(shutil, "rmtree")
    return lambda: count


@pytest.mark.parametrize("keep", [1, 2])
def test_a_crash_at_any_point_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    _save(CheckpointWriter(tmp_path / "base", keep), 1)
    _save(CheckpointWriter(tmp_path / "base", keep), 2)
    at, finished = 0, False
    while not finished:
        at += 1
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "base", folder)
        with monkeypatch.context() as patched:
            _crashing(patched, at)
            try:
                _save(CheckpointWriter(folder, keep), 3)
                finished = True
            except Crash:
                pass
        assert _whole(latest_checkpoint(folder)) in (2, 3)
        _save(CheckpointWriter(folder, keep), 4)  # the resumed run
        assert _whole(latest_checkpoint(folder)) == 4
        assert (folder / "latest").read_text() == "step-000004"
        assert not list(folder.glob(".*")), "what was left unfinished is cleaned up"
        assert len(list(folder.glob("step-*"))) <= keep
    assert at > 10, "every operation was tried"


def test_what_an_earlier_crash_left_does_not_mix_in(tmp_path: Path) -> None:
    partial = tmp_path / ".step-000003"
    partial.mkdir()
    (partial / "stage-7.safetensors").write_bytes(b"half")
    assert newest_checkpoint(tmp_path) is None
    path = _save(CheckpointWriter(tmp_path), 3)
    assert not (path / "stage-7.safetensors").exists()


@pytest.mark.parametrize("pointer", [None, "step-000001", "step-000009", "../.."])
def test_the_pointer_is_for_people(tmp_path: Path, pointer: str | None) -> None:
    writer = CheckpointWriter(tmp_path)
    _save(writer, 1)
    _save(writer, 2)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    (tmp_path / "step-000003").mkdir()  # without a manifest
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-notes" / "manifest.json").write_text("{}")
    assert _whole(latest_checkpoint(tmp_path)) == 2


def test_nothing_saved_yet(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing saved there yet"):
        latest_checkpoint(tmp_path / "none")


def _truncate(path: Path) -> None:
    file = path / "stage-1.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_truncate, "stage-1.safetensors is not as it was saved: truncated"),
        (lambda path: (path / "stage-1.safetensors").write_bytes(b"x" * 99), "is not as it was saved"),
        (lambda path: (path / "stage-1.safetensors").unlink(), "stage-1.safetensors is missing"),
        (lambda path: shutil.copy(path / "stage-0.safetensors", path / "stage-1.safetensors"), "stage-1.safetensors"),
        (lambda path: (path / "manifest.json").write_text('{"step": 1'), "manifest.json"),
        (lambda path: (path / "manifest.json").write_text('{"version": 1, "step": 1}'), "version"),
        (lambda path: (path / "manifest.json").write_bytes(b'{"step": 1, "data": {"tr\xe1in": "f"}}'), "manifest.json"),
        (lambda path: (path / "manifest.json").unlink(), "not a complete checkpoint"),
    ],
)
def test_a_spoilt_checkpoint_is_named(tmp_path: Path, spoil: Callable[[Path], object], words: str) -> None:
    path = _save(CheckpointWriter(tmp_path), 1)
    spoil(path)
    with pytest.raises(UserError) as caught:
        read_tensors(path)
    assert "step-000001" in str(caught.value) and words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["stage-0.safetensors", "stage-1.safetensors", "rest.safetensors"])
def test_one_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    """In a weight, too: to safetensors it is a weight like any other."""
    path = _save(CheckpointWriter(tmp_path), 1)
    _flip(path / name, -1)
    with pytest.raises(UserError, match=f"{name} is not as it was saved"):
        read_tensors(path)


@pytest.mark.parametrize("said", ['"seed": 1', '"batch": 8', '"shuffle": true', '"f"', "stage-0", '"a"'])
def test_a_manifest_that_says_something_else_is_noticed(tmp_path: Path, said: str) -> None:
    """Still one that can be read: a run would go on with other samples."""
    path = _save(CheckpointWriter(tmp_path), 1)
    manifest = (path / "manifest.json").read_text()
    others = {
        '"seed": 1': '"seed": 3',
        '"batch": 8': '"batch": 9',
        '"shuffle": true': '"shuffle": false',
        '"f"': '"g"',
        "stage-0": "stage-2",
        '"a"': '"e"',
    }
    assert said in manifest
    (path / "manifest.json").write_text(manifest.replace(said, others[said]))
    with pytest.raises(UserError, match=r"manifest\.json is not as it was saved"):
        read_manifest(path)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        writer = CheckpointWriter(tmp_path)
        writer.write(1, "stage-0", {"w": torch.zeros(2)})
        folder = writer.commit(Manifest(step=1, seed=0, batch=1))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask}


def test_a_finite_checkpoint_outlives_newer_ones_that_are_not(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=1)
    for step, finite in ((1, True), (2, False), (3, False)):
        writer.write(step, "stage-0", {"w": torch.zeros(2)})
        writer.commit(Manifest(step=step, seed=0, batch=1, finite=finite))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000003"]
    assert newest_whole_checkpoint(tmp_path, lambda _: None) == writer.at(1)
    assert newest_whole_checkpoint(tmp_path, lambda _: None, finite=False) == writer.at(3)


def test_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=4)
    passed_over: list[str] = []
    assert newest_whole_checkpoint(tmp_path / "none", passed_over.append) is None
    for step in (1, 2, 3, 4):
        _save(writer, step)
    assert newest_whole_checkpoint(tmp_path, passed_over.append) == tmp_path / "step-000004"
    assert not passed_over
    _truncate(tmp_path / "step-000004")
    (tmp_path / "step-000003" / "manifest.json").write_text("{}")
    found = newest_whole_checkpoint(tmp_path, passed_over.append)
    assert found is not None and found.name == "step-000002" and _whole(found) == 2
    assert ["step-000004" in line for line in passed_over] == [True, False]
    for step in (1, 2):
        _flip(tmp_path / f"step-{step:06d}" / "rest.safetensors", -1)
    with pytest.raises(UserError, match="step-000004"):
        newest_whole_checkpoint(tmp_path, passed_over.append)


def test_a_renamed_checkpoint_is_of_another_step(tmp_path: Path) -> None:
    path = _save(CheckpointWriter(tmp_path), 1).rename(tmp_path / "step-000002")
    with pytest.raises(UserError, match="step: got 1"):
        read_manifest(path)
    assert _whole(path.rename(tmp_path / "step-best")) == 1


class Tied(nn.Module):
    """A tie, a parameter that nothing uses, buffers that are kept in the state and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("mask", torch.ones(2), persistent=False)


def test_a_plain_module_loads_it_with_and_without_isthmus(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = {
        "table.weight": torch.randn(5, 3),
        "unused": torch.randn(2),
        "mean": torch.randn(3),
        "mask": torch.ones(2),
    }
    writer = CheckpointWriter(tmp_path)
    writer.write(7, "stage-0", {"table.weight": values["table.weight"], "optimizer.table.weight.step": torch.ones(())})
    writer.write(7, "rest", {name: values[name] for name in ("unused", "mean", "mask")})
    path = writer.commit(Manifest(step=7, seed=0, batch=1))

    ours = Tied()
    assert load_checkpoint(ours, path) == 7
    plain = Tied()
    state = {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}
    told = plain.load_state_dict({n: t for n, t in state.items() if not n.startswith("optimizer.")}, strict=False)
    assert told.missing_keys == ["head.weight"], "the tie is saved once"
    for module in (ours, plain):
        assert module.head.weight is module.table.weight
        for name, value in values.items():
            if name != "mask":
                assert torch.equal(dict(module.state_dict())[name], value), name


def test_a_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.write(1, "stage-0", {"table.weight": torch.zeros(9, 3)})
    with pytest.raises(UserError, match=r"'table.weight' has shape \[9, 3\], expected \[5, 3\]"):
        load_checkpoint(Tied(), writer.commit(Manifest(step=1, seed=0, batch=1)))
    writer.write(2, "stage-0", {"tabel.weight": torch.zeros(5, 3)})
    with pytest.raises(UserError, match=r"'tabel\.weight' is not in Tied"):
        load_checkpoint(Tied(), writer.commit(Manifest(step=2, seed=0, batch=1)))
    writer.write(3, "stage-0", {"head.weight": torch.zeros(5, 3)})
    with pytest.raises(UserError, match="no value for 'unused' of Tied"):
        load_checkpoint(Tied(), writer.commit(Manifest(step=3, seed=0, batch=1)))


def test_no_pickle(tmp_path: Path) -> None:
    path = _save(CheckpointWriter(tmp_path), 1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    source = Path(module_under_test.__file__).parent.parent
    for file in source.rglob("*.py"):
        text = file.read_text()
        assert re.search(r"torch\.load\(|\b(import|from) (pickle|_pickle|dill|cloudpickle)\b", text) is None, file


def test_a_part_of_a_tensor_brings_nothing_of_the_rest(tmp_path: Path) -> None:
    memory = torch.full((4000,), 7.0)
    memory[10:14] = memory[::1000] = 1.0
    CheckpointWriter(tmp_path).write(1, "stage-0", {"slice": memory[10:14], "steps": memory[::1000]})
    (written,) = tmp_path.rglob("*.safetensors")
    assert load_file(written)["steps"].tolist() == [1.0] * 4
    assert memory[20].numpy().tobytes() not in written.read_bytes()


STATE = {
    "w": torch.randn(700, 500, generator=torch.Generator().manual_seed(0)),
    "optimizer.w.step": torch.tensor(3.0),
    "image": torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last),
    "half": torch.randn(9).to(torch.bfloat16),
}


def _landed(writer: CheckpointWriter, state: Mapping[str, Tensor], most_bytes: int | None = None) -> LandedPart:
    """What `state` lands as; its connection breaks after so many bytes."""
    sent = io.BytesIO(b"".join(pack(t) for t in state.values())[:most_bytes])

    def fill(buffer: memoryview) -> None:
        if sent.readinto(buffer) < buffer.nbytes:
            raise PeerError("closed in the middle of a frame")

    return writer.land([header_of(name, t) for name, t in state.items()], fill, "replica.1.")


def test_what_lands_is_the_file_that_the_library_writes(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "run")
    assert STATE["image"].stride() != STATE["image"].contiguous().stride()
    writer.keep(1, "stage-0", _landed(writer, STATE))
    folder = writer.commit(Manifest(step=1, seed=0, batch=1))
    named = {f"replica.1.{name}": tensor.contiguous() for name, tensor in STATE.items()}
    save_file(named, tmp_path / "library")
    written = (folder / "stage-0.safetensors").read_bytes()
    assert written == (tmp_path / "library").read_bytes()
    saved = read_manifest(folder).files["stage-0.safetensors"]
    assert saved.sha256 == hashlib.sha256(written).hexdigest() and saved.tensors == tuple(named)


@pytest.mark.parametrize("most_bytes", [0, 1000, 1_400_010])
def test_a_frame_that_breaks_in_the_middle_leaves_nothing(tmp_path: Path, most_bytes: int) -> None:
    writer = CheckpointWriter(tmp_path)
    with pytest.raises(PeerError, match="in the middle"):
        _landed(writer, STATE, most_bytes)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_lands_and_is_not_kept_is_removed(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    landed = _landed(writer, STATE)
    assert [path.name for path in tmp_path.iterdir()] == [landed.path.name]
    del landed
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_told_by_who_keeps_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection lives on: all that comes is taken off it."""
    writer = CheckpointWriter(tmp_path)

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        landed = _landed(writer, STATE)
    with pytest.raises(UserError, match=r"stage-0\.safetensors: cannot be written: .*No space left"):
        writer.keep(1, "stage-0", landed)
