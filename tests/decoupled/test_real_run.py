"""Replicas in processes of their own: one is stopped, one is killed, the others go on; and the record says all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.data import load_dataset
from isthmus.fleet import Device, Fleet, Links
from isthmus.protocol.decoupled_events import MergeChanges, StepsMade
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.decoupled.merger import MergerWatch
from isthmus.runtime.decoupled.run import DecoupledRun
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.signals import Stop
from isthmus_testing.decoupled_replay import replay

from .small import LINK, NAMES, job_of, pid_of, replicas_of

FLEET = Fleet(
    name="four",
    devices=tuple(Device(name=name, region="here", flops_per_s=1e9, memory_bytes=1 << 30) for name in NAMES),
    links=Links(default=LINK),
)


@pytest.mark.long
def test_the_others_go_on_where_one_is_stopped_and_one_is_killed(tmp_path: Path) -> None:
    job = job_of()
    runtime = msgspec.structs.replace(job.runtime, emulate=False)
    training = msgspec.structs.replace(job.training, steps=60)
    job = msgspec.structs.replace(job, training=training, runtime=runtime)
    merges, steps = list[MergeChanges](), dict.fromkeys(NAMES, 0)
    stopped_at, pids = dict[str, int](), dict[str, int]()

    backend = LocalBackend(places=dict.fromkeys(NAMES, ProcessPlace(step_s=0.01)))
    run = DecoupledRun(replicas_of(job, FLEET, backend), tmp_path)

    def stepped(name: str, made: StepsMade, samples: int, seconds: float) -> None:
        steps[name] += 1
        if not stopped_at and min(steps.values()) >= 3:
            pids.update(a=pid_of("a"), b=pid_of("b"))
            stopped_at.update(steps)
            os.kill(pids["a"], signal.SIGSTOP)
            os.kill(pids["b"], signal.SIGKILL)
        if samples > 700 and pids:
            os.kill(pids["a"], signal.SIGCONT)

    watch = MergerWatch(stepped=stepped, merged=lambda merge, _: merges.append(merge), note=lambda _: None)
    outcome = run.run(watch, Stop())
    assert outcome.finish.outcome == "done"
    assert outcome.samples >= 60 * 16
    assert steps["c"] > stopped_at["c"] + 10
    assert steps["b"] < steps["c"] / 2, "but for what was on its way"
    again = replay(job, load_dataset(job.used_data, "train"), NAMES, merges)
    assert all(torch.equal(a, b) for a, b in zip(again.known, run.merged.known, strict=True))
