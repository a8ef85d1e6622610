"""Planning where the data are not: `isthmus describe-data` on a machine that has them, and the file that it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from isthmus.data import ColumnSpec, DataSpec
from isthmus.data.description import DataDescription, description_file, read_description
from isthmus.errors import UserError
from isthmus.federated.job import load_federated_job

from .commands import isthmus, refused

JOB = """
name = "away"
fleet = "laptop"
planner = "even"
run_dir = "runs"
model = {{name = "mlp", options = {{features = 4, width = 8, layers = 1, classes = 3}}}}
plan = {{data_holder = "laptop-0"}}
training = {{steps = 2, batch_size = 4, micro_batches = 2, eval_every = {evaluates}, eval_samples = 2}}
[data]
kind = "npz"
{description}
options = {{path = "samples.npz", holdout = 0.2}}
"""
SPEC = DataSpec(kind="npz", options={"path": "samples.npz", "holdout": 0.2})
GOOD = DataDescription(columns={"x": ColumnSpec(dtype="float32", shape=(4,))}, train=8, heldout=2)


def write_job(folder: Path, description: str = "", *, evaluates: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    named = f'description = "{description}"' if description else ""
    path = folder / "job.toml"
    path.write_text(JOB.format(description=named, evaluates=evaluates))
    return path


def test_a_description_is_enough_to_plan_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = write_job(tmp_path / "holder"), write_job(tmp_path / "office", "what.json")
    draw = np.random.default_rng(0)
    pixels, labels = draw.standard_normal((10, 4), dtype=np.float32), draw.integers(0, 3, 10)
    monkeypatch.chdir(here.parent)
    np.savez("samples.npz", pixel_values=pixels, labels=labels)
    done = isthmus("describe-data", here, "--out", there.parent / "what.json")
    assert done.code == 0, done.err
    assert isthmus("describe-data", here).out == (there.parent / "what.json").read_text()
    planned = isthmus("plan", here, "--json").out
    monkeypatch.chdir(there.parent)
    elsewhere = isthmus("plan", there, "--json")
    assert elsewhere.code == 0, elsewhere.err
    without_times = (json.loads(text)["replicas"] for text in (planned, elsewhere.out))
    assert next(without_times) == next(without_times)
    refused(isthmus("plan", write_job(there.parent)), 2, "no file samples.npz; of data that are elsewhere, data.desc")
    np.savez("samples.npz", pixel_values=pixels[:5], labels=labels[:5])
    job = write_job(there.parent, "what.json")
    words = "data.description: what.json: differs from the devices' data: 8 and 4 training samples"
    refused(isthmus("train", job), 2, words)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "text"}, "kind: got 'text', the job has 'npz'"),
        ({"options": {"path": "other.npz"}}, "options: got {'path': 'other.npz'}, the job has"),
        ({"heldout": 0}, "heldout: got none, but the job evaluates"),
        ({"train": 0}, "train: got 0 samples"),
        ({"train": 1 << 50}, "train: got 1125899906842624 samples"),
        ({"columns": {"x": {"dtype": "object"}}}, "columns.x: unknown dtype 'object'"),
        ({"version": 2}, "version"),
        ({"digests": {}}, "digests"),
    ],
)
def test_what_does_not_fit_the_job_is_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "what.json"
    path.write_bytes(description_file(SPEC, GOOD))
    assert read_description(path, SPEC, heldout=True) == GOOD
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        read_description(path, SPEC, heldout=True)
    assert str(caught.value).startswith(f"data.description: {path}: ")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.description: .*none.json: not found"):
        read_description(tmp_path / "none.json", SPEC, heldout=True)
    (tmp_path / "bad.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"data.description: .*bad.json"):
        read_description(tmp_path / "bad.json", SPEC, heldout=True)


def test_a_federated_job_names_none(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        'name = "f"\nmodel = {name = "mlp"}\nfederated = {algorithm = "fedavg", rounds = 1}\n'
        'data = {kind = "digits", description = "what.json"}\n'
    )
    with pytest.raises(UserError, match=r"data.description: got '.*what.json' in a federated job, expected none"):
        load_federated_job(job)
