"""Steps that overlap, over real processes: neither a lost device nor a resumption leaves a trace in their bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from isthmus.data import DataSpec
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.training.checkpoint import read_manifest
from tests.runtime.jobs import (
    DIGITS,
    RESNET,
    TEXT,
    final_weights,
    fleet_of,
    images,
    job_of,
    plain_run,
    random_cut,
)

from .real import keeps_cuts, pid_of, prepared_of, run

STEPS, SAVE_EVERY = 9, 3
GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 16, "width": 16, "layers": 2, "heads": 2}
UNET: dict[str, object] = {"width": 4, "depth": 1}


@pytest.mark.parametrize(
    ("name", "options", "data", "stages", "flops_per_s"),
    [
        pytest.param("gpt", GPT, lambda _: TEXT, 3, 5e7, marks=pytest.mark.long),
        ("unet", UNET, lambda _: DIGITS, 2, 2e7),
        pytest.param("hf-resnet", RESNET, images, 2, 2e8, marks=pytest.mark.long),
    ],
)
def test_a_lost_device_and_a_resumed_run_equal_the_plain_loop(
    tmp_path: Path,
    name: str,
    options: dict[str, object],
    data: Callable[[Path], DataSpec],
    stages: int,
    flops_per_s: float,
) -> None:
    """`stages`: of the resumed run, such that no value goes to two of them."""
    training = {"steps": STEPS, "save_every": SAVE_EVERY, "keep_checkpoints": STEPS, "clip_norm": 1.0}
    made = job_of(name, options, data(tmp_path), **training)
    runtime = replace(made.runtime, emulate=True, timeout="6 s", snapshot_every=2)
    job = replace(made, schedule="delayed", runtime=runtime)
    found = run(tmp_path, job, act=(4, lambda _: os.kill(pid_of("d1"), signal.SIGKILL)), flops_per_s=flops_per_s)
    assert found.outcome.outcome == "done", found.notes
    (recovery,) = found.outcome.recoveries
    assert "'d1' was lost" in recovery.reason and recovery.step >= 2
    module, losses = plain_run(job, prepared_of(job))
    assert dict(found.losses) == dict(enumerate(losses))
    _same(found.weights, module)

    (start,) = (c for c in (tmp_path / "checkpoints").iterdir() if c.is_dir() and read_manifest(c).step == SAVE_EVERY)
    prepared, fleet, after = prepared_of(job), fleet_of(stages), dict[int, float | None]()
    plan = keeps_cuts(prepared, random_cut(prepared, stages, 1, once=True))(fleet)
    watcher = Watcher(advanced=lambda item, loss, _: after.update({item.step: loss} if item.kind == "train" else {}))
    run_plan(prepared, plan, fleet, tmp_path / "resumed", RunOptions(emulate=False, resume_from=start), watcher)
    assert after == dict(enumerate(losses[SAVE_EVERY:], SAVE_EVERY))
    _same(final_weights(tmp_path / "resumed"), module)


def _same(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    """Parameters, and buffers that forwards write."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if name in weights or isinstance(value, nn.Parameter):
            assert torch.equal(weights[name], value), name
