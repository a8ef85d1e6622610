"""A client that is a fleet: its devices compute what one process does, and the loss of one costs time alone."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isthmus.api.make_plan import plan_for
from isthmus.data import DataSpec, load_dataset
from isthmus.data.description import DataDescription
from isthmus.errors import UserError
from isthmus.federated.algorithms import AlgorithmSpec, load_algorithm
from isthmus.federated.evaluation import RoundHistory
from isthmus.federated.job import load_federated_job
from isthmus.federated.local import LocalConfig, PlainLocal, StepsByRound, Workspace
from isthmus.federated.pipeline import PipelineConfig, check_descends, segments
from isthmus.federated.resident import Resident
from isthmus.federated.site import OwnData
from isthmus.federated.task_spec import load_site
from isthmus.models import ModelSpec, build_model
from isthmus.protocol import Item
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.federated.site_runner import PipelinePlans, SitePipeline
from isthmus.runtime.processes.forked import Forked
from isthmus.trace import Span
from tests.federated.sites import attend, free_port, write_job, write_tickets
from tests.federated.sites import model as model_of
from tests.fleet_service.parties import Fleet, soon
from tests.runtime.commands import devices_of, edited

FLEET = """
name = "three"

[[device]]
name = "here"
region = "here"
compute = "1 TFLOPS"
memory = "8 GiB"
count = 3

[links]
default = { latency = "0.1 ms", bandwidth = "10 Gbit/s" }
"""
MLP = ModelSpec(name="mlp", options={"features": 64, "width": 16, "layers": 2, "classes": 10})
KEY = (3, 2, 4)
EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline-client"


def noise(folder: Path) -> DataSpec:
    """54 samples."""
    draws, path = np.random.default_rng(0), folder / "noise.npz"
    np.savez(path, pixel_values=draws.normal(size=(54, 64)).astype(np.float32), labels=np.arange(54) % 10)
    return DataSpec(kind="npz", options={"path": str(path), "holdout": 0})


def pipeline(
    folder: Path, model: ModelSpec, data: DataSpec, local: LocalConfig, said: list[str] | None = None
) -> tuple[SitePipeline, Resident]:
    (folder / "three.toml").write_text(FLEET)
    torch.manual_seed(1)
    resident = Resident(build_model(model))
    config = PipelineConfig(fleet=str(folder / "three.toml"), planner="even")
    dataset = load_dataset(data, "train")
    samples = DataDescription(columns=dict(dataset.columns), train=len(dataset))
    plans = PipelinePlans(config, model, data, samples, local, StepsByRound(local, 1), plan_for)
    return SitePipeline(config, plans, resident, folder, (said if said is not None else []).append), resident


def alone(
    model: ModelSpec, data: DataSpec, local: LocalConfig, buffers: Mapping[str, Tensor] = {}
) -> tuple[Tensor, dict[str, Tensor]]:
    """The change and the buffers of one process, which began with these `buffers`."""
    torch.manual_seed(1)
    resident = Resident(build_model(model), computes=local.computes)
    resident.micro_batches = local.micro_batches
    resident.set_buffers(buffers)
    # Which says nothing of its labels: none is left out, and of one batch the mean has the bits of a sum over a count.
    resident.uneven = data.kind == "npz" and local.micro_batches > 1
    given = OwnData(load_dataset(data, "train")).of_round(*KEY[:2]).load(0)
    columns = {n: c.to(resident.computes) if c.is_floating_point() else c for n, c in given.items()}
    plain = PlainLocal(
        resident,
        Workspace(resident),
        local,
        columns,
        steps=StepsByRound(local, 1).at(0),
        seed=KEY[0],
        round_=KEY[1],
        client=KEY[2],
    )
    return plain.descend(rebuilt(model)).clone(), resident.buffers()


@pytest.mark.parametrize(("batch_size", "precision"), [(20, "fp32"), (64, "fp32"), (20, "bf16")])
def test_a_pipelines_descent_is_that_of_one_process(
    batch_size: int, precision: Literal["fp32", "bf16"], tmp_path: Path
) -> None:
    """Two batches of 20 in parts of 5 and one of 14 in parts of 7; all samples in one batch, in parts of 18."""
    local = LocalConfig(batch_size=batch_size, micro_batches=4, precision=precision)
    data, said = noise(tmp_path), list[str]()
    made, resident = pipeline(tmp_path, MLP, data, local, said)
    begun = resident.vector()
    change, (expected, _) = made.descend(begun, KEY), alone(MLP, data, local)
    assert torch.equal(change, expected)
    assert torch.equal(begun, rebuilt()), "the weights that were given are not changed"
    assert "here-0, here-1, here-2" in said[0]
    assert change.norm() > 0.01


class Counted(nn.Module):
    """Batch norm, which counts its batches, behind a first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(self.norm(self.first(pixel_values)).relu()), labels)


def test_a_pipelines_descent_begins_with_the_servers_buffers_and_counts_on(tmp_path: Path) -> None:
    """Whole numbers too, and again for the next client."""
    local, data = LocalConfig(batch_size=27), noise(tmp_path)
    model = ModelSpec(name=f"{__name__}:Counted")
    made, resident = pipeline(tmp_path, model, data, local)
    begun = {**resident.buffers(), "norm.num_batches_tracked": torch.tensor(40)}
    change, expected = alone(model, data, local, begun)
    assert int(expected["norm.num_batches_tracked"]) == 42
    first = resident.vector()
    for _ in range(2):
        resident.set_buffers(begun)
        assert torch.equal(made.descend(first, KEY), change)
        found = resident.buffers()
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


