"""Bad input is one line on stderr and exit code 2 or 3; every command has --json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .commands import isthmus, write_job


def _refused(done: object, code: int, *words: str) -> None:
    assert done.returncode == code, done  # type: ignore[attr-defined]
    errors = done.stderr  # type: ignore[attr-defined]
    (line,) = [x for x in errors.splitlines() if x.startswith("error:")]
    assert "Traceback" not in errors
    for word in words:
        assert word in line, line


def _edited(folder: Path, old: str, new: str) -> Path:
    path = write_job(folder)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("clip_norm", "clip_nrom", ["clip_nrom", "clip_norm"]),
        ("steps = 12", 'steps = "many"', ["training.steps"]),
        ('fleet = "laptop"', 'fleet = "laptpo"', ["laptpo", "laptop"]),
        ('planner = "even"', 'planner = "evne"', ["evne", "even"]),
        ('name = "gpt"', 'name = "gtp"', ["gtp", "gpt"]),
        ("batch_size = 8", "batch_size = 9", ["batch_size", "9", "micro_batches"]),
        ('files = "stdlib"', 'files = "missing.txt"', ["missing.txt"]),
        ("[training]", "[training]]", ["TOML"]),
        ('name = "small"', 'name = "small"\nruntime = {patience = "5 parsecs"}', ["runtime.patience", "parsecs"]),
    ],
)
def test_bad_jobs(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    _refused(isthmus("plan", _edited(tmp_path, old, new)), 2, *words)


def test_missing_job_file(tmp_path: Path) -> None:
    _refused(isthmus("plan", tmp_path / "no.toml"), 2, "no.toml", "not found")


def test_too_large_a_model(tmp_path: Path) -> None:
    job = _edited(tmp_path, "width = 16", "width = 8192")
    _refused(isthmus("plan", job), 3, "bytes short")


def test_bad_unit_in_a_fleet(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[[device]]\nname = "a"\nregion = "r"\ncompute = "10 GFLOPS"\nmemory = "16 Gigs"\n')
    _refused(isthmus("plan", write_job(tmp_path), "--fleet", fleet), 2, "memory", "Gigs")


def test_truncated_checkpoint(tmp_path: Path) -> None:
    job, run = write_job(tmp_path, steps=3), tmp_path / "run"
    assert isthmus("train", job, "--run", run).returncode == 0
    (file,) = sorted(run.glob("checkpoints/step-*/stage-0.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    _refused(isthmus("train", job, "--run", run, "--resume", "--steps", "6"), 2, "stage-0.safetensors", "truncated")
    _refused(isthmus("export", run, tmp_path / "out"), 2, "stage-0.safetensors")


def test_every_command_speaks_json(tmp_path: Path) -> None:
    job, run = write_job(tmp_path, steps=4), tmp_path / "run"
    trained = isthmus("train", job, "--run", run, "--json")
    assert trained.returncode == 0, trained.stderr
    told = json.loads(trained.stdout)
    assert told["heldout_loss"] > 0 and told["run"] == str(run)
    for name in ("plan.json", "trace.jsonl", "predicted.jsonl", "timeline.png", "loss.png", "checkpoints/latest"):
        assert (run / name).exists(), name

    plan = json.loads(isthmus("plan", job, "--json").stdout)
    assert [s["device"] for s in plan["replicas"][0]["stages"]] == ["laptop-0", "laptop-1"]
    simulated = json.loads(isthmus("simulate", job, "--json", "--plan", run / "plan.json").stdout)
    assert simulated["step_s"] > 0
    assert "three-sites" in json.loads(isthmus("topologies", "--json").stdout)
    assert {"even", "chain"} <= json.loads(isthmus("planners", "--json").stdout).keys()

    traced = json.loads(isthmus("trace", run, "--json").stdout)
    assert json.loads(Path(traced["perfetto"]).read_text())["traceEvents"]
    exported = json.loads(isthmus("export", run, tmp_path / "out", "--json").stdout)
    assert exported["step"] == 4 and (tmp_path / "out" / "model.safetensors").exists()
