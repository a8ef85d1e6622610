"""`torchrun -m isthmus join --per-rank`: a device for each rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.api.join import JoinOptions, join_as
from isthmus.errors import UserError
from tests.fleet_service.parties import serving, soon

from .agents import processes_with

WITHIN_S = 180.0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_each_rank_of_the_nodes_is_a_device(count: int, tmp_path: Path) -> None:
    """Each node has two."""
    port, nodes = _free_port(), list[subprocess.Popen[bytes]]()
    with serving(tmp_path / "fleet", timeout_s=30.0) as fleet:
        for node in range(count):
            tickets = tmp_path / f"tickets-{node}"
            tickets.touch(mode=0o600)
            tickets.write_text("".join(f"{fleet.state.ticket()}\n" for _ in range(2)))
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", "--nproc-per-node=2"]
            torchrun += [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "isthmus"]
            join = ["join", "--per-rank", "--name", "pod", "--device", "cpu", "--timeout", "30 s"]
            files = ["--ticket-file", str(tickets), "--state", str(tmp_path / f"state-{node}")]
            with (tmp_path / f"log-{node}").open("wb") as log:
                nodes.append(
                    subprocess.Popen(
                        [*torchrun, *join, *files], stdout=log, stderr=log, env={**os.environ}, cwd=tmp_path
                    )
                )
        try:
            soon(lambda: fleet.service.present == {f"pod/{rank}" for rank in range(2 * count)}, WITHIN_S)
            assert fleet.state.devices()["pod"] == [f"pod/{rank}" for rank in range(2 * count)]
        finally:
            for process in nodes:
                process.send_signal(signal.SIGTERM)
            for process in nodes:
                process.wait(60)
        soon(lambda: not processes_with(str(tmp_path)), 60.0)


@pytest.mark.parametrize(
    ("options", "ranks", "reason"),
    [
        ({}, {}, "--per-rank: got it without torchrun"),
        ({"devices": "all"}, {}, "--per-rank: got it beside --devices"),
        ({"attached": True}, {}, "--per-rank: got it beside --attached"),
        (
            {},
            {"WORLD_SIZE": "2"},
            "--per-rank: got no --ticket-file, expected one with a ticket in a line for each rank",
        ),
        ({"ticket_file": "tickets"}, {"WORLD_SIZE": "2"}, "got 1 tickets, expected a line for each rank"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    options: dict[str, object], ranks: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    if "ticket_file" in options:
        (tmp_path / "tickets").touch(mode=0o600)
        (tmp_path / "tickets").write_text("isthmus1-first\n")
        options = {"ticket_file": tmp_path / "tickets"}
    joining = JoinOptions(per_rank=True, state=tmp_path / "state", device="cpu", **options)
    with pytest.raises(UserError, match=reason):
        join_as(joining, lambda line: None, lambda: "")
