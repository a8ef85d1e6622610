"""When the jobs of a queue end. `tests/faults/queue_schedules.py` has drawn faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.federated.test_run_folders import JOB
from tests.runtime.commands import isthmus as isthmus_command
from tests.runtime.commands import refused

from isthmus.simulator.options import Fault
from isthmus.simulator.queue import RunOfJob, SimulatedJob, faults_since, simulate_queue

EXAMPLES = Path(__file__).parents[2] / "examples"


def simulated(*faults: Fault) -> list[SimulatedJob]:
    """Two jobs of 10 s that need a, and one of 5 s that needs nobody."""
    runs = [RunOfJob(10.0, needed=("a",)), RunOfJob(10.0, needed=("a",)), RunOfJob(5.0)]
    return simulate_queue(["one", "two", "three"], lambda number, _: runs[number], faults).jobs


def test_a_job_begins_when_the_one_before_has_ended_and_its_devices_are_there() -> None:
    assert [(job.began_s, job.ended_s) for job in simulated()] == [(0.0, 10.0), (10.0, 20.0), (20.0, 25.0)]
    away = simulated(Fault(device="a", time_s=8.0, lasts_s=7.0), Fault(device="b", time_s=8.0, lasts_s=90.0))
    assert [(job.began_s, job.ended_s) for job in away] == [(0.0, 10.0), (15.0, 25.0), (25.0, 30.0)]
    crashed = simulated(Fault(kind="coordinator", time_s=19.0, lasts_s=4.0))
    assert [job.began_s for job in crashed] == [0.0, 10.0, 23.0]


def test_a_device_that_does_not_come_back_keeps_all_jobs_behind_it_waiting() -> None:
    first, *others = simulated(Fault(device="a", time_s=8.0))
    assert first.state == "done"
    assert [(job.state, job.began_s) for job in others] == [("queued", None)] * 2
    assert [job.detail for job in others] == ["waits for a", ""]


def test_a_run_gets_the_faults_of_its_time() -> None:
    slow = Fault(kind="slow", device="a", time_s=1.0, factor=2.0)
    link = Fault(kind="link", device="a", other="b", time_s=8.0, lasts_s=7.0)
    over = Fault(kind="silent", device="a", time_s=2.0, lasts_s=8.0)
    joined, later = (Fault(kind="join", device="b", time_s=time_s) for time_s in (3.0, 12.0))
    found = faults_since([slow, link, over, joined, later], 10.0).values()
    assert [(fault.kind, fault.time_s, fault.lasts_s) for fault in found] == [
        ("slow", 0.0, float("inf")),
        ("link", 0.0, 5.0),
        ("join", 2.0, float("inf")),
    ]


def test_several_jobs_are_simulated_one_after_another() -> None:
    example = EXAMPLES / "decoupled.toml"
    found = isthmus_command("simulate", example, example, "--steps", "20", "--json")
    first, second = json.loads(found.out)["jobs"]
    assert found.code == 0 and (first["state"], second["state"]) == ("done", "done")
    assert second["began_s"] == first["ended_s"]
    assert second["ended_s"] == pytest.approx(2 * first["ended_s"])
    pictured = isthmus_command("simulate", example, example, "--picture", "x.png")
    refused(pictured, 2, "--picture: got it with 2 jobs, expected one")
    refused(isthmus_command("simulate", example, example, "--fault", "nobody@1s"), 2, "nobody")


def test_executors_have_the_names_of_their_devices_in_faults_of_a_queue(tmp_path: Path) -> None:
    """A fault of a fleet's device strikes each job that has it; executors of a job without a fleet are processes."""
    pipeline = tmp_path / "pipeline.toml"
    pipeline.write_text((EXAMPLES / "decoupled.toml").read_text().replace("steps = 200", "steps = 20"))
    text = JOB.format(folder=tmp_path)
    (tmp_path / "alone.toml").write_text(text.replace('scheme = "sp"', 'scheme = "ours"\nexecutors = 2'))
    placed = text.replace("run_dir", 'fleet = "three-sites"\nrun_dir').replace('scheme = "sp"', 'scheme = "ours"')
    (tmp_path / "placed.toml").write_text(placed)

    def took(*options: str) -> list[float]:
        jobs = (pipeline, tmp_path / "placed.toml", tmp_path / "alone.toml")
        found = isthmus_command("simulate", *jobs, "--json", *options)
        assert found.code == 0, found.err
        return [job["ended_s"] - job["began_s"] for job in json.loads(found.out)["jobs"]]

    whole = took()
    slowed = took("--slow", "home-0@0s:50")
    assert slowed[0] > whole[0] and slowed[1] > whole[1]
    slowed = took("--slow", "executor-0@0s:1000", "--slow", "executor-1@0s:1000")
    assert slowed[0] == whole[0] and slowed[1] == whole[1] and slowed[2] > 20 * whole[2]
    unknown = isthmus_command("simulate", tmp_path / "placed.toml", tmp_path / "alone.toml", "--fault", "cloud@1s")
    refused(unknown, 2, "device in --fault", "cloud")


def test_jobs_of_a_queue_are_on_one_fleet() -> None:
    done = isthmus_command("simulate", EXAMPLES / "decoupled.toml", EXAMPLES / "two-machines.toml")
    refused(done, 2, "two-machines: fleet: got ", "expected 'three-sites' as of the job before")
