"""A decoupled run on devices that joined: one is killed, one comes later, and the record says all."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.api.job_overrides import federated_job_of
from isthmus.api.observer import Observer, Silent
from isthmus.api.run import Run
from isthmus.api.run_job import run_job
from isthmus.api.run_session import Choices
from isthmus.api.serve import run_queue, submit_job
from isthmus.api.terminal import logged
from isthmus.cost import SyncPolicy
from isthmus.data import load_dataset
from isthmus.fleet import Device, Links, dump_fleet
from isthmus.fleet import Fleet as Machines
from isthmus.job import Job
from isthmus.protocol.decoupled_events import MergeChanges
from isthmus.runtime.decoupled.merged_run import merges_file, replica_groups, seeded_model
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.job_queue import JobQueue
from isthmus.training.checkpoint import latest_checkpoint
from isthmus.training.decoupled import fragments_of
from isthmus_testing.decoupled_replay import replay
from tests.decoupled.small import LINK, NAMES, job_of, pid_of
from tests.federated.test_federated_runs import model, write

from .parties import Fleet, in_background, outcomes, soon
from .test_fleet_runs import Devices

MACHINES = Machines(
    name="four",
    devices=tuple(Device(name=name, region="here", flops_per_s=1e9, memory_bytes=1 << 30) for name in NAMES),
    links=Links(default=LINK),
)


def _job(folder: Path, steps: int = 20_000, replicas: object = "devices") -> Job:
    """By default of more steps than are made before it is stopped."""
    (folder / "fleet.toml").write_text(dump_fleet(MACHINES))
    job = job_of(replicas=replicas)
    runtime = msgspec.structs.replace(job.runtime, snapshot_every=0 if replicas == "devices" else 1)
    training = msgspec.structs.replace(job.training, steps=steps)
    fleet = str(folder / "fleet.toml")
    return msgspec.structs.replace(job, planner="even", training=training, runtime=runtime, fleet=fleet)


class _Running:
    """The job on the devices of a fleet, in a thread."""

    def __init__(self, fleet: Fleet, folder: Path, job: Job | None = None, *, resume: bool = False) -> None:
        self.job, self.folder, self.notes, self.stop = job or _job(folder), folder / "run", list[str](), Stop()
        self._resume = resume
        self._ended: list[Run | Exception] = []
        self._thread = threading.Thread(target=self._run, args=(fleet,), daemon=True)
        self._thread.start()

    def _run(self, fleet: Fleet) -> None:
        class Notes(Observer):
            def note(_, text: str) -> None:
                self.notes.append(text)

        choices = Choices(run=self.folder, resume=self._resume, backend=fleet.service)
        self._ended += outcomes(lambda: run_job(self.job, choices, Notes(), self.stop))

    @property
    def merges(self) -> list[MergeChanges]:
        return [line.merge for line in merges_file(self.folder).lines()] if self.folder.is_dir() else []

    @property
    def contributors(self) -> list[str]:
        """Of every merge so far, in order."""
        return [c.replica for merge in self.merges for fragment in merge.fragments for c in fragment.contributions]

    def said(self, text: str) -> bool:
        return any(note.startswith(text) for note in self.notes)

    def end(self, outcome: str = "interrupted") -> None:
        """What it has is merged and saved; at its own end where it is done."""
        if outcome == "interrupted":
            self.stop.request()
        self._thread.join(120)
        assert [run.outcome for run in self._ended if isinstance(run, Run)] == [outcome], (self._ended, self.notes)

    def check_bits(self, checkpoint: Path | None = None) -> None:
        """The saved weights are those that the record gives, from the checkpoint that the run went on from."""
        job = self.job
        names = list(replica_groups(job, MACHINES))
        again = replay(job, load_dataset(job.used_data, "train"), names, self.merges, checkpoint)
        expected, found = seeded_model(job), seeded_model(job)
        again.fill(fragments_of(expected, job.sync.decoupled.fragments))
        Run(self.folder).load(found)
        for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.long
def test_a_device_is_lost_and_another_comes_and_the_run_is_resumed(fleet: Fleet, tmp_path: Path) -> None:
    run = _Running(fleet, tmp_path)
    first, second = Devices(fleet, tmp_path, ("a",)), Devices(fleet, tmp_path, ("b",))
    soon(lambda: {"a", "b"} <= {*run.contributors})
    second.stop()
    soon(lambda: run.said("b is lost: "))
    third = Devices(fleet, tmp_path, ("c",))
    soon(lambda: "c" in run.contributors)
    run.end()
    run.check_bits()
    saved = shutil.copytree(latest_checkpoint(run.folder / "checkpoints"), tmp_path / "saved")
    merged = len(run.merges)
    run = _Running(fleet, tmp_path, resume=True)
    soon(lambda: len(run.merges) > merged + 4)
    run.end()
    run.check_bits(saved)
    for devices in (first, third):
        devices.stop()


@pytest.mark.long
def test_a_drained_device_gives_all_and_one_that_comes_back_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    run = _Running(fleet, tmp_path)
    devices = Devices(fleet, tmp_path, ("a", "b"))
    soon(lambda: {"a", "b"} <= {*run.contributors})
    fleet.state.drain("b")
    soon(lambda: run.said("b has left"))
    given = run.contributors.count("b")
    soon(lambda: run.contributors.count("a") > 2 * given)
    assert run.contributors.count("b") <= given + job_of().sync.decoupled.fragments, "what it gave last"
    devices.stop()
    soon(lambda: run.said("no device is left"))
    given = run.contributors.count("a")
    back = Devices(fleet, tmp_path, ("a",))
    soon(lambda: run.contributors.count("a") > given)
    run.end()
    back.stop()


def test_a_pipeline_on_devices_that_joined_makes_all_of_its_steps_though_one_is_killed(
    fleet: Fleet, tmp_path: Path
) -> None:
    run = _Running(fleet, tmp_path, _job(tmp_path, 150, [NAMES]))
    devices = Devices(fleet, tmp_path, NAMES)
    soon(lambda: len(run.merges) > 2)
    os.kill(pid_of("b"), signal.SIGKILL)
    run.end("done")
    assert Run(run.folder).losses[-1].step == 150
    first, second, *_ = (note for note in run.notes if note.startswith("a+b+c+d: a pipeline over "))
    assert "over a, b, c, d:" in first and "over a, c, d:" in second
    run.check_bits()
    devices.stop()


@pytest.mark.long
def test_submitted_jobs_of_each_program_are_trained(fleet: Fleet, tmp_path: Path) -> None:
    """One after the other, on the same devices; those that do not depend on who is quicker as alone."""
    there = {"run_dir": str(tmp_path / "runs")}
    merged, replicas = _job(tmp_path, 60), _job(tmp_path, 4)
    replicas = msgspec.structs.replace(replicas, planner="random", sync=SyncPolicy())
    rounds = federated_job_of(write(tmp_path), {"runtime.timeout": "10 s"})
    pipelines = _job(tmp_path, 60, [NAMES[:2], NAMES[2:]])
    jobs = {"pipelines": pipelines, "merged": merged, "replicas": replicas, "rounds": rounds}
    for name, job in jobs.items():
        submit_job(msgspec.structs.replace(job, name=name, **there), state=fleet.state.folder)
    queue, devices = JobQueue(fleet.state.folder), Devices(fleet, tmp_path, NAMES)

    def ends() -> None:
        soon(lambda: not {"queued", "running"} & {job.state for job in queue.jobs()}, 240)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with in_background(ends, lambda: None), contextlib.suppress(KeyboardInterrupt):
        run_queue(fleet.service, queue, fleet.state.folder, fleet.said.append, logged)
    devices.stop()
    assert [(job.state, job.detail) for job in queue.jobs()] == [("done", "")] * 4
    runs = {name: Run(next((tmp_path / "runs").glob(f"{name}*"))) for name in jobs}
    assert all(run.outcome == "done" for run in runs.values())
    assert runs["pipelines"].losses[-1].step == runs["merged"].losses[-1].step == 60
    assert len(runs["replicas"].plan.replicas) == 4
    alone = {
        name: run_job(jobs[name], Choices(run=tmp_path / name), Silent(), Stop()) for name in ("replicas", "rounds")
    }
    assert [p.loss for p in runs["replicas"].losses] == pytest.approx([p.loss for p in alone["replicas"].losses])
    assert model(runs["rounds"].path) == model(alone["rounds"].path)


@pytest.mark.long
def test_a_pipeline_and_a_device_that_joined_go_on_as_others_leave_and_return_and_are_resumed(
    fleet: Fleet, tmp_path: Path
) -> None:
    """While a pipeline plans again the other goes on: versions that come meanwhile are added one after the other."""
    run = _Running(fleet, tmp_path, _job(tmp_path, replicas=[NAMES[:3], NAMES[3:]]))
    devices = Devices(fleet, tmp_path, ("a", "b", "d"))
    soon(lambda: "d" in run.contributors)
    third = Devices(fleet, tmp_path, ("c",))  # a pipeline begins when all devices of its plan are there
    soon(lambda: "a+b+c" in run.contributors)
    fleet.state.drain("c")
    soon(lambda: run.said("a+b+c: c has left"))
    given = run.contributors.count("a+b+c")
    soon(lambda: run.contributors.count("a+b+c") > given)
    run.end()
    run.check_bits()
    saved = shutil.copytree(latest_checkpoint(run.folder / "checkpoints"), tmp_path / "saved")
    merged = len(run.contributors)
    run = _Running(fleet, tmp_path, run.job, resume=True)
    soon(lambda: {"a+b+c", "d"} <= {*run.contributors[merged:]})
    run.end()
    run.check_bits(saved)
    for joined in (devices, third):
        joined.stop()
