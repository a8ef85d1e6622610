"""A decoupled run on devices that joined: one is killed, one comes later, and the record says all."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.api.observer import Observer
from isthmus.api.pipeline import Choices, run_job
from isthmus.api.run import Run
from isthmus.data import load_dataset
from isthmus.errors import UserError
from isthmus.fleet import Device, Links, dump_fleet
from isthmus.fleet import Fleet as Machines
from isthmus.job import Job
from isthmus.runtime.decoupled.fleet_replicas import check_joined
from isthmus.runtime.decoupled.record import merges_file, replay
from isthmus.runtime.decoupled.trainer import seeded_model
from isthmus.runtime.processes.signals import Stop
from isthmus.training.decoupled import fragments_of
from tests.decoupled.small import LINK, NAMES, job_of

from .parties import Fleet, outcomes, soon
from .test_fleet_runs import Devices

MACHINES = Machines(
    name="four",
    devices=tuple(Device(name=name, region="here", flops_per_s=1e9, memory_bytes=1 << 30) for name in NAMES),
    links=Links(default=LINK),
)


def _job(folder: Path) -> Job:
    """Of more steps than are made before it is stopped."""
    (folder / "fleet.toml").write_text(dump_fleet(MACHINES))
    job = job_of()
    training = msgspec.structs.replace(job.training, steps=1_000_000)
    return msgspec.structs.replace(job, training=training, fleet=str(folder / "fleet.toml"))


def _contributors(run: Path) -> list[str]:
    """Of every merge so far, in order."""
    lines = merges_file(run).lines() if run.is_dir() else []
    return [c.replica for line in lines for fragment in line.merge.fragments for c in fragment.contributions]


def test_a_device_is_lost_and_another_comes(fleet: Fleet, tmp_path: Path) -> None:
    job, folder, notes, stop = _job(tmp_path), tmp_path / "run", list[str](), Stop()

    class Notes(Observer):
        def note(self, text: str) -> None:
            notes.append(text)

    choices, ended = Choices(run=folder, backend=fleet.service), list[Run | Exception]()
    running = threading.Thread(target=lambda: ended.extend(outcomes(lambda: run_job(job, choices, Notes(), stop))))
    running.start()
    first, second = Devices(fleet, tmp_path, ("a",)), Devices(fleet, tmp_path, ("b",))
    soon(lambda: {"a", "b"} <= {*_contributors(folder)})
    second.stop()
    soon(lambda: any(line.startswith("b is lost: ") for line in notes))
    third = Devices(fleet, tmp_path, ("c",))
    soon(lambda: "c" in _contributors(folder))
    stop.request()
    running.join(60)
    assert [r.outcome for r in ended if isinstance(r, Run)] == ["interrupted"], (ended, notes)
    merges = [line.merge for line in merges_file(folder).lines()]
    again = replay(job, load_dataset(job.data, "train"), NAMES, merges)
    expected, found = seeded_model(job), seeded_model(job)
    again.fill(fragments_of(expected, job.sync.decoupled.fragments))
    Run(folder).load(found)
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for devices in (first, third):
        devices.stop()


def test_pipelines_on_devices_that_join_are_refused() -> None:
    with pytest.raises(UserError) as error:
        check_joined(job_of(replicas=[["a", "b"], ["c", "d"]]), MACHINES)
    assert str(error.value) == (
        "sync.decoupled.replicas: got pipelines (a+b, c+d) on devices that join a fleet, expected 'devices': each "
        "trains alone; pipelines run under `isthmus train`"
    )
