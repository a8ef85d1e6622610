"""SkyPilot: the task by SkyPilot's own schema, and a job's life with a stand-in for its command."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from isthmus.errors import PeerError, UserError
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState
from isthmus.runtime.launchers.registry import open_launcher
from isthmus.runtime.launchers.skypilot import SkyPilotLauncher
from tests.fleet_service.parties import soon

from .schemas import check_task
from .stand_ins import StandIns

SKY = """
import pathlib, subprocess, time, yaml
here = pathlib.Path({folder!r})
if sys.argv[1] == "--version":
    print("skypilot, version {version}")
elif sys.argv[1] == "api":
    print({server!r})
elif sys.argv[1] == "down":
    (here / "down").touch()
    sys.exit({down})
elif sys.argv[1] == "launch":
    secrets = dict(line.split("=", 1) for line in open(sys.argv[sys.argv.index("--secret-file") + 1]).read().split())
    task = yaml.safe_load(open(sys.argv[-1]))
    assert secrets.keys() == task["secrets"].keys()
    print("\\x1b[1mLaunching\\x1b[0m on a cloud", flush=True)
    for rank in range(task["num_nodes"]):
        home = here / str(rank)
        home.mkdir()
        env = {{**os.environ, **secrets, "HOME": str(home), "SKYPILOT_NODE_RANK": str(rank)}}
        done = subprocess.run(["bash", "-c", task["run"]], env=env, capture_output=True, text=True)
        node = f"worker{{rank}}, rank={{rank}}, pid=7, ip=10.0.0.2" if rank else "head, rank=0, pid=7"
        for line in done.stdout.splitlines():
            print(f"\\x1b[36m({{node}})\\x1b[0m {{line}}", flush=True)
    while not (here / "end").exists():
        time.sleep(0.05)
    sys.exit(int((here / "end").read_text()))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    found = StandIns(tmp_path, monkeypatch, sys.executable)
    found.write("sky", _sky(tmp_path))
    return found


def _sky(folder: Path, version: str = "0.14.1", server: str = "{}", down: int = 0) -> str:
    return SKY.format(folder=str(folder), version=version, server=server, down=down)


def _launcher(**options: object) -> SkyPilotLauncher:
    found = open_launcher("skypilot", options)
    assert isinstance(found, SkyPilotLauncher)
    return found


def _specs(*names: str) -> list[AgentSpec]:
    return [AgentSpec(name=name, arguments=("--relayed",), ticket=f"isthmus1-{name}") for name in names]


EVERY_OPTION = {
    "infra": "aws/us-east-1",
    "accelerators": "A100:8",
    "cpus": "8+",
    "memory": "32+",
    "instance_type": "p4d.24xlarge",
    "image_id": "ami-1",
    "use_spot": True,
    "workdir": ".",
}


@pytest.mark.parametrize("options", [{}, EVERY_OPTION], ids=["plain", "every option"])
def test_the_task_is_as_its_schema_demands(options: dict[str, object]) -> None:
    shown = _launcher(**options).render(_specs("desk", "rack/1"), Path())
    task = yaml.safe_load(shown)
    check_task(task)
    assert (task["num_nodes"], set(task["secrets"].values())) == (2, {None}) and "isthmus1-" not in shown
    assert {key: task["resources"][key] for key in options if key != "workdir"} == {
        key: value for key, value in options.items() if key != "workdir"
    }


@pytest.mark.parametrize(
    "wrong", [{"nodes": 2}, {"num_nodes": "2"}, {"secrets": {"A": 1}}, {"resources": {"infra": "nowhere"}}]
)
def test_the_schema_refuses_what_is_wrong(wrong: dict[str, Any]) -> None:
    task = yaml.safe_load(_launcher().render(_specs("desk"), Path()))
    with pytest.raises(jsonschema.ValidationError):
        check_task(task | wrong)


def test_a_job_from_launch_to_down(programs: StandIns, tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text('#!/bin/sh\necho "$@"\nenv | grep -c ISTHMUS_TICKET\ncat\n')
    words.chmod(0o755)
    launcher, said = _launcher(python=str(words)), list[tuple[str, str]]()
    launcher.check()
    launcher.start(_specs("desk", "rack/1"), tmp_path, lambda name, line: said.append((name, line)))
    file, tickets = tmp_path / "skypilot" / "task.yaml", tmp_path / "skypilot" / "tickets.env"
    assert "isthmus1-" not in file.read_text()
    soon(lambda: len(said) == 7)
    assert said[0] == ("skypilot", "Launching on a cloud")
    assert [name for name, _ in said[1:]] == ["desk"] * 3 + ["rack/1"] * 3
    assert said[1][1].startswith("-m isthmus join --name desk --state ") and said[1][1].endswith(" --relayed")
    assert [line for _, line in said[2:4]] == ["0", "isthmus1-desk"], "no secret in the environment, one on the input"
    assert said[6] == ("rack/1", "isthmus1-rack/1")
    assert launcher.states() == {"desk": AgentState.RUNNING, "rack/1": AgentState.RUNNING}
    assert not tickets.exists() and (tmp_path / "1" / ".isthmus-up" / "ticket").read_text() == "isthmus1-rack/1\n"
    assert stat.S_IMODE((tmp_path / "1" / ".isthmus-up" / "ticket").stat().st_mode) == 0o600

    (tmp_path / "end").write_text("100")
    soon(lambda: set(launcher.states().values()) == {AgentState.LOST})
    with pytest.raises(PeerError, match="skypilot: desk cannot be started again alone"):
        launcher.restart(_specs("desk")[0])
    launcher.stop()
    launcher.stop()
    cluster = programs.calls("sky")[2][3]
    launched = ["launch", "--yes", "--cluster", cluster, "--secret-file", str(tickets), str(file)]
    expected = [["--version"], ["api", "info", "--output", "json"], launched, ["down", "--yes", cluster]]
    assert programs.calls("sky") == expected
    assert (tmp_path / "down").exists() and not (tmp_path / "skypilot").exists()


def test_a_launch_is_ended_before_it_has_machines(programs: StandIns, tmp_path: Path) -> None:
    launcher, said = _launcher(python="true"), list[str]()
    launcher.start(_specs("desk"), tmp_path, lambda _, line: said.append(line))
    soon(lambda: said)
    assert launcher.states() == {"desk": AgentState.STARTING}
    programs.write("sky", _sky(tmp_path, down=1))
    with pytest.raises(PeerError, match=r"the machines may still run \(exit code 1\): sky down isthmus-"):
        launcher.stop()
    programs.write("sky", _sky(tmp_path))
    launcher.stop()
    assert not (tmp_path / "skypilot").exists()


def test_what_is_missing_is_said_in_one_line(
    programs: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.write("sky", _sky(tmp_path, version="0.9.2"))
    with pytest.raises(UserError, match=r"up --on skypilot needs SkyPilot 0.10, got 0.9.2: pip install -U skypilot"):
        _launcher().check()
    programs.write("sky", _sky(tmp_path, server="No SkyPilot API server is connected"))
    with pytest.raises(UserError, match="SkyPilot's API server does not answer: sky api start"):
        _launcher().check()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r'needs SkyPilot, got no sky here: pip install "skypilot\[aws\]"'):
        _launcher().check()


def test_a_number_is_text_where_an_option_is_text() -> None:
    task = yaml.safe_load(_launcher(cpus=4, memory=16).render(_specs("desk"), Path()))
    assert (task["resources"]["cpus"], task["resources"]["memory"]) == ("4", "16")
