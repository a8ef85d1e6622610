"""A run's folder: nothing is changed by a run that is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.api.folder import RunFolder
from isthmus.api.run_entries import ENTRIES, LossPoint, RunEntry, run_entries
from isthmus.errors import UserError
from isthmus.job import load_job
from tests.dashboard.folders import federated_run

from .commands import edited, isthmus, refused, write_job


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = isthmus("train", write_job(folder, steps=4), "--run", folder / "run")
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("width = 16", "width = 32", ["shape"]),
        ("seed = 3", "seed = 4", ["training.seed"]),
    ],
)
def test_a_refused_resume_changes_nothing(finished: Path, old: str, new: str, words: list[str]) -> None:
    before = snapshot(finished / "run")
    job = write_job(finished, steps=8)
    edited(job, (old, new) if old in job.read_text() else ("[training]", f"[training]\n{new}"))
    refused(isthmus("train", job, "--run", finished / "run", "--resume"), 2, *words)
    assert snapshot(finished / "run") == before


def test_runs_of_one_name_get_folders_of_their_own(tmp_path: Path) -> None:
    first, second = RunFolder.fresh(tmp_path, "r"), RunFolder.fresh(tmp_path, "r")
    assert (first.path.name, second.path.name) == ("r", "r-2")
    with first.claimed(), second.claimed():
        (second.path / "something").write_text("")
    assert not first.path.exists(), "nothing was written into it"
    assert second.path.exists()
    with first.claimed(), pytest.raises(UserError, match="another process"), RunFolder(first.path).claimed():
        pass


def test_the_run_that_was_interrupted_goes_on(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "r")
    assert RunFolder(tmp_path / "r").is_done
    lines = (tmp_path / "r" / ENTRIES).read_text().splitlines(keepends=True)
    assert RunFolder.newest(tmp_path, "r").path.name == "r"
    for number in (2, 3):
        shutil.copytree(finished / "run", tmp_path / f"r-{number}")
    assert RunFolder.newest(tmp_path, "r").path.name == "r-3"
    (tmp_path / "r-2" / ENTRIES).write_text("".join(lines[:-1]))  # it was killed
    assert RunFolder.newest(tmp_path, "r").path.name == "r-2"
    federated_run(tmp_path / "f")
    assert RunFolder(tmp_path / "f").is_done
    lines = (tmp_path / "f" / ENTRIES).read_text().splitlines(keepends=True)
    (tmp_path / "f" / ENTRIES).write_text("".join(lines[:-1]))
    assert not RunFolder(tmp_path / "f").is_done


def test_a_refused_job_leaves_no_folder(tmp_path: Path) -> None:
    job = edited(write_job(tmp_path), ("layers = 2", "layrs = 2"))
    refused(isthmus("train", job), 2, "layrs")
    assert not Path(load_job(job).run_dir, load_job(job).name).exists()


def npz_job(folder: Path, values: np.ndarray, **training: object) -> Path:
    np.savez(folder / "data.npz", x=values.astype(np.float32), y=np.arange(len(values)) % 3)
    lines = "\n".join(f"{key} = {value}" for key, value in training.items())
    path = folder / "npz.toml"
    path.write_text(f"""
name = "npz"
planner = "even"
run_dir = "{folder}"
[model]
name = "user_arrays:Model"
[data]
kind = "npz"
options = {{ path = "{folder}/data.npz", holdout = 0 }}
[training]
steps = 2
batch_size = 4
micro_batches = 2
{lines}
""")
    (folder / "user_arrays.py").write_text("""
import isthmus
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        print("building")

    def forward(self, x, y):
        print("forward")
        return F.cross_entropy(self.second(torch.relu(self.first(x))), y)

class Printing(isthmus.Callback):
    def step(self, done):
        print("step", done.step)
