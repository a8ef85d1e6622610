"""Sites as processes whose updates are masked: the same bits as without masks, also when one is lost in mid-round."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isthmus.errors import PeerError
from isthmus.federated.job import load_federated_job
from isthmus.federated.task_spec import SiteLog
from isthmus.protocol.federated_messages import SumsSent
from isthmus.protocol.secure_messages import KeysSent, SharesRevealed, SharesSent
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.federated.site_runner import SecureSiteExecutor
from isthmus.runtime.processes.forked import Forked
from tests.federated import sites
from tests.federated.sites import attend, free_port, model, write_job, write_tickets
from tests.federated.test_deployment import by_site, lines, recomputed
from tests.fleet_service.parties import Fleet
from tests.runtime.commands import edited, isthmus

NAMES = ("a", "b", "c")
SECURE = """
[federated.participation]
fraction = 1.0
minimum = 2

[federated.aggregation]
secure = true
most_samples = 64

[runtime]"""
MLP = 'name = "mlp"\noptions = {} features = 6, width = 5, layers = 1, classes = 3 {}'
STATEFUL = 'name = "tests.federated.test_buffers:Stateful"'
ALGORITHM = """
import os, signal
from pathlib import Path
from isthmus.federated.algorithms.{file} import {base}

class Mine({base}, frozen=True):
    "The same; site c's process ends in its second round, while it trains."
    def client(self, local, broadcast, state):
        Path(f"trained-{{len(list(Path().glob('trained-*')))}}").touch()
        if Path.cwd().name == "at-c" and Path("trained-1").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().client(local, broadcast, state)
"""


def served(
    folder: Path,
    algorithm: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    rounds: int,
    own: str = "",
    tables: str = "",
) -> tuple[Path, list[str]]:
    """A run over sites to its end: the job, and what was said. `own` is the algorithm's text at the sites; `tables`
    are more of the job."""
    monkeypatch.delitem(sys.modules, "mine_algorithm", raising=False)
    job_file = edited(write_job(folder, NAMES, algorithm, rounds), ("[runtime]", tables + SECURE))
    for where in (folder, *(folder / f"at-{name}" for name in NAMES)):
        where.mkdir(exist_ok=True)
        if own:
            (where / "mine_algorithm.py").write_text(own)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return job_file, run_over_sites(folder, job_file)


def run_over_sites(
    folder: Path, job_file: Path, names: Sequence[str] = NAMES, *, run: str = "run", port: int = 0, joined: bool = False
) -> list[str]:
    """To its end; what was said. Sites that have `joined` know the port."""
    port = port or free_port()
    if not joined:
        write_tickets(folder, NAMES, port)
    with Forked({name: attend(folder, name, joined=joined) for name in names}, folder / "logs") as sites:
        said: list[str] = []
        fleet = Fleet(folder / "fleet", port=port)
        site_run = SiteRun(load_federated_job(job_file), folder / run, resume=False)

        def go() -> None:
            try:
                site_run.run(fleet.service, said.append)
            except PeerError as e:
                said.append(str(e))

        running = threading.Thread(target=go, daemon=True)
        running.start()
        sites.begin("")
        running.join(60)
        assert not running.is_alive(), said
        for pid in sites.pids().values():
            os.kill(pid, signal.SIGKILL)
    fleet.service.close()
    return said


@pytest.mark.forks
def test_masked_updates_give_the_bits_of_a_simulation_without_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two values a client, one of them with the clients' states, both clipped, and of a model with all kinds of
    buffers."""
    monkeypatch.setattr(sites, "JOB", sites.JOB.replace(MLP.format("{{", "}}"), STATEFUL))
    monkeypatch.setattr(sites, "SITE", sites.SITE.replace(MLP.format("{{", "}}"), STATEFUL))
    tables = "[federated.admission]\nmax_norm = 0.5\nclip = true\n"
    job_file, said = served(tmp_path, "scaffold", monkeypatch, rounds=3, tables=tables)
    history = lines(tmp_path / "run")
    assert [sorted(by_site(line)) for line in history] == [list(NAMES)] * 3, said
    alone = isthmus("train", job_file, "--scheme", "sp", "--run", tmp_path / "alone")
    assert alone.code == 0, alone.err
    here, there = (load_file(tmp_path / run / "rounds" / "round-000002.safetensors") for run in ("run", "alone"))
    changed = {f"server/buffers/{n}" for n in ("norm.running_mean", "norm.num_batches_tracked", "size")}
    assert here.keys() > changed and all(torch.equal(here[n], there[n]) for n in {*changed, "server/model"})


