"""`isthmus up --dry-run` prints what an engine would be handed, and starts nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from isthmus.runtime.launchers.yaml_text import yaml_text
from tests.runtime.commands import isthmus, refused, write_job

from .schemas import check_manifest, check_task


def _shown(folder: Path, engine: str, *options: str) -> str:
    words = [word for option in options for word in ("--on-option", option)]
    done = isthmus("up", write_job(folder), "--on", engine, "--nodes", "2", "--dry-run", *words)
    assert (done.code, done.err) == (0, ""), done
    assert [path.name for path in folder.iterdir()] == ["job.toml"], "nothing is made"
    return done.out


def test_a_script_of_slurm(tmp_path: Path) -> None:
    lines = _shown(tmp_path, "slurm", "partition=gpu", 'parameters={constraint = "a100"}').splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=gpu", "#SBATCH --constraint=a100"} <= set(lines)


def test_manifests_of_kubernetes(tmp_path: Path) -> None:
    for manifest in yaml.safe_load_all(_shown(tmp_path, "kubernetes", "image=registry.example.org/isthmus:1")):
        check_manifest(manifest)


def test_tasks_of_skypilot(tmp_path: Path) -> None:
    tasks = list(yaml.safe_load_all(_shown(tmp_path, "skypilot", "accelerators=A100:8")))
    assert len(tasks) == 2
    for task in tasks:
        check_task(task)


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    refused(isthmus("up", job, "--on", "local", "--nodes", "2", "--dry-run"), 2, "--on local is handed no file")
    refused(isthmus("up", job, "--on", "kubernetes", "--nodes", "2", "--dry-run"), 2, "option image: got none")
    refused(isthmus("up", job, "--on", "slurm", "--dry-run"), 2, "--nodes: got none")


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [], "c": {}, "d": [{"x": 1, "y": ["p", {"z": None}]}, "s\nt\n", [1, [2.5]]]},
        {"on": "yes", "null": "~", "number": "1e5", "colon": "a: b", "empty": "", "hash": "a #b", "minus": "-"},
        {"script": "umask 077\n  echo \"$x\" 'y'\n\nesac\n", "lead": "  x\n", "tail": "x \ny\n", "tab": "a\tb\n"},
        {"unicode": "é ☃", "octal": "0o440", "flags": [True, False], "long": "word " * 60},
    ],
)
def test_yaml_is_read_as_it_was_written(value: dict[str, object]) -> None:
    assert list(yaml.safe_load_all(yaml_text(value, {"second": 2}))) == [value, {"second": 2}]


def test_handlers_of_logs_stay_open() -> None:
    """submitit, imported as it is, closes all that the process has."""
    script = (
        "import logging, sys\n"
        "class Kept(logging.Handler):\n"
        "    def close(self):\n"
        "        print('closed')\n"
        "logging.getLogger().addHandler(kept := Kept())\n"
        "from isthmus.runtime.launchers import slurm\n"
        "slurm._submitit()\n"
        "logging._handlerList.clear()\n"  # as Python ends it closes them itself
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "", done
