"""SkyPilot: tasks by SkyPilot's own schema, and the life of their jobs with a stand-in for its command."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from isthmus.errors import PeerError, UserError
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, open_launcher
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
    sys.exit({down})
elif sys.argv[1] == "launch":
    cluster, file = (sys.argv[sys.argv.index(name) + 1] for name in ("--cluster", "--secret-file"))
    secrets = dict(line.split("=", 1) for line in open(file).read().split())
    task = yaml.safe_load(open(sys.argv[-1]))
    assert secrets.keys() == task["secrets"].keys() and task["num_nodes"] == 1
    print("\\x1b[1mLaunching\\x1b[0m on a cloud", flush=True)
    home = here / cluster
    home.mkdir()
    env = {{**os.environ, **secrets, "HOME": str(home), "SKYPILOT_NODE_RANK": "0"}}
    done = subprocess.run(["bash", "-c", task["run"]], env=env, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        print(f"\\x1b[36m(isthmus, pid=7)\\x1b[0m {{line}}", flush=True)
    while not (home / "end").exists():
        time.sleep(0.05)
    sys.exit(int((home / "end").read_text()))
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
    assert "isthmus1-" not in shown
    tasks = list(yaml.safe_load_all(shown))
    assert len(tasks) == 2, "SkyPilot ends all nodes of a task where one is lost: each agent has its own"
    for task, name in zip(tasks, ("desk", "rack/1"), strict=True):
        check_task(task)
        assert (task["num_nodes"], task["secrets"]) == (1, {"ISTHMUS_TICKET": None}) and f"--name {name} " in task[
            "run"
        ]
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


@pytest.fixture
def words(tmp_path: Path) -> str:
    """In place of the agent: it prints how it was called, whether it sees a secret, and its input."""
    path = tmp_path / "words"
    path.write_text('#!/bin/sh\necho "$@"\nenv | grep -c ISTHMUS_TICKET\ncat\n')
    path.chmod(0o755)
    return str(path)


def _launched(programs: StandIns) -> list[str]:
    """Clusters in the order of their launches."""
    return [call[3] for call in programs.calls("sky") if call[0] == "launch"]


def test_a_job_from_launch_to_down(programs: StandIns, tmp_path: Path, words: str) -> None:
    launcher, said = _launcher(python=words), list[tuple[str, str]]()
    launcher.check()
    launcher.start(_specs("desk", "rack/1"), tmp_path, lambda name, line: said.append((name, line)))
    folder = tmp_path / "skypilot"
    soon(lambda: len(said) == 8)
    for name in ("desk", "rack/1"):
        lines = [line for who, line in said if who == name]
        assert lines[0] == "Launching on a cloud"
        assert lines[1].startswith(f"-m isthmus join --name {name} --state ") and lines[1].endswith(" --relayed")
        assert lines[2:] == ["0", f"isthmus1-{name}"], "no secret in the environment, one on the input"
    assert launcher.states() == {"desk": AgentState.RUNNING, "rack/1": AgentState.RUNNING}
    one, two = sorted(_launched(programs))
    assert {path.name for path in folder.iterdir()} == {f"{one}.yaml", f"{two}.yaml"}, "tickets go once jobs have them"
    assert "isthmus1-" not in (folder / f"{one}.yaml").read_text()
    ticket = tmp_path / two / ".isthmus-up" / "ticket"
    assert (ticket.read_text(), stat.S_IMODE(ticket.stat().st_mode)) == ("isthmus1-rack/1\n", 0o600)

    (tmp_path / one / "end").write_text("0")
    soon(lambda: launcher.states() == {"desk": AgentState.ENDED, "rack/1": AgentState.RUNNING})
    launcher.stop()
    launcher.stop()
    calls = programs.calls("sky")
    assert calls[:2] == [["--version"], ["api", "info", "--output", "json"]]
    assert calls[-1] == ["down", "--yes", f"{one.rpartition('-')[0]}-*"], "whatever clusters there are"
    launch = [
        "launch",
        "--yes",
        "--cluster",
        one,
        "--secret-file",
        str(folder / f"{one}.env"),
        str(folder / f"{one}.yaml"),
    ]
    assert launch in calls and len(calls) == 5 and not folder.exists()


def test_one_lost_machine_is_one_lost_agent(programs: StandIns, tmp_path: Path, words: str) -> None:
    launcher, said = _launcher(python=words), list[tuple[str, str]]()
    launcher.start(_specs("desk", "rack"), tmp_path, lambda name, line: said.append((name, line)))
    soon(lambda: set(launcher.states().values()) == {AgentState.RUNNING})
    lost = next(
        path.parent for path in tmp_path.glob("*/.isthmus-up") if (path / "ticket").read_text() == "isthmus1-desk\n"
    )
    (lost / "end").write_text("100")
    soon(lambda: launcher.states() == {"desk": AgentState.LOST, "rack": AgentState.RUNNING})
    assert launcher.restarts
    launcher.restart(AgentSpec(name="desk", ticket="isthmus1-again"))
    soon(lambda: launcher.states() == {"desk": AgentState.RUNNING, "rack": AgentState.RUNNING})
    soon(lambda: ("desk", "isthmus1-again") in said)
    assert ["down", "--yes", "--async", lost.name] in programs.calls("sky"), "it is given back"
    assert len(set(_launched(programs))) == 3, "it has a machine of its own"
    launcher.stop()


def test_a_launch_is_ended_before_it_has_machines(programs: StandIns, tmp_path: Path) -> None:
    launcher, said = _launcher(python="true"), list[str]()
    launcher.start(_specs("desk"), tmp_path, lambda _, line: said.append(line))
    soon(lambda: said)
    assert launcher.states() == {"desk": AgentState.STARTING}
    programs.write("sky", _sky(tmp_path, down=1))
    with pytest.raises(PeerError, match=r"the machines may still run \(exit code 1\): sky down 'isthmus-\w+-\*'"):
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
    signed_out = "Authentication failed. Run: sky api login -e https://sky.example.org"
    programs.write("sky", _sky(tmp_path, server=signed_out))
    with pytest.raises(UserError, match=r"API server wants you to log in \(Authentication failed.*\): sky api login"):
        _launcher().check()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r'needs SkyPilot, got no sky here: pip install "skypilot\[aws\]"'):
        _launcher().check()


def test_a_number_is_text_where_an_option_is_text() -> None:
    task = yaml.safe_load(_launcher(cpus=4, memory=16).render(_specs("desk"), Path()))
    assert (task["resources"]["cpus"], task["resources"]["memory"]) == ("4", "16")
