"""Decoupled replicas whose processes share the device, one of them a pipeline with packed messages: the CPU's loss."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.accelerators import Accelerator

JOB = """
name = "{name}"
run_dir = "{folder}"
fleet = "{folder}/fleet.toml"
schedule = "zero-bubble"

[model]
name = "gpt"
options = {{ vocab_size = 256, sequence_length = 64, width = {width}, layers = 4, heads = 4 }}

[data]
kind = "text"
options = {{ files = "stdlib", sequence_length = 64, max_bytes = 2000000 }}

[compression]
method = "int8"

[training]
steps = 80
batch_size = 32
micro_batches = 8
eval_every = 80
eval_samples = 64

[[optimizer]]
name = "adamw"
lr = 2e-3

[sync]
mode = "decoupled"
period = 2

[sync.decoupled]
replicas = [["near-0"], ["far-0", "far-1"]]
packed = ["far-0+far-1"]
fragments = 2
codec = "int4"

[runtime]
device = "{device}"
adapt = false
"""
FLEET = """
name = "two regions"
links = {{ default = {{ latency = "20 ms", bandwidth = "50 Mbit/s" }} }}

[[device]]
name = "near-0"
region = "near"
compute = "{gflops} GFLOPS"
memory = "16 GiB"

[[device]]
name = "far"
region = "away"
count = 2
compute = "{gflops} GFLOPS"
memory = "16 GiB"
"""


EMULATED = {"checked": (64, 3), "hardware": (256, 40)}
"""Width of the model, and GFLOP/s of a device. A step takes half a second, so devices that start later contribute."""


def trained(folder: Path, device: str, width: int, gflops: int) -> tuple[float, dict[str, int]]:
    """The held-out loss of the merged model, and each replica's contributions to merges."""
    name = device.partition(":")[0]
    (folder / "fleet.toml").write_text(FLEET.format(gflops=gflops), encoding="utf-8")
    job = folder / f"{name}.toml"
    job.write_text(JOB.format(name=name, folder=folder, device=device, width=width), encoding="utf-8")
    # A process of its own: replicas are copies of it, and where a driver has started its copies cannot compute.
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", "train", str(job)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line) for line in (folder / name / "losses.jsonl").read_text(encoding="utf-8").splitlines()]
    merges = Counter(re.findall(r'"replica":"([^"]+)"', (folder / name / "merges.jsonl").read_text(encoding="utf-8")))
    return next(line["loss"] for line in losses if line["split"] == "heldout"), dict(merges)


def test_a_run_is_as_good_as_on_the_cpu(
    gpu: Accelerator, gpu_name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    width, gflops = EMULATED["checked" if gpu_name.startswith("checked") else "hardware"]
    expected, _ = trained(tmp_path, "cpu", width, gflops)
    loss, merges = trained(tmp_path, gpu_name, width, gflops)
    record_property("held-out loss, CPU and device", f"{expected:.3f} {loss:.3f}")
    record_property("contributions", ", ".join(f"{name} {number}" for name, number in sorted(merges.items())))
    assert loss == pytest.approx(expected, rel=0.1)  # merges come in another order: a run that diverged is far above
    assert set(merges) == {"near-0", "far-0+far-1"}, "both replicas contribute"
    assert merges["far-0+far-1"] > 2, "it takes what was merged, and goes on"
