"""`isthmus simulate` measures clients as the run will train them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.federated.sites import write_job
from tests.federated.test_run_folders import JOB
from tests.runtime.commands import isthmus, refused


class Noting(nn.Linear):
    """Writes down how many threads it computes with, and for how many clients at once."""

    def __init__(self, path: str) -> None:
        super().__init__(64, 10)
        self._path = path

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with Path(self._path).open("a") as file:
            file.write(f"{torch.get_num_threads()}\n")
        return nn.functional.cross_entropy(super().forward(pixel_values), labels)


@pytest.mark.parametrize("scheme", ["sp", "ours"])
def test_clients_are_measured_with_the_runs_threads_and_scheme(scheme: str, tmp_path: Path) -> None:
    text = JOB.format(folder=tmp_path).replace('name = "mlp"', 'name = "tests.federated.test_foretelling:Noting"')
    text = text.replace("{ features = 64, width = 4, layers = 1, classes = 10 }", f'{{ path = "{tmp_path}/threads" }}')
    (tmp_path / "job.toml").write_text(text.replace('scheme = "sp"', f'scheme = "{scheme}"\nexecutors = 2'))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        done = isthmus("simulate", tmp_path / "job.toml", "--json")
    finally:
        torch.set_num_threads(before)
    assert done.code == 0, done.err
    broadcast = json.loads(done.out)
    assert (broadcast["rounds"], broadcast["executors"]) == (3, 1 if scheme == "sp" else 2)
    assert broadcast["overhead_s"] > 0 and broadcast["fixed_s"] + broadcast["seconds_per_sample"] > 0
    assert set((tmp_path / "threads").read_text().split()) == {"1"}
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


def deployed(folder: Path) -> Path:
    job = write_job(folder, ("north", "south", "east"), rounds=6)
    job.write_text(job.read_text() + '\n[federated.participation]\nclients = 3\ndeadline = "1000 s"\n')
    return job


@pytest.mark.parametrize(
    ("options", "closed_by", "missing", "late"),
    [
        ((), {"all": 6}, 0, 0),
        (("--slow", "east@0s:1e9"), {"deadline": 1, "behind": 5}, 6, 0),
        (("--slow", "east@0s:1e9", "--set", "federated.participation.quorum=0.6"), {"quorum": 6}, 6, 0),
        (("--fault", "south@0s"), {"all": 6}, 1, 0),
    ],
)
def test_the_sites_of_a_deployment_are_simulated(
    options: tuple[str, ...], closed_by: dict[str, int], missing: int | None, late: int, tmp_path: Path
) -> None:
    done = isthmus("simulate", deployed(tmp_path), "--json", *options)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["executors"] == 3 and found["closed_by"] == closed_by and found["late_updates"] == late
    assert missing is None or found["clients_missing"] == missing


def test_a_deployments_faults_are_told(tmp_path: Path) -> None:
    done = isthmus("simulate", deployed(tmp_path), "--fault", "south@0s", "--slow", "east@1000000s:2")
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert (
        "site south was lost: its connection closed" in text
        and "without effect: east: computing takes 2 times as long" in text
    )
    assert "done after 6 rounds" in text and "rounds/h; without faults" in text


def test_rounds_closed_early_and_tried_again_are_told(tmp_path: Path) -> None:
    few = ("--set", "federated.participation.minimum=3", "--slow", "east@0s:1e9")
    found = json.loads(isthmus("simulate", deployed(tmp_path), "--json", *few).out)
    told = [event["text"] for event in found["timeline"]]
    assert "round 1 is tried again: attempt 2" in told and found["outcome"] == "lost"
    slow = ("--set", "federated.participation.quorum=0.6", "--slow", "east@0s:1e9")
    found = json.loads(isthmus("simulate", deployed(tmp_path), "--json", *slow).out)
    assert sum("closed by its quorum" in event["text"] for event in found["timeline"]) == found["closed_by"]["quorum"]


@pytest.mark.parametrize("when", ["0s", "0.001s"])
def test_a_simulation_without_sites_left_says_why_it_ended(when: str, tmp_path: Path) -> None:
    lost = [word for name in ("north", "south", "east") for word in ("--fault", f"{name}@{when}")]
    done = isthmus("simulate", deployed(tmp_path), "--json", *lost)
    assert done.code == 4, done.err
    found = json.loads(done.out)
    assert found["outcome"] == "lost" and found["reason"] and found["rounds"] < 6
    lost = {"text": "site north was lost: its connection closed", "time_s": float(when[:-1])}
    assert lost in found["timeline"] and "north: its process dies" in [one["text"] for one in found["timeline"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--fault", "west@2s"), ["unknown executor in --fault 'west'"]),
        (("--slow", "west@2s:2"), ["unknown executor in --slow 'west'"]),
        (("--fault", "link:north:east@2s"), ["--fault: got north:east in a federated job", "clients exchange nothing"]),
        (
            ("--set", 'federated.deployment.sites=["north", "south"]'),
            ["federated.deployment.sites: got 2 sites for data of 3 clients"],
        ),
    ],
)
def test_faults_that_no_site_can_have(options: tuple[str, ...], words: list[str], tmp_path: Path) -> None:
    refused(isthmus("simulate", deployed(tmp_path), *options), 2, *words)


def test_an_executor_that_is_lost_stays_lost(tmp_path: Path) -> None:
    job = deployed(tmp_path)
    job.write_text(
        job.read_text().partition("[federated.deployment]")[0].replace("[runtime]", "[runtime]\nexecutors = 2")
    )
    refused(
        isthmus("simulate", job, "--set", "federated.participation.clients=3", "--fault", "executor-1@2s+3s"),
        2,
        "stays lost",
    )


def test_a_site_that_is_a_fleet_takes_what_its_plan_predicts(tmp_path: Path) -> None:
    (tmp_path / "three.toml").write_text(THREE)
    job = deployed(tmp_path)
    table = f'\n[federated.deployment.fleets.south]\nfleet = "{tmp_path}/three.toml"\nplanner = "even"\n'
    job.write_text(job.read_text() + table)
    found = json.loads(isthmus("simulate", job, "--json").out)
    (pipeline,) = found["pipelines"]
    assert pipeline["site"] == "south" and pipeline["devices"] == ["slow-0", "slow-1", "slow-2"]
    # Eight samples: two batches of 4 in each of two epochs.
    assert pipeline["round_s"] == pytest.approx(4 * pipeline["step_s"])
    assert found["round_s"] == pytest.approx(pipeline["round_s"], rel=0.2)
    assert "south: a pipeline over 3 devices" in isthmus("simulate", job).out
    job.write_text(job.read_text().replace("fleets.south", "fleets.nowhere"))
    refused(isthmus("simulate", job), 2, "federated.deployment.fleets", "nowhere")


THREE = """
name = "three"

[[device]]
name = "slow"
region = "south"
compute = "0.00001 GFLOPS"
memory = "1 GiB"
count = 3

[links]
default = { latency = "100 ms", bandwidth = "1 Mbit/s" }
"""
