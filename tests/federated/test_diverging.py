"""A federated run whose clients' numbers are not finite ends with exit code 1, as any training does."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from isthmus.errors import Diverged, DivergedUpdate, PeerError
from isthmus.federated import ClientUpdate
from isthmus.federated.admission import AdmissionRules, bounded, refusal_of
from isthmus.federated.local import StepsByRound
from isthmus.federated.partial import PartialSum
from isthmus.programs.merging import Finish
from isthmus.runtime.federated.host import ended
from isthmus.runtime.processes.forked import Forked
from tests.federated.populations import LOCAL, Run
from tests.federated.sites import attend, free_port, listens, write_job, write_tickets
from tests.federated.test_run_folders import JOB
from tests.federated.twins import ETA
from tests.fleet_service.parties import soon
from tests.runtime.commands import edited, isthmus, refused


@pytest.mark.parametrize("more", ['"sp"\nclients_per_vmap = 1', '"sp"\nclients_per_vmap = 3', '"ours"\nexecutors = 2'])
@pytest.mark.parametrize("rate", ["1e25", "1e38"])
def test_clients_that_all_diverge_end_the_run(more: str, rate: str, tmp_path: Path) -> None:
    text = JOB.format(folder=tmp_path).replace('"sp"', more)
    (tmp_path / "job.toml").write_text(f"learning_rate = {rate}\n{text}")
    refused(isthmus("train", tmp_path / "job.toml"), 1, "round 1: 0 clients were in, expected at least 1")


@pytest.mark.parametrize(
    ("numbers", "rules", "diverged"),
    [
        ([math.nan, 1.0], AdmissionRules(), True),
        ([1e30, 1.0], AdmissionRules(), True),
        ([math.inf, 1.0], AdmissionRules(max_norm=5.0), True),
        ([8.0, 1.0], AdmissionRules(max_norm=5.0, clip=False), False),
        ([1.0, 1.0, 1.0], AdmissionRules(), False),
    ],
)
def test_it_is_known_why_an_update_is_refused(numbers: list[float], rules: AdmissionRules, diverged: bool) -> None:
    partial = PartialSum({"delta": "weighted_mean"}, {"delta": 2})
    partial.begin(4, 2)
    with pytest.raises(PeerError) as found:
        partial.fold(3, bounded(ClientUpdate(values={"delta": torch.tensor(numbers)}), rules), 2)
    assert isinstance(found.value, DivergedUpdate) == diverged
    assert refusal_of(3, found.value).diverged == diverged


class Scaled(nn.Module):
    """A quadratic whose gradients are of size `scale`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.zeros(6, dtype=torch.float64))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.scale * (self.weight - pixel_values).square().sum(1).mean() / 2


def moved(name: str, scale: float, folder: Path) -> tuple[Run, float]:
    """The largest weight after a round."""
    run = Run(name, {}, folder, rounds=1, model=lambda: Scaled(scale))
    run.run()
    return run, float(run.server.values["model"].abs().max())


@pytest.mark.parametrize("name", ["scaffold", "mime", "fedavg"])
def test_large_gradients_do_not_diverge(name: str, tmp_path: Path) -> None:
    """1e6 times as large a loss at a millionth of the rate: the same change."""
    plain, large = moved(name, 1.0, tmp_path / "a"), Run(name, {}, tmp_path / "b", rounds=1, model=lambda: Scaled(1e6))
    for site in large.sites.values():
        small = msgspec.structs.replace(LOCAL, learning_rate=ETA / 1e6)
        site._work, site._steps = msgspec.structs.replace(site._work, local=small), StepsByRound(small, 1)
    assert large.run().outcome == "done"
    assert torch.allclose(large.server.values["model"], plain[0].server.values["model"], rtol=1e-9, atol=1e-9)
    assert not large.server.notices


def test_gradients_that_have_no_room_say_so(tmp_path: Path) -> None:
    run = Run("scaffold", {}, tmp_path, rounds=1, model=lambda: Scaled(1e12))
    for site in run.sites.values():
        site._work = msgspec.structs.replace(site._work, local=msgspec.structs.replace(LOCAL, learning_rate=1e-13))
    finish = run.run()
    assert (
        finish.outcome == "diverged" and "the range of the exact sum: scale the loss or the data down" in finish.reason
    )


def test_changes_below_the_unit_of_the_exact_sum_are_logged_once(tmp_path: Path) -> None:
    said = []
    for scale in (1e-13, 1e-8, 1e-6):
        run, largest = moved("fedavg", scale, tmp_path / str(scale))
        said.append(run.server.notices)
        assert (largest == 0) == (scale == 1e-13)
    assert [len(notices) for notices in said] == [1, 1, 0]
    assert "round 1: 'delta' of all clients is within" in said[0][0] and "in units of 1.5e-11" in said[0][0]


@pytest.mark.parametrize("more", ['"sp"', '"ours"\nexecutors = 2'])
def test_who_runs_it_reads_that_changes_are_lost(more: str, tmp_path: Path) -> None:
    text = JOB.format(folder=tmp_path).replace('"sp"', more)
    (tmp_path / "job.toml").write_text(f"learning_rate = 1e-13\n{text}")
    done = isthmus("train", tmp_path / "job.toml")
    assert done.code == 0 and (done.out + done.err).count("exact sums count in units of 1.5e-11") == 1


def test_how_a_run_ends_is_raised() -> None:
    with pytest.raises(Diverged, match="why"):
        ended(Finish("diverged", "why"))
    with pytest.raises(PeerError, match="why"):
        ended(Finish("lost", "why"))
    assert ended(Finish("interrupted")).outcome == "interrupted"


@pytest.mark.forks
def test_sites_that_all_diverge_end_the_run(tmp_path: Path) -> None:
    names, port = ("a", "b"), free_port()
    job = edited(write_job(tmp_path, names), ("[model]", "learning_rate = 1e25\n[model]"))
    state = write_tickets(tmp_path, names, port)

    def serve(_: str) -> None:
        done = isthmus("serve", job, "--state", state, "--port", str(port), "--tickets", "0")
        (tmp_path / "unfinished").write_text(f"{done.code} {done.err}")
        (tmp_path / "unfinished").rename(tmp_path / "served")

    with (
        Forked({"coordinator": serve}, tmp_path / "logs-1") as coordinator,
        Forked({name: attend(tmp_path, name) for name in names}, tmp_path / "logs-2") as sites,
    ):
        coordinator.begin("")
        soon(lambda: listens(port), 60)
        sites.begin("")
        soon((tmp_path / "served").exists, 60)
        for pid in sites.pids().values():
            os.kill(pid, signal.SIGKILL)
    broadcast = (tmp_path / "served").read_text()
    assert broadcast.startswith("1 ") and "round 1: 0 clients were in" in broadcast, broadcast
