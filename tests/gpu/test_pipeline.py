"""A run of two device processes that share the device: the CPU's losses, copies beside the work, memory as planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.accelerators import Accelerator
from tests.runtime.commands import isthmus

JOB = """
name = "{name}"
run_dir = "{folder}"
fleet = "{folder}/fleet.toml"
planner = "even"

[model]
name = "gpt"
options = {{ vocab_size = 256, sequence_length = 128, width = {width}, layers = 6, heads = 4 }}

[data]
kind = "text"
options = {{ files = "stdlib", sequence_length = 128, max_bytes = 2000000 }}

[training]
steps = 12
batch_size = 16
micro_batches = 8
precision = "{precision}"

[runtime]
device = "{device}"
adapt = false
compile = {compile}
"""
FLEET = """
name = "pair"
links = { intra = { latency = "5 ms", bandwidth = "200 Mbit/s" } }

[[device]]
name = "d"
count = 2
compute = "1 PFLOPS"
memory = "16 GiB"
"""
TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2}
"""Of a loss, relative: kernels sum in other orders, and in bf16 round otherwise."""


def trained(folder: Path, name: str, **settings: object) -> tuple[list[float], dict[str, list[dict[str, float]]]]:
    (folder / "fleet.toml").write_text(FLEET, encoding="utf-8")
    job = folder / f"{name}.toml"
    job.write_text(JOB.format(name=name, folder=folder, **{"compile": "false", **settings}), encoding="utf-8")
    done = isthmus("train", job)
    assert done.code == 0, done.err
    (folder / name / "notes.txt").write_text(done.err, encoding="utf-8")
    lines = (folder / name / "losses.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line.get("loss") is not None]
    return losses, json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("precision", TOLERANCES)
def test_a_run_is_that_of_the_cpu(
    precision: str, gpu: Accelerator, gpu_name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    settings = {"precision": precision, "width": 64 if gpu_name.startswith("checked") else 512}
    expected, _ = trained(tmp_path, "host", device="cpu", **settings)
    losses, summary = trained(tmp_path, "device", device=gpu_name, **settings)
    assert losses == pytest.approx(expected, rel=TOLERANCES[precision])
    hidden = [use["copies_hidden"] for use in summary["devices"] if use.get("copies_hidden") is not None]
    assert hidden, "a run on an accelerator copies, and its trace says so"
    errors = [use["predicted_bytes"] / use["peak_bytes"] - 1 for use in summary["memory"]]
    record_property(f"copies hidden ({precision})", f"{min(hidden):.0%}")
    record_property(f"memory predicted / peak - 1 ({precision})", " ".join(f"{error:+.0%}" for error in errors))
    if not gpu_name.startswith("checked"):  # whose stages are of kilobytes, and its blocks of megabytes
        assert all(abs(error) < 0.25 for error in errors), errors


def test_a_compiled_run_is_that_of_the_cpu(
    gpu_name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    settings = {"precision": "fp32", "width": 64 if gpu_name.startswith("checked") else 512}
    expected, _ = trained(tmp_path, "host", device="cpu", **settings)
    losses, _ = trained(tmp_path, "compiled", device=gpu_name, compile="true", **settings)
    assert losses == pytest.approx(expected, rel=TOLERANCES["fp32"])
    said = (tmp_path / "compiled" / "notes.txt").read_text(encoding="utf-8").splitlines()
    notes = [line for line in said if " compiled in " in line or "not compiled: " in line]
    assert len(notes) >= 2, "each device says how it computes"
    record_property("compile", "; ".join(notes[:2]))
