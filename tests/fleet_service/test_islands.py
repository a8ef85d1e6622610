"""`torchrun -m isthmus join`: several processes are one device."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.api import join
from isthmus.api.join import _of_rank  # pyright: ignore[reportPrivateUsage]
from isthmus.errors import UserError
from isthmus.job import prepare
from isthmus.runtime.device.island_ranks import Island, island_here
from isthmus.runtime.messages.probe import MeasureSpeed
from isthmus.runtime.processes.place import ProcessOptions, ProcessPlace
from isthmus.runtime.service import fleet_probe
from isthmus.runtime.service.speed import TimedWork
from tests.runtime.jobs import DIGITS, final_weights, job_of, plain_run
from tests.sync.torchrun import start_torchrun

from .parties import Fleet
from .test_fleet_runs import Devices, _train  # pyright: ignore[reportPrivateUsage]


def test_an_environment_that_is_torchruns_only_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert island_here(tmp_path) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE is set without 'RANK'"):
        island_here(tmp_path)


def test_each_rank_takes_the_accelerator_of_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    island = Island(folder=tmp_path, rank=3, count=4, local=2, number=1)
    assert _of_rank("cpu", island) == _of_rank("auto", island) == "cpu"
    monkeypatch.setattr(join, "accelerator_names", lambda: ("cuda:0", "cuda:1"))
    monkeypatch.setattr(join, "resolve_accelerator", lambda name, field: "cpu" if name == "cpu" else "cuda:0")
    assert _of_rank("auto", island) == _of_rank("cuda", island) == "cuda:1"
    with pytest.raises(UserError, match="got 'cuda:0' for 2 ranks, expected a kind"):
        _of_rank("cuda:0", island)
    with pytest.raises(UserError, match="with 2 of cuda for 3 ranks, expected one for each"):
        _of_rank("auto", msgspec.structs.replace(island, local=3))


def test_a_place_whose_ranks_share_out_the_weights_has_the_memory_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    one = TimedWork(figures=(), peak_flops_per_s=2e9, memory_bytes=8 << 30)
    measured: list[str] = []

    def measure(asked: MeasureSpeed, accelerator: str, place: ProcessPlace) -> TimedWork:
        measured.append(accelerator)
        return one

    monkeypatch.setattr(fleet_probe, "_speed", measure)
    whole = ProcessPlace(ranks=8, local_ranks=4)
    assert fleet_probe.compute_speed(MeasureSpeed(run="p"), whole).memory_bytes == 2 << 30
    parts = fleet_probe.compute_speed(MeasureSpeed(run="p"), msgspec.structs.replace(whole, sharded=True))
    assert parts.memory_bytes == 16 << 30
    place = msgspec.structs.replace(whole, sharded=True, island=Path("ranks"), data_kinds=("text",))
    given = ProcessOptions(coordinator="127.0.0.1:1", device="d", timeout_s=1.0, place=place)
    assert ProcessOptions.decoded(given.encoded()) == given
    measured.clear()
    gpus = msgspec.structs.replace(whole, accelerator="cuda:0")
    assert fleet_probe.compute_speed(MeasureSpeed(run="p"), gpus).memory_bytes == 8 << 30, "each rank has a GPU's own"
    assert sorted(measured) == [f"cuda:{rank}" for rank in range(4)]


@pytest.mark.parametrize("options", [(), ("--shard",)])
@pytest.mark.long
def test_an_island_trains_with_another_device_as_the_plain_loop_does(
    fleet: Fleet, tmp_path: Path, options: tuple[str, ...]
) -> None:
    devices = Devices(fleet, tmp_path, ("d0",))
    ticket = tmp_path / "ticket"
    ticket.touch(0o600)
    ticket.write_text(fleet.state.ticket())
    callbacks = tmp_path / "join.py"
    callbacks.write_text("from isthmus.cli import main\nmain()\n")
    options = ("--name", "d1", "--ticket-file", str(ticket), "--state", str(tmp_path / "island"), *options)
    with start_torchrun(2, callbacks, "join", *options):
        outcome, losses = _train(fleet, tmp_path / "run")
    devices.stop()
    assert outcome.outcome == "done", outcome.reason
    job = job_of("mlp", {}, DIGITS)
    module, expected = plain_run(job, prepare(job))
    assert losses == pytest.approx(expected, rel=1e-6)
    saved = final_weights(tmp_path / "run")
    for name, value in module.named_parameters():
        assert torch.allclose(saved[name], value, rtol=1e-4, atol=1e-6), name