""")
    return path


def test_without_held_out_data_and_with_a_model_that_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = npz_job(tmp_path, np.random.default_rng(0).normal(size=(20, 4)))
    job.write_text(job.read_text() + '[[callback]]\nname = "user_arrays:Printing"\n')
    monkeypatch.syspath_prepend(tmp_path)
    done = isthmus("train", job, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["loss"] > 0
    assert "building" in done.err and "step 2" in done.err


def test_a_loss_that_is_no_number_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = npz_job(tmp_path, np.full((20, 4), np.nan), non_finite='"ignore"')
    monkeypatch.syspath_prepend(tmp_path)
    done = isthmus("train", job, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["loss"] is None and told["comparison"]["measured_step_s"] > 0
    assert (tmp_path / "npz" / "timeline.png").exists()
    assert not (tmp_path / "npz" / "loss.png").exists()


def test_losses_of_a_session_that_was_killed_before_its_first_checkpoint_are_kept(finished: Path) -> None:
    """The steps are done again, and give their losses again."""
    source = RunFolder.existing(finished / "run")
    folder = RunFolder.empty(finished / "killed")
    parts = source.job(), source.fleet(), source.plan()
    folder.begin(*parts, 0)
    for step in (1, 2):
        folder.log(LossPoint(step=step, loss=float(step)))
    folder.begin(*parts, 0)
    assert folder.losses() == []
    assert [point.step for point in RunFolder.existing(folder.path / "sessions/1").losses()] == [1, 2]
    folder.log(LossPoint(step=1, loss=1.0))
    folder.begin(*parts, 1)  # nothing is forgotten, and there is nothing to keep beside it
    assert [point.step for point in folder.losses()] == [1]
    assert not (folder.path / "sessions/2").exists()


def test_the_trace_of_a_resumed_run_has_every_session_also_one_that_was_killed(finished: Path, tmp_path: Path) -> None:
    """Sessions begin 60 seconds apart: the first is killed, the second ends, the third was killed as it began."""
    run, done = tmp_path / "run", RunFolder.existing(finished / "run")
    shutil.copytree(finished / "run", run, ignore=shutil.ignore_patterns("trace.jsonl", "predicted.jsonl"))
    began = run_entries(run)[0]
    first = [began, RunEntry(at_s=began.at_s + 1, kind="step", step=2)]
    (run / ENTRIES).write_bytes(msgspec.json.Encoder().encode_lines(first))
    (run / "spans.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(done.measured().spans[:7]))
    folder, parts = RunFolder.existing(run), (done.job(), done.fleet(), done.plan())
    folder.begin(*parts, 2)
    assert len(RunFolder.existing(run / "sessions/1").measured().spans) == 7
    second = [RunEntry(at_s=began.at_s + 60, kind="began", step=2, steps=4), *run_entries(finished / "run")[1:]]
    (run / ENTRIES).write_bytes(msgspec.json.Encoder().encode_lines([*first, *second]))
    folder.write_traces(done.predicted(), done.measured(), done.periods())
    shutil.copy(done.summary, folder.summary)

    told = isthmus("trace", run, "--json")
    assert told.code == 0, told.err
    shown = json.loads(told.out)
    assert [(s["first_step"], s["last_step"], s["outcome"]) for s in shown["sessions"]] == [(1, 2, ""), (3, 4, "done")]
    assert [s["start_s"] for s in shown["sessions"]] == [0, 60]
    assert shown["comparison"] == json.loads(isthmus("trace", finished / "run", "--json").out)["comparison"]
    slices = [e for e in json.loads((run / "trace.perfetto.json").read_bytes())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 7 + len(done.predicted().spans) + len(done.measured().spans)
    assert sum(e["ts"] < 60e6 for e in slices) == 7
    words = isthmus("trace", run).out
    assert f"{run / 'sessions' / '1'}: steps 1 to 2, killed or at work, from 0.0 s" in words
    assert f"{run}: steps 3 to 4, done, from 60.0 s" in words

    folder.begin(*parts, 4)
    (run / "spans.jsonl").write_bytes(b"")
    shown = json.loads(isthmus("trace", run, "--json").out)
    assert len(shown["sessions"]) == 3 and shown["comparison"] is None


def test_losses_that_cannot_be_read_are_named_when_a_run_goes_on(finished: Path) -> None:
    source = RunFolder.existing(finished / "run")
    folder, said = RunFolder.empty(finished / "damaged"), list[str]()
    parts = source.job(), source.fleet(), source.plan()
    folder.begin(*parts, 0)
    for step in (1, 2, 3):
        folder.log(LossPoint(step=step, loss=float(step)))
    path = folder.path / "losses.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step":2', b'"step":'))
    folder.begin(*parts, 3, said.append)
    assert said == [f"{path}: line 2 cannot be read: passed over"]
    assert [point.step for point in folder.losses()] == [1, 3]
