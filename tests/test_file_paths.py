"""Paths in jobs, fleets, sites and sweeps count from the file that names them, wherever the command runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.api.sweep import _check
from isthmus.data import DataSpec, load_dataset
from isthmus.data.registry import allowed
from isthmus.documents import beside, folder_of, read_toml
from isthmus.federated.job import client_data, load_federated_job
from isthmus.federated.task_spec import load_site
from isthmus.fleet import resolve_fleet
from isthmus.job import fleet_of, load_job
from isthmus.overrides import counted_from

FLEET = '[[device]]\nname = "d"\ncompute = "1 GFLOPS"\nmemory = "1 GiB"\n'
JOB = """
name = "j"
fleet = "fleets/own.toml"
[model]
name = "gpt"
options = {vocab_size = 256, sequence_length = 8, width = 8, layers = 1, heads = 1}
[data]
kind = "text"
options = {files = "texts/*.txt", sequence_length = 8, holdout = 0.0}
[training]
batch_size = 2
micro_batches = 1
"""
FEDERATED = """
name = "f"
[model]
name = "linear"
options = {inputs = 2, classes = 2}
[data]
kind = "npz"
options = {path = "numbers.npz"}
[federated.partition]
scheme = "iid"
clients = 2
[federated.participation]
availability = "here.json"
round_length = "1 h"
[federated]
rounds = 1
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that name each other; the process runs in another one, below the same parent."""
    files, here = tmp_path / "files", tmp_path / "here"
    for folder in (files / "fleets", files / "texts", here):
        folder.mkdir(parents=True)
    (files / "fleets" / "own.toml").write_text(FLEET)
    (files / "texts" / "a.txt").write_text("a text of some length, which is cut into windows. " * 4)
    (files / "job.toml").write_text(JOB)
    np.savez(files / "numbers.npz", x=np.ones((8, 2), np.float32), labels=np.zeros(8, np.int64))
    monkeypatch.chdir(here)
    return files


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.txt", "/j/a/b.txt"),
        ("./b", "/j/./b"),
        ("../b", "/j/../b"),
        ("b.toml", "/j/b.toml"),
        ("/b", "/b"),
        ("~/b", "~/b"),
        ("s3://bucket/b", "s3://bucket/b"),
        ("stdlib", "stdlib"),
        ("three-sites", "three-sites"),
    ],
)
def test_what_is_a_path(path: str, expected: str) -> None:
    assert beside(path, "/j") == expected
    assert beside(path, "") == path


@pytest.mark.parametrize("named", ["../files/job.toml", "absolute"])
def test_a_job_elsewhere_names_its_fleet_and_its_data(elsewhere: Path, named: str) -> None:
    job = load_job(elsewhere / "job.toml" if named == "absolute" else Path(named))
    assert fleet_of(job).names == ("d",)
    assert len(load_dataset(job.data, "train")) > 10
    assert job.data.options["files"] == "texts/*.txt", "devices of a fleet have a folder of their own"


def test_options_of_clients_files_count_from_the_job_too() -> None:
    options = {"path": "all/clients", "kind": "text", "options": {"tokenizer": "words/t.json", "sequence_length": 8}}
    located = DataSpec(kind="clients", options=options).counted_from("/j").located
    assert located["path"] == "/j/all/clients"
    assert located["options"] == {"tokenizer": "/j/words/t.json", "sequence_length": 8}


def test_in_its_own_folder_a_job_is_as_it_is_written(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(elsewhere)
    job = load_job(Path("job.toml"))
    assert (folder_of(Path("job.toml")), job.data.folder, job.fleet) == ("", "", "fleets/own.toml")
    assert len(load_dataset(job.data, "train")) > 10


def test_what_is_given_in_place_counts_from_where_the_command_runs(elsewhere: Path) -> None:
    Path("mine.txt").write_text("another text that is long enough for windows of eight bytes each")
    Path("mine.toml").write_text(FLEET.replace('"d"', '"mine"'))
    job = load_job(elsewhere / "job.toml", {"data.options.files": ["mine.txt"], "fleet": "mine.toml"})
    assert fleet_of(job).names == ("mine",)
    assert len(load_dataset(job.data, "train")) == 7


def test_another_owner_s_device_reads_from_its_own_folder(elsewhere: Path) -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("the device's own text of forty-one bytes.")
    job = load_job(elsewhere / "job.toml")
    with allowed(job.data, None, foreign=True) as data:
        assert len(load_dataset(data, "train")) == 5
    with allowed(job.data, None, foreign=False) as data:
        assert len(load_dataset(data, "train")) > 10


def test_a_federated_job_elsewhere(elsewhere: Path) -> None:
    (elsewhere / "here.json").write_text(json.dumps({"0": {"start": [0.0], "duration": [3600.0]}}))
    (elsewhere / "federated.toml").write_text(FEDERATED)
    job = load_federated_job(elsewhere / "federated.toml")
    assert sum(client_data(job).sizes) == 7, "and one of eight is held out"
    assert job.federated.participation.availability == str(elsewhere / "here.json")


def test_a_site_elsewhere(elsewhere: Path) -> None:
    (elsewhere / "site.toml").write_text(
        'job = "f"\nalgorithm = {name = "fedavg"}\nmodel = {name = "gpt"}\n[data]\nkind = "npz"\n'
        'options = {path = "numbers.npz"}\n[pipeline]\nfleet = "fleets/own.toml"\n'
    )
    config = load_site(elsewhere / "site.toml")
    assert len(load_dataset(config.data, "train")) == 8, "it evaluates nothing"
    assert config.pipeline is not None and config.pipeline.fleet == str(elsewhere / "fleets/own.toml")


def test_points_of_a_sweep_count_from_its_file(elsewhere: Path) -> None:
    point = counted_from(
        {"data.options.files": "texts/*.txt", "training.steps": 1}, folder_of(elsewhere / "sweep.toml")
    )
    assert point == {"data.options.files": str(elsewhere / "texts/*.txt"), "training.steps": 1}
    _check(elsewhere / "job.toml", point, on_fleet=False)


def test_a_callable_of_the_user_gets_its_options_as_they_are() -> None:
    data = DataSpec(kind="mine:load", options={"path": "x/y"}).counted_from("/j")
    assert data.located == {"path": "x/y"}


def test_files_of_the_project_name_fleets_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a command runs: each job and site of examples and benchmarks."""
    monkeypatch.chdir(tmp_path)
    root, named = Path(__file__).parents[1], 0
    for path in sorted([*(root / "examples").rglob("*.toml"), *(root / "benchmarks").rglob("*.toml")]):
        tables = read_toml(path, "file")
        for fleet in (tables.get("fleet"), *(t.get("fleet") for t in tables.values() if isinstance(t, dict))):
            if isinstance(fleet, str):
                assert resolve_fleet(beside(fleet, folder_of(path))).devices, path
                named += 1
    assert named >= 6
