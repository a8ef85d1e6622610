"""Replicas in processes of their own: one is stopped, one is killed, the others go on; and the record says all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.api.decoupled import replica_plans
from isthmus.data import load_dataset
from isthmus.fleet import Device, Fleet, Links
from isthmus.job import prepare
from isthmus.protocol.decoupled_events import MergeChanges, StepsMade
from isthmus.runtime.decoupled.merger import MergerWatch
from isthmus.runtime.decoupled.run import DecoupledRun
from isthmus.runtime.processes.signals import Stop
from isthmus_testing.decoupled_replay import replay

from .small import LINK, NAMES, job_of

STEP_S = dict.fromkeys(NAMES, 0.01)
FLEET = Fleet(
    name="four",
    devices=tuple(Device(name=name, region="here", flops_per_s=1e9, memory_bytes=1 << 30) for name in NAMES),
    links=Links(default=LINK),
)


@pytest.mark.long
def test_the_others_go_on_where_one_is_stopped_and_one_is_killed(tmp_path: Path) -> None:
    job = job_of()
    job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=60))
    merges, steps = list[MergeChanges](), dict.fromkeys(NAMES, 0)
    stopped_at = dict[str, int]()

    run = DecoupledRun(job, FLEET, tmp_path)
    with run.processes:
        pids = run.processes.pids()

        def stepped(name: str, made: StepsMade, samples: int, seconds: float) -> None:
            steps[name] += 1
            if not stopped_at and min(steps.values()) >= 3:
                stopped_at.update(steps)
                os.kill(pids["a"], signal.SIGSTOP)
                os.kill(pids["b"], signal.SIGKILL)
            if samples > 700:
                os.kill(pids["a"], signal.SIGCONT)

        watch = MergerWatch(stepped=stepped, merged=lambda merge, _: merges.append(merge), note=lambda _: None)
        prepared = prepare(job)
        outcome = run.run(prepared, replica_plans(prepared, FLEET), STEP_S, watch, Stop())
    assert outcome.finish.outcome == "done"
    assert outcome.samples >= 60 * 16
    assert steps["c"] > stopped_at["c"] + 10
    assert steps["b"] <= stopped_at["b"] + 3  # what was on its way
    again = replay(job, load_dataset(job.used_data, "train"), NAMES, merges)
    assert all(torch.equal(a, b) for a, b in zip(again.known, run.merged.known, strict=True))
