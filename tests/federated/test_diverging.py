"""A federated run whose clients' numbers are not finite ends with exit code 1, as any training does."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest
import torch

from isthmus.errors import Diverged, DivergedUpdate, PeerError
from isthmus.federated import ClientUpdate
from isthmus.federated.admission import AdmissionRules, bounded, refusal_of
from isthmus.federated.partial import PartialSum
from isthmus.protocol.federated_events import FinishRounds
from isthmus.runtime.federated.host import ended
from isthmus.runtime.processes.forked import Forked
from tests.federated.sites import attend, free_port, listens, write_job, write_tickets
from tests.federated.test_run_folders import JOB
from tests.fleet_service.parties import soon
from tests.runtime.commands import edited, isthmus, refused


@pytest.mark.parametrize("more", ['"sp"\nclients_per_vmap = 1', '"sp"\nclients_per_vmap = 3', '"ours"\nexecutors = 2'])
@pytest.mark.parametrize("rate", ["1e25", "1e38"])
def test_clients_that_all_diverge_end_the_run(more: str, rate: str, tmp_path: Path) -> None:
    text = JOB.format(folder=tmp_path).replace('"sp"', more)
    (tmp_path / "job.toml").write_text(f"{text}\n[local]\nlearning_rate = {rate}\n")
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


def test_how_a_run_ends_is_raised() -> None:
    with pytest.raises(Diverged, match="why"):
        ended(FinishRounds("diverged", "why"))
    with pytest.raises(PeerError, match="why"):
        ended(FinishRounds("lost", "why"))
    assert ended(FinishRounds("interrupted")).outcome == "interrupted"


def test_sites_that_all_diverge_end_the_run(tmp_path: Path) -> None:
    names, port = ("a", "b"), free_port()
    job = edited(write_job(tmp_path, names), ("batch_size = 4", "batch_size = 4\nlearning_rate = 1e25"))
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