def rebuilt(model: ModelSpec = MLP) -> Tensor:
    torch.manual_seed(1)
    return Resident(build_model(model)).vector()


def test_a_round_is_cut_into_runs_of_equal_batches() -> None:
    local = LocalConfig(batch_size=20, epochs=2, micro_batches=4)
    found = [(s.first, s.steps, s.batch_size, s.micro_batches, s.is_last) for s in segments(54, local)]
    assert found == [(0, 2, 20, 4, False), (40, 1, 14, 2, False), (54, 2, 20, 4, False), (94, 1, 14, 2, True)]
    whole = [(s.first, s.steps, s.is_last) for s in segments(54, LocalConfig(batch_size=18, epochs=2))]
    assert whole == [(0, 5, False), (90, 1, True)]
    dropped = [(s.first, s.steps) for s in segments(54, LocalConfig(batch_size=20, epochs=2, drop_last=True))]
    assert dropped == [(0, 3), (60, 1)]


@pytest.mark.parametrize("name", ["scaffold", "fedprox", "feddyn", "mime"])
def test_algorithms_that_need_single_gradients_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="expected one whose clients only descend"):
        check_descends(load_algorithm(AlgorithmSpec(name=name)))


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "fedyogi", "fednova"])
def test_algorithms_that_only_descend_are_not(name: str) -> None:
    check_descends(load_algorithm(AlgorithmSpec(name=name)))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ('timeout = "0 s"', "pipeline.timeout: got '0 s', expected at least 1 s"),
        ('timeout = "soon"', "pipeline.timeout: "),
        ('plan = "nowhere.json"', "nowhere.json', expected a plan file"),
        ('device = { there = "cpu" }', "unknown device in pipeline.device 'there'"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_before_the_site_joins(key: str, said: str, tmp_path: Path) -> None:
    south = (EXAMPLE / "south.toml").read_text().replace("south-fleet.toml", "three-sites")
    (tmp_path / "south.toml").write_text(south.replace('"three-sites"', f'"three-sites"\n{key}'))
    with pytest.raises(UserError, match=re.escape(said)):
        load_site(tmp_path / "south.toml")


@pytest.mark.long
def test_a_device_that_is_lost_in_the_middle_costs_time_alone(tmp_path: Path) -> None:
    local, data, said = LocalConfig(batch_size=18, epochs=3), noise(tmp_path), list[str]()
    made, resident = pipeline(tmp_path, MLP, data, local, said)
    steps: list[int] = []

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        steps.append(item.step)
        if len(steps) == 4:
            os.kill(devices_of(os.getpid())["here-1"], signal.SIGKILL)

    made.watcher = msgspec.structs.replace(made.watcher, advanced=advanced)
    assert torch.equal(made.descend(resident.vector(), KEY), alone(MLP, data, local)[0])
    assert any("here-1" in text and "lost" in text for text in said), said
    assert len(steps) > local.steps(54), "steps were done again"


NAMES = ("a", "b", "c", "d", "e", "f")
EPOCHS = 40


def federated(folder: Path, act: Callable[[int, Path], None] | None) -> Tensor:
    """The model after three rounds of six sites, each a process. With `act`, c is a fleet: `act` gets c's process and
    the run's folder."""
    folder.mkdir()
    job_file = edited(
        write_job(folder, NAMES, rounds=3),
        ("[training]\nepochs = 2", f"[training]\nmicro_batches = 2\nepochs = {EPOCHS}"),
    )
    if act is not None:
        (folder / "three.toml").write_text(FLEET)
        table = f'\n[pipeline]\nfleet = "{folder}/three.toml"\nplanner = "even"\n'
        (folder / "c.toml").write_text((folder / "c.toml").read_text() + table)
    port, run = free_port(), folder / "run"
    write_tickets(folder, NAMES, port)
    with Forked({name: attend(folder, name) for name in NAMES}, folder / "logs") as sites:
        fleet = Fleet(folder / "fleet", port=port)
        site_run = SiteRun(load_federated_job(job_file), run, resume=False)
        running = threading.Thread(target=lambda: site_run.run(fleet.service), daemon=True)
        running.start()
        sites.begin("")
        if act is not None:
            act(sites.pids()["c"], run)
        running.join(120)
        assert not running.is_alive()
        for pid in sites.pids().values():
            os.kill(pid, signal.SIGKILL)
    fleet.service.close()
    assert (folder / "c-state" / "pipeline" / "checkpoints").is_dir() == (act is not None)
    return model_of(run)


def kill_a_device(site: int, run: Path) -> None:
    """In the middle of the second round."""
    soon(lambda: len(RoundHistory(run / "rounds.jsonl").lines()) == 1, 60)
    soon(lambda: "here-1" in devices_of(site), 60)
    os.kill(devices_of(site)["here-1"], signal.SIGKILL)


@pytest.mark.forks
@pytest.mark.long
def test_a_fleet_among_five_sites_gives_the_bits_of_one_process_and_a_lost_device_changes_none(tmp_path: Path) -> None:
    plain = federated(tmp_path / "plain", None)
    assert torch.equal(federated(tmp_path / "whole", lambda site, run: None), plain)
    assert torch.equal(federated(tmp_path / "struck", kill_a_device), plain)
