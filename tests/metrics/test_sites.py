"""Sites report what their owners' files name, of their own data: plain torch's figures of the model of each round."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from isthmus.errors import UserError
from isthmus.federated.evaluation import RoundHistory, site_evaluator
from isthmus.federated.job import build, load_federated_job
from isthmus.federated.resident import Resident
from isthmus.federated.robust import Aggregation
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.processes.forked import Forked
from tests.federated.sites import attend, free_port, samples, write_job, write_tickets
from tests.fleet_service.parties import Fleet
from tests.runtime.commands import edited

NAMES = ("a", "b", "c")
SECURE = """
[federated.aggregation]
secure = true
most_samples = 20

[federated.participation]
fraction = 1.0
minimum = 3

"""


@pytest.mark.forks
def test_each_sites_figures_are_plain_torchs_and_a_site_that_names_none_sends_none(tmp_path: Path) -> None:
    job_file = edited(
        write_job(tmp_path, NAMES, rounds=2),
        ('name = "clinics"', 'name = "clinics"\nmetrics = ["accuracy", "perplexity"]'),
    )
    for name in ("a", "b"):
        edited(tmp_path / f"{name}.toml", ('job = "clinics"', 'job = "clinics"\nmetrics = ["accuracy", "perplexity"]'))
    port, run = free_port(), tmp_path / "run"
    write_tickets(tmp_path, NAMES, port)
    with Forked({name: attend(tmp_path, name) for name in NAMES}, tmp_path / "logs") as sites:
        fleet = Fleet(tmp_path / "fleet", port=port)
        site_run = SiteRun(load_federated_job(job_file), run, resume=False)
        running = threading.Thread(target=lambda: site_run.run(fleet.service), daemon=True)
        running.start()
        sites.begin("")
        running.join(240)
        assert not running.is_alive()
        for pid in sites.pids().values():
            os.kill(pid, signal.SIGKILL)
    fleet.service.close()
    line = RoundHistory(run / "rounds.jsonl").lines()[1]
    assert line.evaluation is not None and line.evaluation.loss is None
    resident = Resident(build(load_federated_job(job_file)))
    resident.bind(load_file(run / "rounds" / "round-000000.safetensors")["server/model"])
    found = line.evaluation.clients
    assert found["accuracy"].each.keys() == {"a", "b"}, "c's file names no metrics"
    for client, name in enumerate(("a", "b")):
        columns = {key: torch.from_numpy(column) for key, column in samples(client).items()}
        with torch.no_grad():
            logits = resident.module(**columns)["logits"]
        loss = F.cross_entropy(logits, columns["labels"])
        right = (logits.argmax(-1) == columns["labels"]).float().mean()
        expected = {"loss": loss.item(), "accuracy": right.item(), "perplexity": loss.exp().item()}
        assert {key: figures.each[name] for key, figures in found.items()} == pytest.approx(expected, rel=1e-5)
    assert "accuracy" in next((tmp_path / "a-state").glob("*.jsonl")).read_text(), "the owner's log says what was sent"


def test_figures_that_no_noise_would_cover_are_refused_before_the_run(tmp_path: Path) -> None:
    job_file = edited(
        write_job(tmp_path, NAMES),
        ('name = "clinics"', 'name = "clinics"\nmetrics = ["accuracy"]'),
        ("[runtime]", f"{SECURE}[runtime]"),
    )
    with pytest.raises(UserError, match=r"metrics: got \['accuracy'\] with training.eval_every = 0"):
        site_evaluator(load_federated_job(job_file))
    job = load_federated_job(job_file, {"training.eval_every": 1, "data.options.holdout": 0})
    for without in (msgspec.structs.replace(job, data=None), job):
        with pytest.raises(UserError, match=r"expected \[data\] with held-out samples at the coordinator: sites keep"):
            site_evaluator(without)
    plain = job.altered(aggregation=Aggregation())
    assert site_evaluator(plain) is None, "sites report"
