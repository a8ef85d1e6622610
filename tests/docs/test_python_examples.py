"""The scripts of examples/python do what they say."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.job import fleet_of, load_job, prepare
from isthmus.planners import plan

EXAMPLES = Path(__file__).parents[2] / "examples"


def told(callbacks: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / "python" / callbacks)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_module_is_trained_on_several_machines(tmp_path: Path) -> None:
    found = re.search(r"loss ([\d.]+) -> ([\d.]+), devices (.+)", told("train_module.py", tmp_path))
    assert found is not None
    assert float(found[2]) < float(found[1]) / 2
    assert len(found[3].split(", ")) == 4


@pytest.mark.long
def test_a_plan_is_made_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: unlike the others it starts none, to which the script would be the main module."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "python" / "plan_and_draw.py"), run_name="__main__")
    assert len(re.findall(r"operators \d+ to \d+", capsys.readouterr().out)) >= 2
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_isthmus_and_the_naive_loop_end_at_the_same_weights(tmp_path: Path) -> None:
    found = re.search(r"after 5 rounds: (\S+)", told("federated_twin.py", tmp_path))
    assert found is not None and float(found[1]) < 1e-6


def test_a_planner_in_thirty_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(EXAMPLES / "python" / "planner.py", tmp_path / "own_planner.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = load_job(EXAMPLES / "gpt-stdlib.toml")
    fleet = fleet_of(job)
    made = plan("own_planner:proportional", prepare(job).problem(fleet))
    speeds = {device.name: device.sustained_flops_per_s for device in fleet.devices}
    (replica,) = made.replicas
    assert [stage.device for stage in replica.stages] == sorted(speeds, key=lambda name: -speeds[name])
