"""A run that is killed, interrupted or loses a device goes on from its last checkpoint, bit for bit."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import torch

from isthmus.training.checkpoint import latest_checkpoint, read_manifest, read_tensors

from .commands import isthmus, kill_all, start, wait_until, write_job


def _losses(folder: Path) -> list[str]:
    path = folder / "losses.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _same(a: Path, b: Path) -> None:
    first, second = (read_tensors(latest_checkpoint(f / "checkpoints")) for f in (a, b))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_killed_at_random_steps_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=14)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert isthmus("train", job, "--run", whole).returncode == 0

    step = random.randint(4, 10)
    process = start("train", job, "--run", broken)
    wait_until(lambda: len(_losses(broken)) >= step or process.poll() is not None)
    kill_all(process)
    assert read_manifest(latest_checkpoint(broken / "checkpoints")).step <= 14
    done = isthmus("train", job, "--run", broken, "--resume")
    assert done.returncode == 0, done.stderr
    _same(whole, broken)
    assert _losses(whole) == _losses(broken)


def test_ctrl_c_saves_and_exits_130(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=100_000)
    folder = tmp_path / "run"
    process = start("train", job, "--run", folder)
    wait_until(lambda: len(_losses(folder)) >= 5)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    steps = read_manifest(latest_checkpoint(folder / "checkpoints")).step
    assert steps >= 5
    assert (folder / "timeline.png").exists() and (folder / "loss.png").exists()


def test_a_lost_device_ends_the_run_cleanly(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=100_000)
    folder = tmp_path / "run"
    process = start("train", job, "--run", folder)
    wait_until(lambda: (folder / "checkpoints" / "latest").exists())
    (device, *_) = _children(process.pid)
    os.kill(device, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 4, errors
    (line,) = [x for x in errors.splitlines() if x.startswith("error:")]
    assert "laptop-" in line and "lost" in line
    assert read_manifest(latest_checkpoint(folder / "checkpoints")).step >= 3


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return found
