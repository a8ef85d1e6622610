"""`export --push`: the hub gets what `export` writes; a repository is private unless it is asked for otherwise."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import huggingface_hub.constants
import pytest

from isthmus.api.folder import RunFolder
from isthmus.models import ModelSpec, build_model
from isthmus.run_files import write_json
from isthmus.training.checkpoint import CheckpointWriter, Manifest
from tests.runtime.commands import isthmus, refused

from .fake_hub import TOKEN, Hub, fake_hub

MODEL = ModelSpec(name="mlp", options={"features": 64, "width": 16, "layers": 1, "classes": 10})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As one that trained three steps."""
    path = tmp_path_factory.mktemp("run")
    write_json(path / "job.json", {"name": "x", "model": MODEL, "data": {"kind": "digits"}, "training": {"steps": 3}})
    module = build_model(MODEL)
    writer = CheckpointWriter(RunFolder(path).checkpoints)
    writer.write(3, "stage-0", module.state_dict())
    writer.commit(Manifest(step=3, seed=0, batch=8))
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Hub]:
    with fake_hub() as found:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # Read from the environment when the library is imported, which other tests may have done.
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield found


def test_the_hub_gets_what_export_writes(run: Path, hub: Hub, tmp_path: Path) -> None:
    assert isthmus("export", run, tmp_path / "out").code == 0
    done = isthmus("export", run, "--push", "me/first")
    assert done.code == 0, done.err
    assert done.out == f"{hub.address}/me/first: the model after 3 steps\n"
    assert hub.repositories == {"me/first": True} and hub.messages == ["the model after 3 steps, by Isthmus"]
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files["me/first"] == written and hub.objects, "the weights by LFS"
    assert json.loads(isthmus("export", run, "--push", "me/first", "--json").out)["step"] == 3, "once more"
    assert isthmus("export", run, "--push", "me/open", "--public").code == 0
    assert hub.repositories == {"me/first": True, "me/open": False}


def test_what_is_refused_is_one_line(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(isthmus("export", run, "--push", "first"), 2, "--push: got 'first', expected USER/NAME")
    refused(isthmus("export", run, "--push", "me/first--x"), 2, "--push me/first--x: ", "--")
    refused(isthmus("export", run, "--push", "they/x"), 2, "--push they/x: refused with 403: You don't have the rights")
    refused(isthmus("export", run), 2, "expected either DIR or --push USER/NAME")
    refused(isthmus("export", run, "x", "--push", "me/x"), 2, "expected either DIR or --push USER/NAME")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(isthmus("export", run, "--push", "me/x"), 2, "refused with 401: Invalid username or password.")
    monkeypatch.delenv("HF_TOKEN")
    refused(isthmus("export", run, "--push", "me/x"), 2, "--push me/x: no token: set HF_TOKEN")
    assert hub.repositories == {}
