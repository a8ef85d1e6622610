"""A file's `module:callable` counts from the folder of the file, then from the folder in which the command runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own_layer = nn.Linear(64, 10)

    def forward(self, pixel_values, labels):
        return nn.functional.cross_entropy(self.own_layer(pixel_values.flatten(1)), labels)
"""
JOB = """
name = "own"
fleet = "laptop"
[model]
name = "named_net:Net"
[data]
kind = "digits"
[training]
steps = 1
batch_size = 8
micro_batches = 2
[[optimizer]]
name = "sgd"
lr = 0.1
"""


def planned(folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which has imported no module of this name."""
    command = [sys.executable, "-m", "isthmus", "plan", "jobs/job.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


def test_a_model_is_found_beside_its_job_file_before_the_folder_of_the_command(job: Path, tmp_path: Path) -> None:
    (job.parent / "named_net.py").write_text(MODEL)
    (tmp_path / "named_net.py").write_text("raise RuntimeError('the other file')")
    done = planned(tmp_path)
    assert done.returncode == 0, done


def test_a_model_in_the_folder_of_the_command_is_found_too(job: Path, tmp_path: Path) -> None:
    (tmp_path / "named_net.py").write_text(MODEL)
    done = planned(tmp_path)
    assert done.returncode == 0, done
    (tmp_path / "named_net.py").unlink()
    done = planned(tmp_path)
    assert done.returncode == 2 and "cannot import named_net" in done.stderr, done