@pytest.mark.forks
def test_a_site_that_is_lost_while_it_trains_takes_its_masks_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ALGORITHM.format(file="fedavg", base="FedAvg")
    job_file, said = served(tmp_path, "mine_algorithm:Mine", monkeypatch, rounds=3, own=own)
    history = lines(tmp_path / "run")
    assert [sorted(by_site(line)) for line in history] == [["a", "b", "c"], ["a", "b"], ["a", "b"]], said
    assert torch.equal(model(tmp_path / "run"), recomputed(job_file, history, len(NAMES)))


@pytest.mark.forks
@pytest.mark.long
@pytest.mark.parametrize(
    ("sends", "summed"), [(KeysSent, "ab"), (SharesSent, "ab"), (SumsSent, "abc"), (SharesRevealed, "abc")]
)
def test_the_sum_is_the_plain_one_whenever_a_site_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sends: type[object], summed: str
) -> None:
    """Site c in its second round: before it sends keys, shares of its secrets, or others' shares; or after its masked
    update."""

    def killed(send: Callable[..., None], *, first: bool) -> Callable[..., None]:
        def sent(own: SecureSiteExecutor, report: Any, *values: object) -> None:
            now = Path.cwd().name == "at-c" and isinstance(report, sends) and report.phase.round == 1
            if not (now and first):
                send(own, report, *values)
            if now:
                own._sender.flush()
                os.kill(os.getpid(), signal.SIGKILL)

        return sent

    monkeypatch.setattr(SecureSiteExecutor, "send", killed(SecureSiteExecutor.send, first=True))
    monkeypatch.setattr(SecureSiteExecutor, "_put_sums", killed(SecureSiteExecutor._put_sums, first=False))
    job_file, said = served(tmp_path, "fedavg", monkeypatch, rounds=3)
    history = lines(tmp_path / "run")
    assert ["".join(sorted(by_site(line))) for line in history] == ["abc", summed, "ab"], said
    assert torch.equal(model(tmp_path / "run"), recomputed(job_file, history, len(NAMES)))


@pytest.mark.forks
def test_a_round_that_is_repeated_after_a_restart_has_the_same_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a coordinator that lost what it had of the run, but the name by which sites know it."""
    monkeypatch.chdir(tmp_path)
    job_file = edited(write_job(tmp_path, NAMES, rounds=1), ("[runtime]", SECURE))
    port = free_port()
    run_over_sites(tmp_path, job_file, port=port)
    assert [sorted(by_site(line)) for line in lines(tmp_path / "run")] == [list(NAMES)]
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "run").write_bytes((tmp_path / "run" / "run").read_bytes())
    edited(
        job_file,
        ("wait =", "start = 2\nwait ="),
        ("[federated.participation]", "[federated.participation]\nattempts = 1"),
    )
    said = run_over_sites(tmp_path, job_file, NAMES[:2], run="again", port=port, joined=True)
    assert any("its shares of a sum of this round, with other sites, are revealed" in line for line in said), said
    assert not lines(tmp_path / "again")


@pytest.mark.forks
def test_sites_clip_and_add_their_noise_before_they_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of noise that is next to nothing, the model is nearly that of clipped updates; not to the bit, so it is there."""
    pytest.importorskip("dp_accounting")
    tables = '[privacy]\nclip = 0.3\nnoise_multiplier = 1e-5\nnoise = "sites"\n'
    job_file, said = served(tmp_path, "fedavg", monkeypatch, rounds=2, tables=tables)
    assert any(line.startswith("privacy: epsilon ") and "after 2 rounds" in line for line in said), said
    alone = isthmus("train", job_file, "--scheme", "sp", "--run", tmp_path / "alone")
    assert alone.code == 0, alone.err
    ours, theirs = model(tmp_path / "run"), model(tmp_path / "alone")
    assert not torch.equal(ours, theirs)
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.forks
def test_a_site_that_sends_masked_updates_only_leaves_a_coordinator_that_wants_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path, NAMES, rounds=40)  # c comes while they last
    job_file = tmp_path / "fed.toml"
    edited(tmp_path / "c.toml", ("[data]", "[approval]\nsecure = true\n\n[data]"))
    edited(
        job_file,
        ("[runtime]", "[federated.participation]\nfraction = 1.0\n\n[runtime]"),
        ("wait =", "start = 2\nwait ="),
    )
    said = run_over_sites(tmp_path, job_file)
    history = lines(tmp_path / "run")
    assert all("c" not in by_site(line) for line in history), said
    assert any("approval.secure: this site sends masked updates only" in line for line in said), said
    assert [line.event for line in SiteLog(tmp_path / "c-state").lines()] == ["refused"]
    assert {line.event for line in SiteLog(tmp_path / "a-state").lines()} == {"asked", "allowed", "sent"}
